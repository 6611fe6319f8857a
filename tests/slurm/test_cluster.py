"""The job files on a real Slurm: taken, checked, run, alone and one after another, with and without containers.

Started by make test-slurm, on the cluster of tests/slurm/cluster.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_mhar.cli.submit import submit
from megatron_mhar.launch.attempts import read_attempts
from megatron_mhar.run_files import RunFiles, RunSummary
from tests.launch import ROOT
from tests.slurm.jobs import PATIENCE_S, Job, job_environment, job_state, slurm, until, until_completed

pytestmark = pytest.mark.timeout(1800)


def test_bad_input_ends_the_job_with_its_reason(job: Job) -> None:
    job.submit(overrides=("data.train=[/no/such]",))
    job.until_over("FAILED")
    assert re.fullmatch(
        r"rank \d .* ended with code 2: .*/no/such.*; not requeued: it would end the same", job.ends()[0]
    )


JOBS = sorted((ROOT / "slurm").glob("*.sbatch"))


SCRIPTS = (
    "slurm/common.sh", "launch/node", "launch/find-python", "launch/make-venv", "docker/test-image",
    "tests/slurm/cluster", ".ci/run",
)  # fmt: skip


def test_scripts_are_clean() -> None:
    scripts = [*JOBS, *(ROOT / name for name in SCRIPTS)]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_slurm_takes_every_job_file(path: Path) -> None:
    """Node counts overridden: this cluster is smaller."""
    slurm("sbatch", "--test-only", "--nodes=2", str(path))


def test_what_slurm_takes_and_we_refuse(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real cluster: the time that sbatch --test-only lets pass; the shared folder as a node sees it."""
    values = {
        "MHAR_ROOT": ROOT, "MHAR_VENV": Path(sys.executable).parents[1], "MHAR_OUTPUT_DIR": tmp_path / "out",
        "MHAR_TRAIN_DATA": f"[{corpus}/train]", "MHAR_VALID_DATA": f"[{corpus}/valid]",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(ROOT)
    arguments = ["--check", "--time", "120", "slurm/pretrain_1b.sbatch"]
    good = CliRunner().invoke(submit, arguments)
    assert good.exit_code == 0, good.exception
    assert "not checked" not in good.output
    slurm("sbatch", "--test-only", "--partition=short", *arguments[1:3], arguments[3])
    bad = CliRunner().invoke(submit, ["--partition", "short", *arguments])
    assert "time: 120 given, but partition short allows 01:00:00" in str(bad.exception)


# What makes any of the recipes small enough for one core.
SMALL = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_query_groups=2",
    "model.ffn_hidden_size=96", "training.sequence_length=32", "training.precision=fp32", "evaluation.batches=2",
    "tracking.enabled=false", "data.num_workers=0",
)  # fmt: skip
SHORT = (
    "training.steps=4", "training.global_batch_size=4", "training.micro_batch_size=2", "optimizer.warmup_steps=1",
    "evaluation.interval=2", "data.end_of_document=0",
)  # fmt: skip


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a user whose jobs get one GPU a node; whatever a test leaves of them is ended."""
    yield job_environment(tmp_path / "runs", SBATCH_GPUS_PER_NODE="1")
    slurm("scancel", "--user=root")
    until("an empty queue", lambda: not slurm("squeue", "--noheader"))


@pytest.mark.parametrize("container", [None, "mhar.sqsh"], ids=["venv", "pyxis"])
def test_smoke_test_with_and_without_a_container(
    environment: dict[str, str], tmp_path: Path, container: str | None
) -> None:
    """The same job file. Every step of it is given to the container plugin, or none is."""
    seen, log = tmp_path / "seen", tmp_path / "smoke.log"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("mhar", "python3"):  # what the image would have on its path
        (folder / name).write_text(
            "#!/usr/bin/env bash\n"
            f"env | grep ^MHAR_TEST_CONTAINER_ | sort | paste -s -d ' ' >>{seen}\n"
            f'exec {Path(sys.executable).parent}/{name} "$@"\n'
        )
        (folder / name).chmod(0o755)
    environment |= {"SBATCH_GPUS_PER_NODE": "2", "MHAR_VENV": str(tmp_path)}  # the folder above bin
    if container is not None:
        environment |= {"MHAR_CONTAINER": container, "PATH": f"{folder}:{environment['PATH']}"}
    command = ["sbatch", "--parsable", f"--output={log}", str(ROOT / "slurm/smoke_test.sbatch"), *SMALL]
    number = slurm(*command, "residual.num_heads=4", env=environment).strip()
    until_completed(number, log)
    run_dir = tmp_path / "runs" / f"smoke-{number}"
    assert RunSummary.read(RunFiles(run_dir).summary).steps == 6
    assert "continued from" in log.read_text(), "the second start goes on from the first one's checkpoint"
    steps = {line for line in seen.read_text().splitlines() if line}
    mounts = f"{ROOT}:{ROOT},{tmp_path}/runs:{tmp_path}/runs"
    assert steps == (
        set()
        if container is None
        else {
            f"MHAR_TEST_CONTAINER_IMAGE={ROOT}/{container} MHAR_TEST_CONTAINER_MOUNTS={mounts} "
            f"MHAR_TEST_CONTAINER_WORKDIR={ROOT}"
        }
    )


def test_a_job_array(environment: dict[str, str], corpus: Path, tmp_path: Path) -> None:
    """Two of the four methods, a task each. The last one, whose number is the array's, is started on a bad node."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/usr/bin/env bash\n"
        'errors=0; [ "$SLURM_ARRAY_TASK_ID/${SLURM_RESTART_COUNT:-0}" != 3/0 ] || errors=3\n'
        'for i in 0 1 2 3 4 5 6 7; do echo "$i, GPU-$i, 81559, 600, $errors"; done\n'
    )
    tool.chmod(0o755)
    environment |= {"MHAR_TRAIN_DATA": f"[{corpus}/train]", "MHAR_VALID_DATA": f"[{corpus}/valid]"}
    environment["PATH"] = f"{tool.parent}:{environment['PATH']}"
    command = ["sbatch", "--parsable", "--array=0,3", f"--output={tmp_path}/%a.log"]
    overrides = (str(ROOT / "slurm/compare_methods.sbatch"), *SMALL, *SHORT, "model.vocab_size=128")
    number = slurm(*command, *overrides, env=environment).strip()
    for task, method in ((0, "baseline"), (3, "mhar")):
        until_completed(f"{number}_{task}", tmp_path / f"{task}.log")
        summary = RunSummary.read(RunFiles(tmp_path / "runs" / f"100m-{method}").summary)
        assert (summary.method, summary.steps) == (method, 4)
    (start, end), (first, bad, second, last) = (
        read_attempts(tmp_path / "runs" / f"100m-{m}") for m in ("baseline", "mhar")
    )
    assert (start.event, end.text) == ("start", "finished"), "what happens to one task does not happen to the others"
    assert first.job == number and last.text == "finished"
    node = first.text.removeprefix("on ")
    assert bad.text.startswith(f"node {node} is bad") and f"requeued without {node}, goes on from step 0" in bad.text
    assert second.text.startswith("on ") and node not in second.text


def send(environment: dict[str, str], folder: Path, *arguments: str) -> tuple[str, Path, str]:
    """Submit by mhar submit, from a folder where logs may lie: the job's number and log, and what was not checked."""
    *options, name = arguments[: (end := next(i for i, word in enumerate(arguments) if "sbatch" in word) + 1)]
    done = subprocess.run(
        [
            sys.executable, "-m", "megatron_mhar.cli.main", "submit", *options, str(ROOT / "slurm" / name),
            *arguments[end:],
        ],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    match = re.search(r"Submitted batch job (\d+)", done.stdout)
    assert match is not None, done.stdout
    log = re.search(r"StdOut=(\S+)", slurm("scontrol", "show", "job", match[1]))
    assert log is not None
    return match[1], Path(log[1]), done.stderr


def test_data_then_training_then_evaluation(environment: dict[str, str], tmp_path: Path) -> None:
    """Submitted at once; each waits for the one before."""
    corpus, run_dir = tmp_path / "corpus", tmp_path / "runs" / "1b-mhar"
    environment |= {"MHAR_TRAIN_DATA": f"[{corpus}/train]", "MHAR_VALID_DATA": f"[{corpus}/valid]"}
    little = ("--out", str(corpus), "--min-mb", "1", "--max-mb", "1", "--vocab-size", "512")
    data, *first = send(environment, tmp_path, "prepare_data.sbatch", *little)
    overrides = (*SMALL, *SHORT, "model.vocab_size=512")
    training, *second = send(environment, tmp_path, "--after", data, "pretrain_1b.sbatch", *overrides)
    assert "data: the job waits for others, which may make it" in str(second[1])
    evaluation, *third = send(environment, tmp_path, "--after", training, "evaluate.sbatch", str(run_dir))
    assert (job_state(training), job_state(evaluation)) == ("PENDING", "PENDING")
    for number, log in ((data, first[0]), (training, second[0]), (evaluation, third[0])):
        until_completed(number, Path(log))
    summary = RunSummary.read(RunFiles(run_dir).summary)
    found = json.loads(RunFiles(run_dir).evaluation_of(4).read_text())
    assert summary.steps == found["step"] == 4
    assert found["loss"] == pytest.approx(summary.valid_loss_last, abs=1e-6)


def test_what_waits_for_a_job_that_fails_is_removed(environment: dict[str, str], tmp_path: Path) -> None:
    command = ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap", "exit 1"]
    failing = slurm(*command, env=environment).strip()
    waiting, *_ = send(environment, tmp_path, "--after", failing, "prepare_data.sbatch")
    slurm("scontrol", "release", failing)
    until("its removal", lambda: job_state(waiting) == "CANCELLED")
