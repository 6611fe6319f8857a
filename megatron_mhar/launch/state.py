"""Where a run is, from the files of its folder alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from megatron_mhar.config.load import load_config
from megatron_mhar.errors import UserError
from megatron_mhar.launch.attempts import Attempt, read_attempts, requeued, started
from megatron_mhar.run_files import GOES_ON, STARTS_ANEW, RunFiles, RunSummary, checkpoint_steps
from megatron_mhar.tracking.journal import read_journal

State = Literal["finished", "running", "ended", "requeued", "silent", "new"]

_REPORTS = 200  # the newest ones, by which speed is judged
_PAUSE = 20  # so many times the usual time of a step is a pause between two starts
_SILENT_S = 300.0  # a run that says nothing for this long, and for five reports, does not run


@dataclass(frozen=True)
class RunState:
    """Where a run is.

    Attributes:
        name: of the run.
        state: ``finished``; ``running`` (it has said something lately); ``ended`` (its last start has an end);
            ``requeued`` (the same, but its job has asked to be started again); ``silent`` (it should run and says
            nothing); ``new`` (no step is done).
        step: last step in the journal. After a resume it may be lower than one before.
        steps: of the whole run.
        step_seconds: mean of the last reports, evaluations and saves in it; None before two reports.
        tokens_per_second: of the last report, all ranks together.
        train_loss: (step, nats a token), the last one.
        valid_loss: likewise.
        checkpoint: step of the newest complete checkpoint, None without one.
        heard: when the last report was written.
        failure: when and why a rank failed first, where launch/node was started by hand; under Slurm attempts tell it.
        attempts: starts and ends under Slurm.
        last_words: last lines of log.txt.
    """

    name: str
    state: State
    step: int
    steps: int
    step_seconds: float | None
    tokens_per_second: float | None
    train_loss: tuple[int, float] | None
    valid_loss: tuple[int, float] | None
    checkpoint: int | None
    heard: datetime | None
    failure: tuple[datetime, str] | None
    attempts: tuple[Attempt, ...]
    last_words: tuple[str, ...]

    def remaining(self) -> timedelta | None:
        """Time of the steps that are left, if they take as long as the last ones; None where that is not known.

        What is not saved is to be done again, unless the run is running.
        """
        if self.state == "finished" or self.step_seconds is None:
            return None
        done = self.step if self.state == "running" else self.checkpoint or 0
        return timedelta(seconds=self.step_seconds * max(0, self.steps - done))


def read_state(run_dir: Path, *, now: datetime | None = None) -> RunState:
    """The state of the run in ``run_dir``. Reads only, and needs nothing that runs.

    Raises:
        UserError: the folder holds no run, or a file of it cannot be read.
    """
    files, attempts = RunFiles(run_dir), read_attempts(run_dir)
    if not files.config.is_file():
        if attempts:
            raise UserError(f"{run_dir}: started, but it came to no run yet; last: {attempts[-1].text}")
        raise UserError(f"{run_dir}: holds no run of mhar train (it has no config.yaml)")
    config = load_config(files.config)
    last: dict[str, tuple[int, float]] = {}
    reports: list[tuple[int, float]] = []
    step = 0
    for entry in read_journal(files.journal) if files.journal.is_file() else ():
        step = entry.step
        last.update({name: (entry.step, value) for name, value in entry.metrics.items()})
        if "train/tokens_per_second" in entry.metrics:  # the last of the steps that are reported together
            reports.append((entry.step, entry.time_ms / 1000))
    heard = datetime.fromtimestamp(reports[-1][1], UTC) if reports else None
    seconds = step_seconds(reports[-_REPORTS:])
    speed, steps = last.get("train/tokens_per_second"), checkpoint_steps(files.checkpoints)
    failure = None if attempts else last_failure(run_dir)
    if failure is not None and heard is not None and failure[0] < heard:
        failure = None
    summary = RunSummary.read(files.summary) if files.summary.is_file() else None
    words = _last_lines(files.log, 3)
    state: State
    if summary is not None and summary.steps == config.training.steps:
        state = "finished"
    elif not attempts and words and (GOES_ON in words[-1] or STARTS_ANEW in words[-1]):
        state = "ended"
    elif failure is not None or (attempts and not started(attempts)):
        state = "requeued" if requeued(attempts) else "ended"
    else:
        patience = max(_SILENT_S, 5 * (seconds or 0.0) * config.training.log_interval)
        # A start takes its time before the first report.
        begun = max((time for time in (heard, attempts[-1].time if attempts else None) if time), default=None)
        quiet = begun is not None and ((now or datetime.now(UTC)) - begun).total_seconds() > patience
        state = "silent" if quiet else "running" if heard else "new"
    return RunState(
        name=config.name,
        state=state,
        step=step,
        steps=config.training.steps,
        step_seconds=seconds,
        tokens_per_second=speed[1] if speed else None,
        train_loss=last.get("train/loss"),
        valid_loss=last.get("valid/loss"),
        checkpoint=steps[-1] if steps else None,
        heard=heard,
        failure=failure,
        attempts=tuple(attempts),
        last_words=words,
    )


def last_failure(run_dir: Path) -> tuple[datetime, str] | None:
    """When and why a rank failed first, from the newest folder of logs; None where no node has left a reason there.

    Evaluations have logs of their own, which are not looked at.
    """
    folders = sorted((run_dir / "logs").glob("[!e]*/"), key=lambda folder: folder.stat().st_mtime)
    found = []
    for file in folders[-1].glob("node-*.end") if folders else ():
        with suppress(OSError, ValueError, OverflowError):
            seconds, code, reason = file.read_text(encoding="utf-8", errors="replace").strip().split(" ", 2)
            found.append((code != "2", datetime.fromtimestamp(float(seconds), UTC), reason))
    if not found:
        return None
    _, time, reason = min(found)  # what mhar refuses is no consequence of another's end
    return time, reason


def step_seconds(reports: Sequence[tuple[int, float]]) -> float | None:
    """Mean seconds a step from (step, time) of reports; pauses and steps done again are left out."""
    spans = [
        (seconds, steps)
        for (before, began), (after, ended) in zip(reports, reports[1:])
        if (steps := after - before) > 0 and (seconds := ended - began) >= 0
    ]
    if not spans:
        return None
    usual = statistics.median(seconds / steps for seconds, steps in spans)
    kept = [(seconds, steps) for seconds, steps in spans if seconds <= _PAUSE * usual * steps]
    return sum(seconds for seconds, _ in kept) / sum(steps for _, steps in kept)


def _last_lines(path: Path, count: int) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.strip())[-count:]
