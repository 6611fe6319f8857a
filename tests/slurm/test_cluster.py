"""Runs on a real Slurm of two nodes with two ranks each: what happens to a job does not happen to its run.

Started by make test-slurm, on the cluster of tests/slurm/cluster.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from megatron_mhar.cli.submit import submit
from megatron_mhar.config.load import dump_config
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.launch.attempts import Attempt, read_attempts
from megatron_mhar.launch.state import read_state
from megatron_mhar.run_files import RunFiles, RunSummary
from megatron_mhar.tracking.journal import load_metrics, read_journal
from tests.conftest import METHODS, tiny_run
from tests.launch import ROOT

pytestmark = pytest.mark.timeout(600)

STEPS = 40
SAVE_EVERY = 10
PATIENCE_S = 240
JOB = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --exclusive
#SBATCH --time=10
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}
source "$MHAR_ROOT/slurm/common.sh" || exit 2
train {name} {config} "$@"
"""
METRICS = ("train/loss", "train/grad_norm", "valid/loss")


def settings(corpus: Path, output_dir: Path, name: str) -> RunConfig:
    """Two tensor-parallel ranks on each of two nodes, two data-parallel ones over them."""
    return tiny_run(
        corpus, output_dir, name=name, residual=METHODS["mhar"],
        training={"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 1},
        evaluation={"interval": 15}, checkpoint={"interval": SAVE_EVERY},
        parallel={"tensor": 2, "sequence": True, "heartbeat_s": 10},
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, float]]]:
    """Metrics of the run under torchrun, on four ranks of this machine."""
    folder = tmp_path_factory.mktemp("torchrun")
    config = folder / "run.yaml"
    run = settings(corpus, folder / "runs", "run")
    config.write_text(dump_config(run))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4",
        "-m", "megatron_mhar.cli.main", "train", str(config),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return metrics(run)


def metrics(run: RunConfig) -> dict[str, list[tuple[int, float]]]:
    found = load_metrics(RunFiles(run.run_dir).journal)
    return {name: found[name] for name in METRICS}


class Job:
    """A job of its own run, submitted."""

    def __init__(self, corpus: Path, folder: Path, **environment: str) -> None:
        self.run = settings(corpus, folder / "runs", folder.name)
        self.log = folder / "job.log"
        (folder / "run.yaml").write_text(dump_config(self.run))
        self.file = folder / "job.sbatch"
        self.file.write_text(JOB.format(name=folder.name, log=self.log, config=folder / "run.yaml"))
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MHAR_"))} | {
            "SLURM_CONF": os.environ["SLURM_CONF"], "MHAR_ROOT": str(ROOT), "MHAR_OUTPUT_DIR": str(folder / "runs"),
            "MHAR_INTERFACE": "lo", "MHAR_VENV": str(Path(sys.executable).parents[1]), **environment,
        }  # fmt: skip
        self.number = ""

    def submit(self, *options: str) -> None:
        command = ["sbatch", "--parsable", *options, str(self.file)]
        self.number = slurm(*command, env=self.environment).strip()

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until(self, what: str, reached: Callable[[], bool]) -> None:
        begun = time.monotonic()
        while not reached():
            if time.monotonic() - begun > PATIENCE_S:
                pytest.fail(f"{what} was not reached; the job is {self.state()}; its log:\n{self.text()[-5000:]}")
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        journal = RunFiles(self.run.run_dir).journal

        def reached() -> bool:
            return journal.is_file() and any(entry.step >= step for entry in read_journal(journal))

        self.until(f"step {step}", reached)

    def until_finished(self) -> None:
        summary = RunFiles(self.run.run_dir).summary
        self.until("the end", summary.is_file)
        self.until("the end of the job", lambda: self.state() not in ("RUNNING", "COMPLETING", "PENDING"))
        assert self.state() == "COMPLETED", self.text()
        assert RunSummary.read(summary).steps == STEPS

    def state(self) -> str:
        match = re.search(r"JobState=(\w+)", slurm("scontrol", "show", "job", self.number))
        assert match is not None
        return match[1]

    def attempts(self) -> list[Attempt]:
        return read_attempts(self.run.run_dir)

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


def slurm(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture
def job(corpus: Path, tmp_path: Path) -> Iterator[Job]:
    """A job in a folder of its own; whatever a test leaves of it is ended."""
    job = Job(corpus, tmp_path)
    yield job
    if job.number:
        subprocess.run(["scancel", job.number], capture_output=True, timeout=60)
        job.until("its end", lambda: job.state() not in ("RUNNING", "COMPLETING", "PENDING"))


def test_sbatch_equals_torchrun_bit_for_bit(job: Job, undisturbed: dict[str, list[tuple[int, float]]]) -> None:
    job.submit()
    job.until_finished()
    assert metrics(job.run) == undisturbed
    assert job.ends() == ["finished"]
    (logs,) = (job.run.run_dir / "logs").iterdir()
    assert sorted(path.name for path in logs.iterdir()) == [f"rank-{rank:05d}.log" for rank in range(4)]
    text = job.text()
    assert f"start 1 of {job.run.run_dir} on node[1-2], from step 0" in text
    assert f"step {STEPS}/{STEPS}" in text and "4 ranks" in text, "rank 0 speaks in the job's log"
    assert read_state(job.run.run_dir).state == "finished"
    # Nothing is to be done any more.
    job.submit()
    job.until("the second end", lambda: "is finished already" in job.text())


def test_signal_before_the_limit(job: Job, undisturbed: dict[str, list[tuple[int, float]]]) -> None:
    """Slurm sends it up to a minute before the time asked for: here in the third minute."""
    job.submit("--time=4", "--signal=B:USR1@60")
    job.until_step(3)
    # Whatever this machine's speed, the signal finds the run between two steps.
    for process in job.ranks().values():
        process.suspend()
    job.until("the signal", lambda: "SIGUSR1: the time limit is near" in job.text())
    for process in job.ranks().values():
        process.resume()
    job.until("the requeue", lambda: len(job.ends()) > 0)
    slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")
    job.until_finished()
    assert metrics(job.run) == undisturbed
    first, last = job.ends()
    match = re.fullmatch(r"stopped ahead of the time limit \(SIGUSR1\); requeued, goes on from step (\d+)", first)
    assert match is not None and int(match[1]) >= 3 and last == "finished"
    assert first in job.text()
    assert f"start 2 of {job.run.run_dir} on node[1-2], from step {match[1]}" in job.text()
    # No step was done twice.
    losses = [entry.step for entry in read_journal(RunFiles(job.run.run_dir).journal) if "train/loss" in entry.metrics]
    assert losses == list(range(1, STEPS + 1))


def test_requeued_by_hand(job: Job, undisturbed: dict[str, list[tuple[int, float]]]) -> None:
    job.submit()
    job.until_step(12)
    slurm("scontrol", "requeue", job.number)
    job.until_finished()
    assert metrics(job.run) == undisturbed
    starts = [attempt for attempt in job.attempts() if attempt.event == "start"]
    assert [start.restart for start in starts] == [0, 1] and starts[1].step >= 10
    assert job.ends()[0].startswith("ended by Slurm (SIGTERM): cancelled, requeued by hand")
    assert job.ends()[0] in job.text()


def test_a_rank_is_killed(job: Job, undisturbed: dict[str, list[tuple[int, float]]]) -> None:
    job.submit()
    job.until_step(12)
    victim = job.ranks()[3]
    victim.kill()
    job.until_finished()
    assert metrics(job.run) == undisturbed
    first, last = job.ends()
    expected = rf"rank 3 on \S+ \(pid {victim.pid}\) was killed by SIGKILL; requeued, goes on from step (\d+)"
    match = re.fullmatch(expected, first)
    assert match is not None and int(match[1]) >= 10 and last == "finished"
    assert first in job.text()


def test_bad_input_ends_the_job_with_its_reason(job: Job) -> None:
    job.file.write_text(job.file.read_text().replace('"$@"', "data.train=[/no/such]"))
    job.submit()
    job.until("the end", lambda: len(job.ends()) > 0)
    job.until("the end of the job", lambda: job.state() == "FAILED")
    assert re.fullmatch(
        r"rank \d .* ended with code 2: .*/no/such.*; not requeued: it would end the same", job.ends()[0]
    )


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
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
