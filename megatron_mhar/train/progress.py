"""What a run tells its user: a bar with loss, tokens/s and time left on a terminal, plain lines in the log file."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger("megatron_mhar")


class ProgressLog:
    """Log file and terminal of rank 0; other ranks say nothing but warnings.

    Args:
        path: log file, appended to; None on the other ranks.
        total: steps of the run.
        start: steps done already.
    """

    def __init__(self, path: Path | None, *, total: int, start: int) -> None:
        self._handlers: list[logging.Handler] = []
        self._bar: Progress | None = None
        logger.propagate = False
        logger.setLevel(logging.INFO if path else logging.WARNING)
        if path is None:
            self._add(logging.StreamHandler(sys.stderr))
            return
        plain = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
        file = logging.FileHandler(path)
        self._add(file, plain)
        # What megatron-core and torch have to say is kept in the file and does not tear up the bar.
        logging.captureWarnings(True)
        for name in ("megatron", "py.warnings"):
            other = logging.getLogger(name)
            other.propagate = False
            other.addHandler(file)
        console = Console(stderr=True)
        if not console.is_terminal:
            self._add(logging.StreamHandler(sys.stderr), plain)
            return
        self._add(RichHandler(console=console, show_path=False, show_level=False, highlighter=None))
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s "),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, completed=start, loss=float("nan"), speed=0.0)

    def _add(self, handler: logging.Handler, formatter: logging.Formatter | None = None) -> None:
        if formatter is not None:
            handler.setFormatter(formatter)
        logger.addHandler(handler)
        self._handlers.append(handler)

    def step(self, step: int, *, loss: float, tokens_per_second: float) -> None:
        """Move the bar to ``step``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss, speed=tokens_per_second)

    def __enter__(self) -> ProgressLog:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        for handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
