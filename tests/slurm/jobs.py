"""Jobs of tiny runs on the cluster of tests/slurm/cluster: submitted, watched, disturbed, compared."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from megatron_mhar.config.load import dump_config
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.launch.attempts import Attempt, read_attempts
from megatron_mhar.run_files import RunFiles, RunSummary, checkpoint_path, checkpoint_steps
from megatron_mhar.tracking.journal import load_metrics, read_journal
from tests.conftest import METHODS, tiny_run
from tests.launch import ROOT

STEPS = 40
SAVE_EVERY = 10
RANKS = 4
PATIENCE_S = 600  # of every wait: a loaded machine takes minutes to start four ranks
METRICS = ("train/loss", "train/grad_norm", "valid/loss")
ALIVE = ("RUNNING", "COMPLETING", "PENDING", "CONFIGURING")
JOB = """\
#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --exclusive
#SBATCH --time=60
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
source "$MHAR_ROOT/slurm/common.sh" || exit 2
train {name} {config} "$@"
"""


def settings(corpus: Path, output_dir: Path, name: str) -> RunConfig:
    """Two tensor-parallel ranks on each of two nodes, two data-parallel ones over them."""
    return tiny_run(
        corpus, output_dir, name=name, residual=METHODS["mhar"],
        training={"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 1},
        evaluation={"interval": 15}, checkpoint={"interval": SAVE_EVERY},
        parallel={"tensor": 2, "sequence": True, "heartbeat_s": 10, "join_s": 60, "timeout_s": 120},
        tracking={"enabled": True},
    )  # fmt: skip


class Outcome(NamedTuple):
    """What a run has come to: metrics by name as (step, value), every tensor of its last checkpoint by name."""

    metrics: Mapping[str, list[tuple[int, float]]]
    tensors: Mapping[str, Any]

    @classmethod
    def of(cls, run: RunConfig) -> Outcome:
        """The outcome of a finished run, from its files."""
        from megatron.core import dist_checkpointing

        files = RunFiles(run.run_dir)
        assert checkpoint_steps(files.checkpoints)[-1] == STEPS
        found = load_metrics(files.journal)
        tensors = dist_checkpointing.load_plain_tensors(str(checkpoint_path(files.checkpoints, STEPS)))
        return cls({name: found[name] for name in METRICS}, dict(_leaves(tensors)))

    def check_equal(self, other: Outcome) -> None:
        """Bit for bit: every step's metrics, and weights and optimizer state at the end."""
        import torch

        assert self.metrics == other.metrics
        assert self.tensors.keys() == other.tensors.keys() and any("site" in name for name in self.tensors)
        different = [name for name in self.tensors if not torch.equal(self.tensors[name], other.tensors[name])]
        assert not different, f"{len(different)} of {len(self.tensors)} tensors differ: {different[:3]}"

    def check_close(self, other: Outcome) -> None:
        """To rounding, as another layout computes it."""
        for name in ("train/loss", "valid/loss"):
            assert [step for step, _ in self.metrics[name]] == [step for step, _ in other.metrics[name]]
            mine, others = ([value for _, value in outcome.metrics[name]] for outcome in (self, other))
            assert mine == pytest.approx(others, abs=1e-5, rel=0), name


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list):
        for key, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(branch, f"{prefix}/{key}")
    elif hasattr(tree, "dtype"):
        yield prefix, tree


def train_undisturbed(corpus: Path, folder: Path) -> Outcome:
    """The run under torchrun, on four ranks of this machine."""
    run = settings(corpus, folder / "runs", "run")
    config = folder / "run.yaml"
    config.write_text(dump_config(run))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        "-m", "megatron_mhar.cli.main", "train", str(config), "tracking.enabled=false",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return Outcome.of(run)


def job_environment(output_dir: Path, **more: str) -> dict[str, str]:
    """What a user of this cluster would have in the environment, without what the tests themselves run in."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "MHAR_"))}
    return kept | {
        "SLURM_CONF": os.environ["SLURM_CONF"], "MHAR_ROOT": str(ROOT), "MHAR_OUTPUT_DIR": str(output_dir),
        "MHAR_INTERFACE": "lo", "MHAR_ALLOW_CPU": "1", "MHAR_VENV": str(Path(sys.executable).parents[1]),
        # Asked for by the test of the full check alone: it starts every rank twice.
        "MHAR_HEALTH_CHECK": "quick", **more,
    }  # fmt: skip


def slurm(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Output of a command of Slurm, which must succeed."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def until(
    what: str, reached: Callable[[], bool], *, told: Callable[[], str] = str, within_s: float = PATIENCE_S
) -> None:
    """Wait; fail with what ``told`` says if it takes too long."""
    end = time.monotonic() + within_s
    while not reached():
        if time.monotonic() > end:
            pytest.fail(f"{what} was not reached; {told()}")
        time.sleep(0.1)


def job_state(number: str) -> str:
    """State of a job, or of one task of an array (``12_3``)."""
    match = re.search(r"JobState=(\w+)", slurm("scontrol", "show", "job", number))
    assert match is not None
    return match[1]


def job_minutes(number: str) -> int:
    """Whole minutes that a job has been running."""
    match = re.search(r"RunTime=(\d+):(\d+):", slurm("scontrol", "show", "job", number))
    assert match is not None
    return 60 * int(match[1]) + int(match[2])


def until_completed(number: str, log: Path) -> None:
    """Wait for the end of a job, which must be a good one."""

    def told() -> str:
        return f"job {number} is {job_state(number)}; its log:\n{log.read_text()[-5000:] if log.exists() else ''}"

    until(f"the end of job {number}", lambda: job_state(number) not in ALIVE, told=told)
    assert job_state(number) == "COMPLETED", told()


class Job:
    """A job of a run of its own, in a folder of its own; runs of all jobs share ``output_dir`` and its MLflow store."""

    def __init__(self, corpus: Path, folder: Path, output_dir: Path, name: str, **environment: str) -> None:
        self.run = settings(corpus, output_dir, name)
        self.log = folder / "job.log"
        config = folder / "run.yaml"
        config.write_text(dump_config(self.run))
        self.file = folder / "job.sbatch"
        self.file.write_text(JOB.format(name=name, config=config))
        self.environment = job_environment(output_dir, **environment)
        self.files = RunFiles(self.run.run_dir)
        self.number = ""

    def submit(self, *options: str, overrides: tuple[str, ...] = ()) -> None:
        command = ["sbatch", "--parsable", f"--output={self.log}", f"--job-name={self.run.name}"]
        self.number = slurm(*command, *options, str(self.file), *overrides, env=self.environment).strip()

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until(self, what: str, reached: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
        def told() -> str:
            return f"the job is {self.state()}; its log:\n{self.text()[-5000:]}"

        until(what, reached, told=told, within_s=within_s)

    def step(self) -> int:
        """The last step in the journal."""
        if not self.files.journal.is_file():
            return 0
        return max((entry.step for entry in read_journal(self.files.journal)), default=0)

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: self.step() >= step or self.is_over())
        assert self.step() >= step, self.text()

    def until_over(self, *states: str) -> None:
        """Wait until the job is over, in one of these states."""
        self.until("the end of the job", self.is_over)
        assert self.state() in states, self.text()

    def until_finished(self) -> None:
        self.until_over("COMPLETED")
        assert RunSummary.read(self.files.summary).steps == STEPS

    def until_equal(self, undisturbed: Outcome) -> None:
        """Wait for the run's end, which must be that of the undisturbed one, in its files and in one MLflow run."""
        self.until_finished()
        Outcome.of(self.run).check_equal(undisturbed)
        self.check_tracked(undisturbed)

    def check_tracked(self, expected: Outcome) -> None:
        """One MLflow run, finished, over all starts; each step's metrics once."""
        with closing(sqlite3.connect(self.run.output_dir / "mlflow.db")) as store:
            runs = store.execute("SELECT run_uuid, status FROM runs WHERE name = ?", [self.run.name]).fetchall()
            assert [status for _, status in runs] == ["FINISHED"], runs
            for name, values in expected.metrics.items():
                query = "SELECT step, value FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY step"
                assert store.execute(query, [runs[0][0], name]).fetchall() == values, name

    def state(self) -> str:
        return job_state(self.number)

    def is_over(self) -> bool:
        return self.state() not in ALIVE

    def attempts(self) -> list[Attempt]:
        return read_attempts(self.run.run_dir)

    def starts(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts() if attempt.event == "start"]

    def ends(self) -> list[str]:
        return [attempt.text for attempt in self.attempts() if attempt.event == "end"]

    def ranks(self) -> dict[int, psutil.Process]:
        """Processes of the ranks by their number."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command, variables = process.cmdline(), process.environ()
                parent = process.parent()
                started_by_node = parent is not None and "megatron_mhar.launch.node" in parent.cmdline()
                if "train" in command and variables.get("SLURM_JOB_ID") == self.number and started_by_node:
                    found[int(variables["RANK"])] = process
        return found

    def end(self) -> None:
        """Cancel what is left of the job."""
        if self.number:
            subprocess.run(["scancel", self.number], capture_output=True, timeout=60)
            self.until("its end", self.is_over)


def kill_node(node: str) -> None:
    """What a power cut leaves of a node: nothing. Its slurmd and all that it runs are killed."""
    configuration = os.environ["SLURM_CONF"]
    victims: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command, variables = process.cmdline(), process.environ()
            if variables.get("SLURM_CONF") != configuration:
                continue
            if process.name() == "slurmd" and command[-1] == node:
                victims.add(process)
            if variables.get("SLURMD_NODENAME") == node:
                victims.add(process)
                victims.update(parent for parent in process.parents() if parent.name().startswith("slurmstepd"))
    # The daemon first: it must not live to tell of the others' end.
    for process in sorted(victims, key=lambda each: not each.name().startswith("slurm")):
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(victims, timeout=30)


def start_node(node: str) -> None:
    """Bring a killed node back."""
    slurm("slurmd", "-f", os.environ["SLURM_CONF"], "-N", node)


def until_idle(*nodes: str) -> None:
    """Wait until nodes are ready for a job."""

    def states() -> list[str]:
        return slurm(
            "sinfo", "--noheader", "--Node", "--partition=main", "--format=%T", "--nodes", ",".join(nodes)
        ).split()

    until(f"{', '.join(nodes)} idle", lambda: set(states()) == {"idle"}, told=lambda: " ".join(states()))
