"""``mhar bench``: speed of routing and of training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from megatron_mhar.bench.shapes import SHAPES
from megatron_mhar.depth.residual import ROUTED
from megatron_mhar.errors import UserError
from megatron_mhar.quiet import quiet_imports

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_mhar.bench.machine import Machine
    from megatron_mhar.depth.residual import Method


@click.group()
def bench() -> None:
    """Measure speed, of what is found right in the same run.

    \b
    Examples:
      mhar bench routing --shape 1b
      mhar bench step configs/1b/baseline.yaml --methods baseline,mhar --micro-batch 32
    """


class Values(click.ParamType):
    """Values with commas between them."""

    name = "values"

    def __init__(self, kind: type[str] | type[int] = str) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """``"2,32"`` -> (2, 32)."""
        if isinstance(value, tuple):
            return value
        try:
            values = tuple(self.kind(part.strip()) for part in str(value).split(","))
        except ValueError:
            values = ()
        if not values or any(v == "" or (isinstance(v, int) and v < 1) for v in values):
            wanted = "positive whole numbers" if self.kind is int else "names"
            self.fail(f"{value!r} given; allowed: {wanted} with commas between them")
        return values


_JSON = click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON here too."
)


@bench.command(short_help="Speed of all reads of a micro-batch, beside other algorithms.")
@click.option(
    "--shape", "shapes", type=click.Choice(tuple(SHAPES)), multiple=True, help="Model and micro-batch [100m 350m 1b]."
)
@click.option(
    "--method", "methods", type=click.Choice(sorted(ROUTED)), multiple=True, help="The shape's own if not given."
)
@click.option("--heads", type=Values(int), default=(), metavar="H[,H]...", help="Routing heads; the shape's own (8).")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of the micro-batch; the shape's own.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option("--bare", is_flag=True, help="Delta methods without null sources and gates.")
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="Timed rounds.")
@click.option(
    "--algorithms",
    type=Values(),
    default=(),
    metavar="NAME[,NAME]...",
    help="Of ours, paper, flash-linear-attention, fast-attnres, Liger; all that are installed if not given.",
)
@click.option("--no-graph", is_flag=True, help="No CUDA graphs, only eager.")
@_JSON
def routing(
    shapes: tuple[str, ...],
    methods: tuple[str, ...],
    heads: tuple[int, ...],
    tokens: int | None,
    dtype: str,
    bare: bool,
    rounds: int,
    algorithms: tuple[str, ...],
    no_graph: bool,
    json_file: Path | None,
) -> None:
    """Time all reads of a micro-batch, forward and with backward, beside the paper's algorithm and, for one head, other
    libraries that are installed.

    Every algorithm is first held against the definition in float64, outputs and gradients, at the same shape; one that
    fails shows FAILED in place of speed, and the exit code is 1. Then all are timed in turns. The sublayers between the
    reads cost nothing. Shapes: the models' and their micro-batches in the paper; 1b-32k (32 x 1,024 tokens); 8b (the
    8B model's delta_block); delta-8b (nine sites that read one to nine sources); tiny, to try the command.

    \b
    Examples:
      mhar bench routing --shape 1b --shape 1b-32k --json results/gpu/routing.json
      mhar bench routing --shape 100m --heads 1 --algorithms ours,paper,flash-linear-attention
      TRITON_INTERPRET=1 mhar bench routing --shape tiny --dtype fp32 --rounds 1
    """
    _check_triton()
    with quiet_imports():
        import torch

        from megatron_mhar import platform
        from megatron_mhar.bench.machine import describe_machine
        from megatron_mhar.bench.report import check_writable, routing_table, write_json
        from megatron_mhar.bench.routing import ALGORITHMS, VERSION, RoutingReport, bench_case, build_case

    unknown = [name for name in algorithms if name not in ALGORITHMS]
    if unknown:
        raise UserError(f"--algorithms: {unknown[0]!r} given; allowed: {', '.join(ALGORITHMS)}")
    cases = [
        (
            shape,
            build_case(
                shape, method=cast("Method | None", method), num_heads=count, tokens=tokens, dtype=dtype, bare=bare
            ),
        )
        for shape in shapes or ("100m", "350m", "1b")
        for method in methods or (None,)
        for count in heads or (None,)
    ]
    if json_file is not None:
        check_writable(json_file)
    console, machine = _console(), describe_machine()
    _head(console, machine)

    device = torch.device("cuda", torch.cuda.current_device()) if platform.HAS_GPU else torch.device("cpu")
    report = RoutingReport(VERSION, "routing", machine, ())
    for shape, case in cases:
        found = bench_case(shape, case, device, rounds=rounds, graphs=not no_graph, names=algorithms or ALGORITHMS)
        console.print(routing_table(found))
        for name, why in found.absent.items():
            console.print(f"not compared: {name}: {why}", style="dim", markup=False)
        report = replace(report, cases=(*report.cases, found))
        if json_file is not None:  # the file has what is known if the next shape is cut off
            write_json(report, json_file)
    if not any(found.results for found in report.cases):
        raise UserError(f"--algorithms: {', '.join(algorithms)} given, but none of them can do this here, see above")
    if report.failed:
        raise SystemExit(1)


@bench.command(short_help="Speed and memory of training steps, configs beside each other.")
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG... [KEY=VALUE]...")
@click.option(
    "--methods", type=Values(), default=(), metavar="NAME[,NAME]...", help="Files beside the one CONFIG, by name."
)
@click.option("--precision", type=Values(), default=(), metavar="P[,P]...", help="Values of training.precision.")
@click.option(
    "--micro-batch", type=Values(int), default=(), metavar="N[,N]...",
    help="Values of training.micro_batch_size; a step is then one micro-batch a data-parallel rank.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Timed steps of each round.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds over all configs.")
@_JSON
def step(
    configs: tuple[str, ...],
    methods: tuple[str, ...],
    precision: tuple[str, ...],
    micro_batch: tuple[int, ...],
    steps: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Time training steps of the real trainer on random tokens; speed and memory are told relative to the first config.

    Routing of each config is first held against the definition at the same shape, and the first losses must be finite;
    a config that fails shows FAILED in place of speed, and the exit code is 1. In each round every model is built,
    warmed up, timed and let go, one after the other. No data is needed. Runs under torchrun too.

    \b
    Examples:
      mhar bench step configs/1b/baseline.yaml configs/1b/mhar.yaml --micro-batch 2,32 --json results/gpu/step-1b.json
      mhar bench step configs/100m/baseline.yaml --methods baseline,attnres,mhar,delta model.layers=local
      torchrun --nproc-per-node 2 --no-python mhar bench step configs/1b/baseline.yaml --methods baseline,mhar \
        parallel.tensor=2 parallel.sequence=true
    """
    overrides = [word for word in configs if "=" in word]
    paths = [Path(word) for word in configs if "=" not in word]
    if not paths:
        raise UserError(f"no CONFIG given, only overrides: {' '.join(overrides)}")
    _check_triton()
    with quiet_imports():
        from megatron_mhar.bench.machine import Machine
        from megatron_mhar.bench.report import check_writable, step_table, write_json
        from megatron_mhar.bench.step import StepResult, bench_step

    if json_file is not None:
        check_writable(json_file)
    console = _console()

    def tell(what: Machine | Sequence[StepResult]) -> None:
        if isinstance(what, Machine):
            _head(console, what)
        else:
            console.print(step_table(what))

    report = bench_step(
        paths, overrides, methods=methods, precisions=precision, micro_batches=micro_batch,
        steps=steps, rounds=rounds, tell=tell,
    )  # fmt: skip
    if report is not None and json_file is not None:
        write_json(report, json_file)
    if report is not None and report.failed:
        raise SystemExit(1)


def _check_triton() -> None:
    if find_spec("triton") is None:
        raise UserError("mhar bench needs Triton, which is not installed: it comes with torch's CUDA builds for Linux")


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, 160)  # narrower, figures would be cut off; a log file has no width to keep to
    return console


def _head(console: Console, machine: Machine) -> None:
    for line in machine.lines():
        console.print(line, style="dim", markup=False, soft_wrap=True)
