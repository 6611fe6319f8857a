# Every goal does its own set-up: .venv is made, or brought up to date, by launch/make-venv.
#   PYTHON=/path/to/python3.12   interpreter for .venv (found by launch/find-python otherwise)
#   EXTRAS=tracking,dev          extras to install; tracking is the full MLflow
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-slurm soak-slurm test-image test-gpu test-2gpu lint types format clean

BIN := .venv/bin
export PYTHON EXTRAS CONSTRAINTS

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## make .venv, or bring it up to date
	@launch/make-venv

demo: venv ## build a small corpus, train baseline and mhar on it, compare them in runs/demo (continues where it stopped)
	$(BIN)/mhar data demo
	$(BIN)/mhar train configs/demo/baseline.yaml
	$(BIN)/mhar train configs/demo/mhar.yaml
	$(BIN)/mhar compare runs/demo-baseline runs/demo-mhar --out runs/demo

test: venv ## run the whole test suite
	$(BIN)/python -m pytest

test-all: venv ## run the whole test suite, every method under every parallel layout
	$(BIN)/python -m pytest --tier all

test-slurm: venv ## the job files on a real Slurm of this machine (as root on Debian it is installed)
	tests/slurm/cluster $(BIN)/python -m pytest tests/slurm/test_cluster.py tests/slurm/test_faults.py

soak-slurm: venv ## 50 faults at random times on that Slurm, or as many as 15 minutes bring (FAULTS, MINUTES, SEED)
	tests/slurm/cluster $(BIN)/python -m pytest -q tests/slurm/test_soak.py

test-image: venv ## build docker/Dockerfile on plain Debian without Docker and train the demo in it (as root on Debian)
	docker/test-image

test-gpu: ## the tests on a GPU in PYTHON's environment as it is; a JSON goes to results/gpu, or RESULTS (ARGS: pytest's)
	$(or $(PYTHON),$(BIN)/python) -m tests.gpu $(ARGS)

test-2gpu: ## the parallel layouts over NCCL on two GPUs in PYTHON's environment (ARGS=--help: parts of it)
	$(or $(PYTHON),$(BIN)/python) -m tests.two_gpu.run $(ARGS)

lint: venv ## check style (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## check types (mypy)
	$(BIN)/mypy

format: venv ## mend style (ruff)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and caches; runs and data stay
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
