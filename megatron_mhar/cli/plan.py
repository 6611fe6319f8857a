"""``mhar plan``: what a layout costs on clusters that need not be there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

GIB = 2**30

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_mhar.config.schema import RunConfig
    from megatron_mhar.pipeline.estimate import Cluster, Estimate


class Counts(click.ParamType):
    """Positive whole numbers with commas between them."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """``"8,64"`` -> (8, 64)."""
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            counts = ()
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} given; allowed: positive whole numbers with commas between them, like 8,64,512")
        return counts


_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--gpus", type=Counts(), multiple=True, required=True, metavar="N[,N]...",
    help="Number of GPUs. One number shows every link and rank, several give a row each.",
)  # fmt: skip
@click.option(
    "--gpus-per-node", type=click.IntRange(min=1), default=8, show_default=True, help="GPUs that share fast links."
)
@click.option(
    "--link-gbps", type=(_POSITIVE, _POSITIVE), default=(450.0, 50.0), show_default=True, metavar="INTRA INTER",
    help="Speed of a GPU's links inside its node and to others, one direction, in GB/s (10^9 bytes; a 400 Gb/s adapter "
    "has 50).",
)  # fmt: skip
@click.option(
    "--tflops", type=_POSITIVE, default=400.0, show_default=True,
    help="Model TFLOP/s that a GPU achieves inside a stage, recomputation and tensor-parallel collectives in it.",
)  # fmt: skip
@click.option("--memory", type=_POSITIVE, default=80.0, show_default=True, metavar="GIB", help="Memory of a GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (bytes and seconds) instead of tables.")
def plan(
    config: Path,
    overrides: tuple[str, ...],
    gpus: tuple[tuple[int, ...], ...],
    gpus_per_node: int,
    link_gbps: tuple[float, float],
    tflops: float,
    memory: float,
    as_json: bool,
) -> None:
    """Show what the layout of CONFIG costs on N GPUs: bytes on each link, memory, share of a step.

    Needs neither the GPUs nor the data. Messages, bytes and numbers of parameters are exact. Times follow from the
    speeds given; data-parallel reductions, the optimizer and latencies are not in them. Memory is of weights,
    gradients, optimizer and depth history; what is left of a GPU is for activations and logits. A number of GPUs that
    the layout does not fit is refused as mhar train would refuse it, with several it has a line of its own.

    \b
    Examples:
      mhar plan configs/8b/delta_block.yaml parallel.pipeline=2 --gpus 512
      mhar plan configs/8b/delta_block.yaml parallel.pipeline=2 training.global_batch_size=2048 --gpus 8,64,512,4096
      mhar plan configs/1b/mhar.yaml parallel.pipeline=4 parallel.virtual_stages=2 training.global_batch_size=512 \
        --gpus 64 --link-gbps 450 25
    """
    from megatron_mhar.config.load import load_config
    from megatron_mhar.errors import UserError
    from megatron_mhar.pipeline.estimate import Cluster, estimate_layout

    run = load_config(config, overrides)
    cluster = Cluster(gpus_per_node, *link_gbps, tflops)
    answers: dict[int, Estimate | UserError] = {}
    for count in dict.fromkeys(count for counts in gpus for count in counts):
        try:
            answers[count] = estimate_layout(run, count, cluster)
        except UserError as error:
            answers[count] = error
    estimates = [answer for answer in answers.values() if not isinstance(answer, UserError)]
    if not estimates:
        raise next(answer for answer in answers.values() if isinstance(answer, UserError))
    if as_json:
        layouts = [
            {"num_gpus": count, "error": str(answer)} if isinstance(answer, UserError) else _plain(answer, memory)
            for count, answer in answers.items()
        ]
        click.echo(json.dumps({"name": run.name, "cluster": asdict(cluster), "layouts": layouts}, indent=2))
        return

    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, 120)  # narrower, figures would be cut off; a log file has no width to keep to
    console.print(_headline(run, estimates[0]), soft_wrap=True)
    console.print(_steps(estimates, memory))
    for count, answer in answers.items():
        if isinstance(answer, UserError):
            click.secho(f"{count} GPUs: {answer}", fg="yellow")
    if len(answers) == 1:
        for table in _details(estimates[0], cluster, memory):
            console.print(table)
    console.print(_footnote(run, cluster), style="dim", soft_wrap=True)


def _plain(estimate: Estimate, memory: float) -> dict[str, Any]:
    """An estimate as JSON has it, with what follows from its figures."""
    time = estimate.time
    values = asdict(estimate)
    for rank, each in zip(values["memory"], estimate.memory, strict=True):
        rank["total"] = each.total
        for key in ("history", "history_uncached", "history_baseline"):
            rank[key]["total"] = getattr(each, key).total
    values["time"] |= {
        "bubble_share": time.bubble_share,
        "blocking_share": time.message_share(time.blocking),
        "overlapped_share": None if time.overlapped is None else time.message_share(time.overlapped),
    }
    return {
        "num_gpus": estimate.layout.num_gpus,
        "over_baseline": estimate.over_baseline,
        "over_uncached": estimate.over_uncached,
        "fits": estimate.fullest.total <= memory * GIB,
        **values,
    }


def _headline(run: RunConfig, estimate: Estimate) -> str:
    layout, training = estimate.layout, run.training
    heads = f" H={run.residual.num_heads}" if run.residual.num_heads > 1 else ""
    sizes = {"tensor": layout.tensor, "context": layout.context, "pipeline": layout.pipeline}
    spread = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1) or "data parallel alone"
    stages = f", {layout.virtual_stages} stages a rank" if layout.virtual_stages > 1 else ""
    return (
        f"[bold]{run.name}[/bold]: {run.residual.method}{heads}, {estimate.parameters:,} parameters; {spread}{stages}; "
        f"{training.global_batch_size} sequences of {training.sequence_length} tokens a step"
    )


def _steps(estimates: Sequence[Estimate], memory: float) -> Table:
    """One row a number of GPUs: shares of the step first, then what they come from."""
    linked, interleaved = bool(estimates[0].links), estimates[0].time.overlapped is not None
    headings = ["GPUs", "data\nparallel", "micro-\nbatches", "bubble"]
    headings += ["messages\nblocking"] * linked + ["messages\noverlapped"] * interleaved
    headings += ["bytes vs\nbaseline"] * linked + ["bytes vs\nuncached"] * interleaved
    headings += ["step", "tokens/s", "fullest\nGPU", f"left of\n{memory:g} GiB"]
    table = _table("Step", headings)
    for estimate in estimates:
        layout, time = estimate.layout, estimate.time
        cells = [f"{layout.num_gpus:,}", f"{layout.data:,}", f"{layout.micro_batches:,}", _share(time.bubble_share)]
        cells += [_share(time.message_share(step)) for step in (time.blocking,) if linked]
        cells += [_share(time.message_share(step)) for step in (time.overlapped,) if step is not None]
        cells += [_times(estimate.over_baseline)] * linked + [_times(estimate.over_uncached)] * interleaved
        cells += [_seconds(time.configured), f"{estimate.tokens_per_second:,.0f}"]
        table.add_row(*cells, f"{_gib(estimate.fullest.total)} GiB", _left(estimate.fullest.total, memory))
    return table


def _details(estimate: Estimate, cluster: Cluster, memory: float) -> Iterator[Table]:
    """Tables of the links and of the ranks of a pipeline."""
    interleaved = estimate.time.overlapped is not None
    if estimate.links:
        headings = ["vs\nbaseline"] + ["vs\nuncached"] * interleaved + ["messages", "sent", "baseline"]
        table = _table(
            "Links of a pipeline, each direction of a step",
            [*headings, *["uncached"] * interleaved],
            left=["link", "over"],
        )
        for link in estimate.links:
            speed = cluster.inter_gbps if link.crosses_nodes else cluster.intra_gbps
            table.add_row(
                f"{link.sender} -> {link.receiver}",
                f"{'nodes' if link.crosses_nodes else 'one node'}, {speed:g} GB/s",
                _times(link.sent_bytes / link.baseline_bytes),
                *[_times(link.sent_bytes / link.uncached_bytes)] * interleaved,
                f"{link.messages:,}",
                _megabytes(link.sent_bytes),
                _megabytes(link.baseline_bytes),
                *[_megabytes(link.uncached_bytes)] * interleaved,
            )
        yield table
    table = _table(
        "Depth history on a GPU in GiB, by pipeline rank",
        [
            "rank",
            "in\nflight",
            "received",
            "made",
            "gradients",
            "messages",
            "sum",
            *["uncached"] * interleaved,
            "baseline",
        ],
    )
    for rank in estimate.memory:
        history = rank.history
        others = [rank.history_uncached] * interleaved + [rank.history_baseline]
        table.add_row(
            str(rank.rank),
            str(history.in_flight),
            *map(_gib, (history.received, history.made, history.gradients, history.messages, history.total)),
            *[_gib(other.total) for other in others],
        )
    yield table
    table = _table(
        "Memory of a GPU in GiB, by pipeline rank",
        ["rank", "parameters", "weights", "gradients", "optimizer", "history", "sum", f"left of\n{memory:g}"],
    )
    for rank in estimate.memory:
        table.add_row(
            str(rank.rank),
            f"{rank.parameters:,}",
            *map(_gib, (rank.weights, rank.gradients, rank.optimizer, rank.history.total, rank.total)),
            _left(rank.total, memory),
        )
    yield table


def _footnote(run: RunConfig, cluster: Cluster) -> str:
    overlap = "overlapped" if run.parallel.overlap_p2p else "blocking"
    note = (
        f"Taken: {cluster.tflops:g} model TFLOP/s a GPU, {cluster.intra_gbps:g} GB/s inside a node of "
        f"{cluster.gpus_per_node} GPUs, {cluster.inter_gbps:g} GB/s between nodes.\n"
        "Not counted: time of data-parallel reductions, optimizer and latencies; memory of activations inside "
        "sublayers, logits and libraries."
    )
    if run.parallel.pipeline > 1:
        note += f"\nThe step is the one with {overlap} messages, as parallel.overlap_p2p says"
        note += "." if run.parallel.virtual_stages > 1 else " (overlap is for virtual stages)."
    return note


def _table(title: str, headings: Sequence[str], *, left: Sequence[str] = ()) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    table.padding = (0, 1, 0, 0)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _share(share: float) -> str:
    return f"{100 * share:.1f}%"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _left(size: int, memory: float) -> str:
    left = memory - size / GIB
    return f"[green]{left:.1f}[/green]" if left >= 0 else f"[red]{-left:.1f} too much[/red]"
