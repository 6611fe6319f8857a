"""Finished runs side by side: what they reached, what they cost, and what makes a comparison unfair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table

from megatron_mhar.config.load import flatten, load_config
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError
from megatron_mhar.run_files import RoutingMap, RunFiles, RunSummary
from megatron_mhar.tracking.journal import load_metrics

TRAIN_LOSS = "train/loss"
VALID_LOSS = "valid/loss"

# Keys that may differ in a fair comparison: what is compared, and what changes neither losses nor speed.
_FREE = (
    "name", "output_dir", "residual.", "tracking.", "checkpoint.", "training.log_interval", "training.stop_after",
    "data.num_workers", "parallel.timeout_s",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        directory: its folder.
        label: its name; where two runs have the same, the folder.
        config: as it was run.
        summary: what it reached.
        metrics: ``(step, value)`` pairs of each metric, in step order.
        routing: None where the method does not route.
    """

    directory: Path
    label: str
    config: RunConfig
    summary: RunSummary
    metrics: dict[str, list[tuple[int, float]]]
    routing: RoutingMap | None

    def curve(self, metric: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values of ``metric``; both empty where it was never logged."""
        points = self.metrics.get(metric, [])
        return np.array([step for step, _ in points], np.int64), np.array([value for _, value in points], np.float64)


def load_run(directory: Path) -> Run:
    """Read the folder of a finished run.

    Raises:
        UserError: it is no run folder, the run has not ended, or one of its files is damaged.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder; allowed: the folder of a run of mhar train")
    files = RunFiles(directory)
    if not files.config.is_file():
        raise UserError(f"{directory}: no config.yaml, so not the folder of a run of mhar train")
    config = load_config(files.config)
    metrics = load_metrics(files.journal) if files.journal.is_file() else {}
    if not files.summary.is_file():
        last = max((points[-1][0] for points in metrics.values() if points), default=0)
        raise UserError(
            f"{directory}: the run has not ended (no summary.json; last logged step {last} of "
            f"{config.training.steps}); mhar train {files.config} continues it"
        )
    if not files.journal.is_file():
        raise UserError(f"{files.journal}: missing, but the run has ended; without it there are no curves")
    summary = RunSummary.read(files.summary)
    routing = RoutingMap.read(files.routing) if files.routing.is_file() else None
    return Run(directory, summary.name, config, summary, metrics, routing)


def load_runs(directories: Sequence[Path]) -> list[Run]:
    """``load_run`` of each folder, with labels that tell the runs apart.

    Raises:
        UserError: as :func:`load_run`; also where a folder is given twice.
    """
    seen: set[Path] = set()
    for directory in directories:
        if directory.resolve() in seen:
            raise UserError(f"{directory}: given twice; allowed: each run once")
        seen.add(directory.resolve())
    runs = [load_run(directory) for directory in directories]
    labels = [run.label for run in runs]
    return [replace(run, label=str(run.directory)) if labels.count(run.label) > 1 else run for run in runs]


def differences(runs: Sequence[Run]) -> list[str]:
    """One line for each thing beside the residual method in which the runs differ; none where they are comparable."""
    lines = []
    for run in runs:
        if run.summary.steps != run.config.training.steps:
            lines.append(f"{run.label} ended at step {run.summary.steps} of {run.config.training.steps}")
    flat = [{key: value for key, value in flatten(run.config).items() if not key.startswith(_FREE)} for run in runs]
    for key in dict.fromkeys(key for values in flat for key in values):
        given = [values.get(key) for values in flat]
        if any(value != given[0] for value in given):
            lines.append(f"{key}: {_by_run(runs, given)}")
    corpora = [run.summary.data_digests for run in runs]
    if any(corpus != corpora[0] for corpus in corpora):
        lines.append("data: the files have the same names, but not the same contents")
    devices = [run.summary.device for run in runs]
    if len(set(devices)) > 1:
        lines.append(f"device: {_by_run(runs, devices)}; tokens/s and memory do not compare")
    return lines


def _by_run(runs: Sequence[Run], values: Sequence[object]) -> str:
    return ", ".join(f"{value} ({run.label})" for run, value in zip(runs, values, strict=True))


def compare(runs: Sequence[Run]) -> Table:
    """A table with one row a run; losses and speeds are set against the first.

    Args:
        runs: at least one.
    """
    first = runs[0].summary
    tails = sorted({run.config.evaluation.tail for run in runs})
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        caption_style="dim",
        caption=f"valid loss: nats a token, {_tail(tails)}"
        + (f"; in brackets: against {runs[0].label}" if len(runs) > 1 else ""),
        caption_justify="left",
    )
    table.add_column("run", overflow="fold")
    table.add_column("method", no_wrap=True)
    for title in ("parameters", "valid loss", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("peak\nmemory", justify="right", no_wrap=True)
    for position, run in enumerate(runs):
        summary = run.summary
        loss = "-" if summary.valid_loss is None else f"{summary.valid_loss:.4f}"
        speed = f"{summary.tokens_per_second:,.0f}"
        if position > 0:
            if summary.valid_loss is not None and first.valid_loss is not None:
                loss += f" ({summary.valid_loss - first.valid_loss:+.4f})"
            if first.tokens_per_second > 0:
                speed += f" ({summary.tokens_per_second / first.tokens_per_second:.2f}x)"
        heads = f" H={summary.num_heads}" if run.routing is not None else ""
        table.add_row(
            run.label, f"{summary.method}{heads}", f"{summary.parameters:,}", loss, speed,
            _memory(summary.peak_memory_bytes),
        )  # fmt: skip
    return table


def _tail(lengths: Sequence[int]) -> str:
    if list(lengths) == [1]:
        return "the last evaluation"
    return f"mean of the last {' or '.join(map(str, lengths))} evaluations"


def _memory(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
