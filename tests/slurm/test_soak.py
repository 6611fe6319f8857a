"""Many faults at random times, on demand: nothing is lost, and nothing hangs.

    make soak-slurm [FAULTS=50] [MINUTES=15] [SEED=n]

Run after run is disturbed until there were as many faults or the time is up; each must come to what the undisturbed one
came to. The seed is printed: the same one gives the same faults, at times as equal as the machine lets them be.
"""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.jobs import PATIENCE_S, STEPS, Job, Outcome, kill_node, start_node

FAULTS = int(os.environ.get("FAULTS") or 50)
MINUTES = float(os.environ.get("MINUTES") or 15)
LONGEST_PAUSE_S = 3.0
STEPPING = 0.5  # of the faults meet a run that has begun to train; the others may meet it anywhere, starting too


def tell(*command: str) -> bool:
    """Whether Slurm took it: it may be too late."""
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def signal_a_rank(send: str) -> Callable[[Job, random.Random], bool]:
    def act(job: Job, chance: random.Random) -> bool:
        ranks = sorted(job.ranks().items())
        if ranks:
            getattr(chance.choice(ranks)[1], send)()
        return bool(ranks)

    return act


def lose_a_node(job: Job, chance: random.Random) -> bool:
    """Slurm notices it, or the node is back before that; as in a cluster, where a reboot tells."""
    node = chance.choice(("node1", "node2"))
    kill_node(node)
    if chance.random() < 0.5:
        tell("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
        tell("scontrol", "update", f"NodeName={node}", "State=RESUME")
    start_node(node)
    return True


def wait_for_a_step(job: Job) -> None:
    """Until the run has gone on since now, or its job is over."""
    journal, size = job.files.journal, -1
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and not job.is_over() and not job.files.summary.exists():
        now = journal.stat().st_size if journal.exists() else 0
        if 0 <= size < now:
            return
        size = now
        time.sleep(1)


KINDS: dict[str, Callable[[Job, random.Random], bool]] = {
    "a rank is killed": signal_a_rank("kill"),
    "a rank hangs": signal_a_rank("suspend"),
    "a rank gets SIGTERM": signal_a_rank("terminate"),
    "a node is lost": lose_a_node,
    "requeued": lambda job, chance: tell("scontrol", "requeue", job.number),
    "cancelled": lambda job, chance: tell("scancel", job.number),
    "the time limit is near": lambda job, chance: tell("scancel", "--batch", "--signal=USR1", job.number),
}


@pytest.mark.timeout(60 * (MINUTES + 15))
def test_nothing_is_lost(
    corpus: Path, tmp_path: Path, output_dir: Path, undisturbed: Outcome, capfd: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("SEED") or secrets.randbelow(10**6))
    chance, done, runs = random.Random(seed), Counter[str](), 0

    def say(text: str) -> None:
        with capfd.disabled():
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    say(f"SEED={seed}: {FAULTS} faults or {MINUTES:g} minutes")
    end = time.monotonic() + 60 * MINUTES
    while done.total() < FAULTS and time.monotonic() < end:
        runs += 1
        folder = tmp_path / str(runs)
        folder.mkdir()
        level = chance.choice(("full", "quick", "quick"))  # the full check takes as long as the rest of a start
        job = Job(
            corpus, folder, output_dir, f"soak-{runs}", MHAR_RETRIES="1000", MHAR_WAIT="20", MHAR_HEALTH_CHECK=level
        )
        job.submit()
        try:
            last = time.monotonic()
            while not job.files.summary.exists():
                assert time.monotonic() < last + PATIENCE_S, (
                    f"no end since the last fault; the log:\n{job.text()[-5000:]}"
                )
                if job.is_over():
                    job.submit()  # cancelled, or stopped as asked: it is for its user to go on
                if done.total() == FAULTS or time.monotonic() > end:
                    time.sleep(1)
                    continue
                if chance.random() < STEPPING:
                    wait_for_a_step(job)
                time.sleep(chance.uniform(0, LONGEST_PAUSE_S))
                kind = chance.choice(list(KINDS))
                # What is left to do must be more than to say that all is done.
                if job.state() == "RUNNING" and job.step() < STEPS - 2 and KINDS[kind](job, chance):
                    done[kind] += 1
                    last = time.monotonic()
                    say(f"{done.total()}: {kind}, at step {job.step()} of run {runs}")
            job.until_equal(undisturbed)
            say(f"run {runs} is as it should be, after {len(job.starts())} starts")
        finally:
            job.end()
    say(
        f"{done.total()} faults in {runs} runs, nothing lost: " + ", ".join(f"{n} x {kind}" for kind, n in done.items())
    )
    assert done.total() >= 0.6 * FAULTS, "a soak of so few faults shows little: more MINUTES, or a faster machine"
