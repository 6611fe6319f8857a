"""Runs on a real Slurm of two nodes with two ranks each: what happens to a job does not happen to its run.

Started by make test-slurm, on the cluster of tests/slurm/cluster. Whatever is done to a job, once its run is finished
its metrics, weights and optimizer state are those of an undisturbed one, bit for bit, in one MLflow run.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_mhar.launch.state import read_state
from megatron_mhar.run_files import checkpoint_steps
from megatron_mhar.tracking.journal import read_journal
from tests.slurm.jobs import (
    RANKS,
    SAVE_EVERY,
    STEPS,
    Job,
    Outcome,
    job_minutes,
    kill_node,
    slurm,
    start_node,
    until_idle,
)

pytestmark = pytest.mark.timeout(1800)


def test_sbatch_equals_torchrun_bit_for_bit(job: Job, undisturbed: Outcome) -> None:
    job.environment["MHAR_HEALTH_CHECK"] = "full"
    job.submit()
    job.until_equal(undisturbed)
    assert job.ends() == ["finished"]
    (logs,) = (job.run.run_dir / "logs").iterdir()
    assert sorted(path.name for path in logs.iterdir()) == [f"rank-{rank:05d}.log" for rank in range(RANKS)]
    text = job.text()
    assert f"start 1 of {job.run.run_dir} on node[1-2], from step 0" in text
    assert f"step {STEPS}/{STEPS}" in text and f"{RANKS} ranks" in text, "rank 0 speaks in the job's log"
    assert read_state(job.run.run_dir).state == "finished"
    # Nothing is to be done any more.
    job.submit()
    job.until_over("COMPLETED")
    assert f"finished at step {STEPS} already" in job.text()
    job.submit(overrides=("optimizer.lr=5",))
    job.until_over("FAILED")
    assert "holds a run with another config (optimizer.lr" in job.text(), "which is not finished"


def test_signal_before_the_limit(job: Job, undisturbed: Outcome) -> None:
    """Slurm looks every half minute whether the last minute has come: with a limit a minute or two from now, it has."""
    job.submit()
    job.until_step(3)
    # Whatever this machine's speed, the signal finds the run between two steps.
    for process in job.ranks().values():
        process.suspend()
    slurm("scontrol", "update", f"JobId={job.number}", f"TimeLimit={job_minutes(job.number) + 2}")
    job.until("the signal", lambda: "SIGUSR1: the time limit is near" in job.text())
    slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    for process in job.ranks().values():
        process.resume()
    job.until_equal(undisturbed)
    first, last = job.ends()
    match = re.fullmatch(r"stopped ahead of the time limit \(SIGUSR1\); requeued, goes on from step (\d+)", first)
    assert match is not None and int(match[1]) >= 3 and last == "finished"
    assert first in job.text()
    assert f"start 2 of {job.run.run_dir} on node[1-2], from step {match[1]}" in job.text()
    # No step was done twice.
    losses = [entry.step for entry in read_journal(job.files.journal) if "train/loss" in entry.metrics]
    assert losses == list(range(1, STEPS + 1))


def test_requeued_by_hand(job: Job, undisturbed: Outcome) -> None:
    job.submit()
    job.until_step(12)
    slurm("scontrol", "requeue", job.number)
    job.until_equal(undisturbed)
    starts = job.starts()
    assert [start.restart for start in starts] == [0, 1] and starts[1].step >= SAVE_EVERY
    assert job.ends()[0].startswith("ended by Slurm (SIGTERM): cancelled, requeued by hand")
    assert job.ends()[0] in job.text()


def test_cancelled(job: Job, undisturbed: Outcome) -> None:
    """It saves, says so, and stays away until it is submitted again; another job for the run is refused until then."""
    job.submit()
    job.until_step(12)
    first = job.number
    job.submit()
    job.until_over("FAILED")
    assert f"{job.run.run_dir}: job {first} is training in this folder" in job.text()
    job.number = first
    slurm("scancel", job.number)
    job.until_over("CANCELLED")
    (end,) = job.ends()
    assert end.startswith("ended by Slurm (SIGTERM): cancelled") and end in job.text()
    saved = checkpoint_steps(job.files.checkpoints)[-1]
    assert saved >= 12
    job.submit()
    job.until_equal(undisturbed)
    assert [start.step for start in job.starts()] == [0, saved]


def test_a_rank_is_killed(job: Job, undisturbed: Outcome) -> None:
    job.submit()
    job.until_step(12)
    victim = job.ranks()[3]
    victim.kill()
    job.until_equal(undisturbed)
    first, last = job.ends()
    expected = rf"rank 3 on node2 \(pid {victim.pid}\) was killed by SIGKILL; requeued, goes on from step (\d+)"
    match = re.fullmatch(expected, first)
    assert match is not None and int(match[1]) >= SAVE_EVERY and last == "finished"
    assert first in job.text()


def test_a_rank_hangs(job: Job, undisturbed: Outcome) -> None:
    """Stopped within a collective, it says nothing more; its neighbour in the ring of ranks tells."""
    job.submit()
    job.until_step(12)
    victim = job.ranks()[2]
    victim.suspend()
    job.until_equal(undisturbed)
    first, last = job.ends()
    assert re.search(rf"rank 2 on host \S+ \(pid {victim.pid}\) has not been heard from for \d+ s", first)
    assert "; requeued, goes on from step " in first and last == "finished" and first in job.text()


@pytest.mark.parametrize("node,reason", [
    # With the first node goes the job's script: Slurm starts the job again, and that start tells of it.
    ("node1", "the start before ended without a word: its first node was lost"),
    # The first node's launcher notices at once; its ranks end once they have, or when Slurm has.
    ("node2", "node node2 is lost: its launch/node has ended without a word.*; (requeued, goes|Slurm ends the job)"),
])  # fmt: skip
def test_a_node_is_lost(job: Job, undisturbed: Outcome, node: str, reason: str) -> None:
    job.submit()
    job.until_step(12)
    try:
        kill_node(node)
        job.until_equal(undisturbed)
    finally:
        start_node(node)
        until_idle(node)
    first, last = job.ends()
    assert re.search(reason, first) and first in job.text() and last == "finished"
    assert f"on {job.starts()[1].text.removeprefix('on ')}, from step" in job.text()
    assert node not in job.starts()[1].text, "a third node has stepped in"
    assert job.starts()[1].step >= SAVE_EVERY


def test_a_bad_node_is_replaced(job: Job, undisturbed: Outcome, tmp_path: Path) -> None:
    """What its nvidia-smi says is seen before a rank starts; the next start is without the node."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/usr/bin/env bash\n"
        'errors=0; [ "$SLURMD_NODENAME" != node2 ] || errors=3\n'
        'for i in 0 1 2 3 4 5 6 7; do echo "$i, GPU-$i, 81559, 600, $((i == 1 ? errors : 0))"; done\n'
    )
    tool.chmod(0o755)
    job.environment["PATH"] = f"{tool.parent}:{job.environment['PATH']}"
    job.submit("--exclude=node4")
    job.until_equal(undisturbed)
    assert [start.text for start in job.starts()] == ["on node[1-2]", "on node[1,3]"]
    reason = "node node2 is bad: GPU 1 (GPU-1) has 3 uncorrected ECC errors since its last reset"
    assert job.ends() == [f"{reason}; requeued without node2, goes on from step 0", "finished"]
    assert job.ends()[0] in job.text()
    excluded = re.search(r"ExcNodeList=(\S+)", slurm("scontrol", "show", "job", job.number))
    assert excluded is not None
    hosts = slurm("scontrol", "show", "hostnames", excluded[1]).split()
    assert sorted(hosts) == ["node2", "node4"], "what was asked for at submission stays"


def fill(folder: Path) -> None:
    """Leave no byte free on the file system of ``folder``."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def unfill(folder: Path) -> None:
    (folder / "filler").unlink()


def mount(*options: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        subprocess.run(["mount", *options, str(folder)], check=True, timeout=60)

    return act


@pytest.fixture
def own_file_system(job: Job) -> Iterator[Path]:
    """The run folder as a file system of its own, of 64 MB."""
    folder = job.run.run_dir
    folder.mkdir(parents=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "mhar-test", str(folder)], capture_output=True, text=True, timeout=60
    )
    if made.returncode:
        pytest.skip(f"nothing may be mounted here: {made.stderr.strip()}")
    yield folder
    job.end()
    subprocess.run(["umount", "--recursive", "--lazy", str(folder)], check=True, timeout=60)


@pytest.mark.parametrize("harm,mend,reason", [
    (fill, unfill, "0.0 MB are free there"),
    (mount("-o", "remount,ro"), mount("-o", "remount,rw"), "Read-only file system"),
], ids=["full", "read-only"])  # fmt: skip
def test_a_checkpoint_cannot_be_written(
    job: Job, undisturbed: Outcome, own_file_system: Path,
    harm: Callable[[Path], None], mend: Callable[[Path], None], reason: str,
) -> None:  # fmt: skip
    """The job ends and says why; it is not requeued, and goes on once the cause is gone and it is submitted again."""
    checkpoints = job.files.checkpoints
    if reason.startswith("Read"):  # a mount below the run folder, where a journal may still be written
        checkpoints.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "mhar-test", str(checkpoints)], check=True, timeout=60)
    where = checkpoints if os.path.ismount(checkpoints) else own_file_system
    job.submit()
    job.until_step(SAVE_EVERY + 2)
    harm(where)
    job.until_over("FAILED")
    assert re.search(rf"the checkpoint cannot be written \(.*{reason}.*goes on from step {SAVE_EVERY}", job.text())
    assert "not requeued: it would end the same" in job.text()
    assert checkpoint_steps(checkpoints) == [SAVE_EVERY]
    mend(where)
    job.submit()
    job.until_equal(undisturbed)


def test_goes_on_with_another_number_of_nodes(job: Job, undisturbed: Outcome) -> None:
    """The order of the data is the same; sums over fewer ranks differ by rounding."""
    stop = STEPS // 2
    job.submit(overrides=(f"training.stop_after={stop}",))
    job.until_over("COMPLETED")
    assert job.ends()[0].startswith("stopped as asked")
    job.submit("--nodes=1")
    job.until_finished()
    assert [(start.text, start.step) for start in job.starts()] == [("on node[1-2]", 0), ("on node1", stop)]
    outcome = Outcome.of(job.run)
    outcome.check_close(undisturbed)
    job.check_tracked(outcome)
    assert "2 ranks" in job.text().split("start 1 of")[-1]
