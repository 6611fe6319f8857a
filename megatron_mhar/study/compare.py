"""Finished runs side by side: what they reached, what they cost, and what makes a comparison unfair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.box import SIMPLE_HEAD
from rich.table import Table

from megatron_mhar.config.load import flatten, load_config
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError
from megatron_mhar.tracking.journal import load_metrics

TRAIN_LOSS = "train/loss"
VALID_LOSS = "valid/loss"

# Keys that may differ in a fair comparison: what is compared, and what changes neither losses nor speed.
_FREE = (
    "name", "output_dir", "residual.", "tracking.", "checkpoint.", "training.log_interval", "training.stop_after",
    "data.num_workers", "parallel.timeout_s",
)  # fmt: skip


class RunSummary(BaseModel):
    """Contents of ``summary.json``, written when a run has ended.

    ``valid_loss`` is the mean of the last evaluations, in nats a token; losses are None without validation data.
    ``tokens_per_second`` is the median over the run, all ranks together; ``peak_memory_bytes`` that of the fullest.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    method: str
    num_heads: int
    parameters: int
    steps: int
    valid_loss: float | None
    valid_loss_last: float | None
    tokens_per_second: float
    peak_memory_bytes: int
    device: str
    routing_backend: str | None = None


@dataclass(frozen=True)
class Routing:
    """Learned routing of a run.

    Attributes:
        weights: ``[sites, heads, sources]`` float32, mean depth weight over validation tokens; 0 where not read.
        reads: ``[sites, sources]`` bool, whether a site reads a source.
        site_names: name of each site, in depth order.
        source_names: name of each source, in depth order.
    """

    weights: NDArray[np.float32]
    reads: NDArray[np.bool_]
    site_names: tuple[str, ...]
    source_names: tuple[str, ...]

    @property
    def finite(self) -> bool:
        """False where the run diverged."""
        return bool(np.isfinite(self.weights).all())


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
    routing: Routing | None

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
    config_path, journal = directory / "config.yaml", directory / "metrics.jsonl"
    if not config_path.is_file():
        raise UserError(f"{directory}: no config.yaml, so not the folder of a run of mhar train")
    config = load_config(config_path)
    metrics = load_metrics(journal) if journal.is_file() else {}
    summary_path = directory / "summary.json"
    if not summary_path.is_file():
        last = max((points[-1][0] for points in metrics.values() if points), default=0)
        raise UserError(
            f"{directory}: the run has not ended (no summary.json; last logged step {last} of "
            f"{config.training.steps}); mhar train {config_path} continues it"
        )
    if not journal.is_file():
        raise UserError(f"{journal}: missing, but the run has ended; without it there are no curves")
    try:
        summary = RunSummary.model_validate(json.loads(summary_path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{summary_path}: {'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{summary_path}: cannot be read: {error}") from None
    routing_path = directory / "routing.npz"
    routing = _load_routing(routing_path) if routing_path.is_file() else None
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


def _load_routing(path: Path) -> Routing:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            weights = arrays["weights"].astype(np.float32)
            reads = arrays["reads"].astype(np.bool_)
            sites, sources = (tuple(map(str, arrays[name])) for name in ("site_names", "source_names"))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise UserError(f"{path}: not the routing of a run: {error}") from None
    if weights.ndim != 3 or weights.shape[::2] != reads.shape or reads.shape != (len(sites), len(sources)):
        raise UserError(
            f"{path}: shapes do not fit: weights {weights.shape}, reads {reads.shape}, {len(sites)} site names and "
            f"{len(sources)} source names given; allowed: [sites, heads, sources] and [sites, sources]"
        )
    return Routing(weights, reads, sites, sources)


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
        caption=f"valid loss: nats a token, mean of the last {' or '.join(map(str, tails))} evaluations"
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


def _memory(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
