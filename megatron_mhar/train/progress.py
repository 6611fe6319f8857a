"""What a run tells its user: a bar with loss, tokens/s and time left on a terminal, plain lines in the log file."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# What these have to say is kept in the log file and does not tear up the bar.
_LIBRARIES = ("megatron", "torch", "py.warnings")


class _LogFile(logging.FileHandler):
    """A log file whose disk may be full: the checkpoint that does not fit either is told, each lost line is not."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Close, also where the last lines cannot be written."""
        with contextlib.suppress(OSError):
            super().close()


class ProgressLog:
    """Log file and terminal of rank 0; other ranks say nothing but our warnings and the libraries' errors.

    Logging is as before once the context is left.

    Args:
        path: log file, appended to; None on the other ranks.
        total: steps of the run.
        start: steps done already.
    """

    def __init__(self, path: Path | None, *, total: int, start: int) -> None:
        self._bar: Progress | None = None
        self._restore = contextlib.ExitStack()
        plain = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
        terminal: logging.Handler = logging.StreamHandler(sys.stderr)
        terminal.setFormatter(plain)
        if path is None:
            errors = logging.StreamHandler(sys.stderr)
            errors.setLevel(logging.ERROR)
            self._redirect("megatron_mhar", logging.WARNING, terminal)
            self._redirect_libraries(errors)
            return
        file = _LogFile(path, encoding="utf-8")
        file.setFormatter(plain)
        self._restore.callback(file.close)
        console = Console(stderr=True)
        if console.is_interactive:  # a terminal, and no dumb one
            terminal = RichHandler(
                console=console, show_path=False, show_level=False, highlighter=None, log_time_format="%H:%M:%S"
            )
            self._bar = Progress(
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(compact=True),
                console=console,
                transient=True,
                expand=True,
            )
            self._task = self._bar.add_task("", total=total, completed=start, state="")
        self._redirect("megatron_mhar", logging.INFO, file, terminal)
        self._redirect_libraries(file)

    def _redirect_libraries(self, handler: logging.Handler) -> None:
        logging.captureWarnings(True)
        self._restore.callback(logging.captureWarnings, False)
        for name in _LIBRARIES:
            self._redirect(name, logging.getLogger(name).level, handler)

    def _redirect(self, name: str, level: int, *handlers: logging.Handler) -> None:
        """Send a logger's records to ``handlers`` alone until the context is left."""
        source = logging.getLogger(name)
        before = source.handlers, source.level, source.propagate

        def restore() -> None:
            source.handlers, source.propagate = before[0], before[2]
            source.setLevel(before[1])

        self._restore.callback(restore)
        source.handlers, source.propagate = list(handlers), False
        source.setLevel(level)

    def step(self, step: int) -> None:
        """Move the bar to ``step``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(self, *, loss: float, tokens_per_second: float) -> None:
        """Show loss and speed beside the bar."""
        if self._bar is not None:
            self._bar.update(self._task, state=f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s")

    def __enter__(self) -> ProgressLog:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._restore.close()
