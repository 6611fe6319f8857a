"""``attempts.tsv`` of a run folder: every start and end of the run under Slurm, as ``slurm/common.sh`` writes them.

A line is ``time  event  job  restart  step  text``, with tabs: UTC time, ``start`` or ``end``, Slurm's job number, how
often that job had been requeued, the step of the newest complete checkpoint then, and where or why.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_mhar.errors import UserError


class Attempt(NamedTuple):
    """One line."""

    time: datetime
    event: Literal["start", "end"]
    job: str
    restart: int
    step: int
    text: str


def attempts_path(run_dir: Path) -> Path:
    """The file in the run folder ``run_dir``."""
    return run_dir / "attempts.tsv"


def read_attempts(run_dir: Path) -> list[Attempt]:
    """All starts and ends in the order of time; none where Slurm has not run it. A torn or damaged line is left out.

    Raises:
        UserError: the file cannot be read.
    """
    path = attempts_path(run_dir)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return [attempt for line in lines if (attempt := _parse(line)) is not None]


def started(attempts: Sequence[Attempt]) -> bool:
    """Whether a job has started and not ended. Another one that was submitted for the run ends at once, and is none."""
    last = {attempt.job: attempt.event for attempt in attempts}
    return "start" in last.values()


def requeued(attempts: Sequence[Attempt]) -> bool:
    """Whether the last job to end has asked to be started again. That it was cancelled since is not known here."""
    return bool(attempts) and attempts[-1].event == "end" and "; requeued" in attempts[-1].text


def _parse(line: str) -> Attempt | None:
    try:
        time, event, job, restart, step, text = line.split("\t")
        if event not in ("start", "end"):
            return None
        kind: Literal["start", "end"] = "start" if event == "start" else "end"
        when = datetime.fromisoformat(time)
        if when.tzinfo is None or not 1970 < when.year < 9999:  # damaged; at the ends no other time zone has it
            return None
        return Attempt(when, kind, job, int(restart), int(step), text)
    except (ValueError, OverflowError):
        return None
