"""Reports as JSON files, and what they say as tables for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mhar.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_mhar.bench.routing import CaseReport, RoutingReport
    from megatron_mhar.bench.step import StepReport, StepResult

GIB = 2**30


def check_writable(path: Path) -> None:
    """Find out before anything is measured whether its result can be written.

    Raises:
        UserError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def write_json(report: RoutingReport | StepReport | Any, path: Path) -> None:
    """Write a dataclass as JSON.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def routing_table(report: CaseReport) -> Table:
    """Speed of forward and backward relative to the paper's algorithm first; what failed says why in place of speed."""
    extras = " + null source" * report.null_source + " + gate" * report.gate
    table = _table(
        f"{report.shape}: {report.method} H={report.num_heads}{extras}, {report.sites} sites, d {report.width}, "
        f"{report.tokens:,} tokens, {report.dtype}; ours {report.schedule}",
        ["speed\n/ paper's", "forward\n/ paper's", "time\n/ ours", "forward + backward\nms (10%-90%)",
         "forward\nms (10%-90%)", "forward's\nGB/s", "GiB", "errors of\noutputs", "source\ngradients",
         "query\ngradients"],
        left=["algorithm", "as"],
    )  # fmt: skip
    for result in report.results:
        mode = "graph" if result.graph else "eager"
        if result.failed:
            _add_failure(table, (result.algorithm, mode), result.failed)
            continue
        errors = [f"{result.errors[key]:.0e}" for key in ("outputs", "source gradients", "query gradients")]
        peak = "" if result.peak_bytes is None else f"{result.peak_bytes / GIB:.1f}"
        table.add_row(
            result.algorithm, mode, _ratio(result.over_paper), _ratio(result.over_paper_forward),
            _ratio(result.by_ours), str(result.both),
            str(result.forward), f"{result.read_gb_per_s or 0:,.0f}", peak, *errors,
        )  # fmt: skip
    return table


def step_table(results: Sequence[StepResult]) -> Table:
    """Speed and memory relative to the first config, then what they come from."""
    first = results[0]
    table = _table(
        f"micro-batch {first.micro_batch_size} x {first.sequence_length}, {first.micro_batches} a step and rank, "
        f"{first.ranks} rank{'s' * (first.ranks > 1)}, {first.layers} layers",
        ["speed", "memory", "tokens/s", "step ms (10%-90%)", "rounds", "peak GiB", "losses", "routing"],
        left=["config", "precision"],
    )
    for result in results:
        if result.failed:
            _add_failure(table, (result.label, result.precision), result.failed)
            continue
        worst = max(result.routing_errors.values(), default=None)
        table.add_row(
            result.label, result.precision, _ratio(result.over_first, 3), _ratio(result.memory_over_first, 3),
            f"{result.tokens_per_second:,.0f}", str(result.step),
            " ".join(f"{milliseconds:.1f}" for milliseconds in result.rounds_ms),
            "" if result.peak_bytes is None else f"{result.peak_bytes / GIB:.1f}",
            f"{result.losses[0]:.2f} {result.losses[-1]:.2f}",
            "" if worst is None else f"{result.routing_backend}, errors to {worst:.0e}",
        )  # fmt: skip
    return table


def _ratio(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _add_failure(table: Table, name: tuple[str, str], why: str) -> None:
    """A row without figures; the reason stands below the table."""
    from rich.text import Text

    table.add_row(*name, "[bold red]FAILED[/bold red]")
    lines = [] if table.caption is None else [str(table.caption)]
    table.caption = Text("\n".join([*lines, f"{' '.join(name)}: {why}"]))


def _table(title: str, headings: Sequence[str], *, left: Sequence[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    table.caption_justify, table.caption_style = "left", "red"
    table.padding = (0, 1, 0, 0)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table
