"""The journal: every metric of a run, one JSON line a call, in the run folder.

A line is ``{"step": int, "time_ms": int, "metrics": {name: number}}``, ``time_ms`` in milliseconds since 1970 (UTC).
NaN and the infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, so that every line is plain JSON.
After a resume the steps since the last checkpoint are logged again; of a metric's values at a step the last one counts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import NamedTuple

from megatron_mhar.errors import UserError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[\w\-. :/]+", re.ASCII)
_MAX_NAME = 250
_BLOCK = 1 << 16
_END_MS = 253_370_764_800_000  # the year 9999


class Entry(NamedTuple):
    """One line of a journal."""

    step: int
    time_ms: int
    metrics: dict[str, float]


class Journal:
    """Append-only writer. Each line goes to the operating system at once: killing the process loses none.

    Args:
        path: the file; it and its folder are made where missing, and a torn last line (power cut) is cut off.

    Raises:
        OSError: the file cannot be made or opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._torn = False

    def write(self, step: int, metrics: Mapping[str, float], time_ms: int | None = None) -> None:
        """Append one line.

        Raises:
            TypeError, ValueError: a step, name or value that MLflow could not hold; nothing is written.
            OSError: the file cannot be written (disk full); the next line starts afresh.
        """
        entry = {
            "step": _step(step),
            "time_ms": time.time_ns() // 1_000_000 if time_ms is None else time_ms,
            "metrics": {_name(name): _number(name, value) for name, value in metrics.items()},
        }
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        # A line that was written in part (disk full) is closed first: readers skip it.
        rest = memoryview(b"\n" + line if self._torn else line)
        self._torn = True
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._torn = False

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Tail:
    """Reads a journal while it grows. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self, max_points: int) -> list[Entry]:
        """The next complete lines, until they hold ``max_points`` values or more; none where nothing is new."""
        entries: list[Entry] = []
        points = 0
        try:
            if self.path.stat().st_size < self._offset:  # another file took its place
                self._offset = 0
            for end, entry in _entries(self.path, self._offset):
                self._offset = end
                if entry is not None:
                    entries.append(entry)
                    points += len(entry.metrics)
                if points >= max_points:
                    break
        except FileNotFoundError:
            pass
        return entries

    def rewind(self) -> None:
        """Start again from the first line."""
        self._offset = 0


def read_journal(path: Path) -> Iterator[Entry]:
    """Every complete line in the order of writing. A torn last line is left out, a damaged one skipped with a warning.

    Raises:
        UserError: there is no such file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such metrics journal; a run folder written by `mhar train` has one")
    return (entry for _, entry in _entries(path, 0) if entry is not None)


def load_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """``{name: [(step, value), ...]}`` in rising steps, the last value of each (name, step).

    Raises:
        UserError: there is no such file.
    """
    metrics: dict[str, dict[int, float]] = {}
    for entry in read_journal(path):
        for name, value in entry.metrics.items():
            metrics.setdefault(name, {})[entry.step] = value
    return {name: sorted(values.items()) for name, values in metrics.items()}


def _entries(path: Path, offset: int) -> Iterator[tuple[int, Entry | None]]:
    """(offset of the line's end, entry) of each complete line from byte ``offset`` on; None for a line that is none."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            if line.strip():
                entry = _parse(line)
                if entry is None:
                    logger.warning("%s: the line before byte %d is not a journal entry, skipped", path, offset)
                yield offset, entry


def _parse(line: bytes) -> Entry | None:
    try:
        fields = json.loads(line)
        metrics = {str(name): float(value) for name, value in fields["metrics"].items()}
        step, time_ms = int(fields["step"]), int(fields["time_ms"])
        return Entry(step, time_ms, metrics) if 0 <= step < 2**63 and 0 <= time_ms < _END_MS else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _cut_torn_line(path: Path) -> None:
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        size = end = file.seek(0, os.SEEK_END)
        keep = 0
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            end = start
        if keep < size:
            logger.warning("%s: cut off a torn last line of %d bytes", path, size - keep)
            file.truncate(keep)


def _step(step: object) -> int:
    if isinstance(step, bool) or not isinstance(step, Integral):
        raise TypeError(f"step: {type(step).__name__} given, but it must be an int")
    number = int(step)
    if not 0 <= number < 2**63:
        raise ValueError(f"step: {number} given, but it must be 0 or more and fit 64 bits")
    return number


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"metric name {name!r}: {type(name).__name__} given, but it must be a str")
    # MLflow's rule: a name may become a path, and must then be the shortest one that stays below its folder.
    unique = posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name) or not unique:
        raise ValueError(
            f"metric name {name!r}: at most {_MAX_NAME} letters, digits, '_', '-', '.', ' ', ':' in parts joined by '/'"
        )
    return name


def _number(name: str, value: object) -> float | str:
    if not isinstance(value, Real):
        raise TypeError(f"metric {name}: {type(value).__name__} given, but it must be a number (a tensor's .item())")
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
