"""``attempts.tsv`` of a run folder: every start and end of the run under Slurm, as ``slurm/common.sh`` writes them.

A line is ``time  event  job  restart  step  text``, with tabs: UTC time, ``start`` or ``end``, Slurm's job number, how
often that job had been requeued, the step of the newest complete checkpoint then, and where or why.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple


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
    """All starts and ends in the order of time; none where Slurm has not run it. A torn or damaged line is left out."""
    try:
        lines = attempts_path(run_dir).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [attempt for line in lines if (attempt := _parse(line)) is not None]


def _parse(line: str) -> Attempt | None:
    try:
        time, event, job, restart, step, text = line.split("\t")
        if event not in ("start", "end"):
            return None
        kind: Literal["start", "end"] = "start" if event == "start" else "end"
        return Attempt(datetime.fromisoformat(time), kind, job, int(restart), int(step), text)
    except ValueError:
        return None
