"""``mhar bench routing``: speed of all reads of a micro-batch, ours beside other algorithms, of what is right alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pydantic_core import PydanticCustomError

from megatron_mhar import platform
from megatron_mhar.bench.machine import Machine
from megatron_mhar.bench.paper_algorithm import PaperReads
from megatron_mhar.bench.peers import PEERS, find_peers
from megatron_mhar.bench.reads import Algorithm, Case, Inputs, Record, check, fused, reference, run, some_tokens
from megatron_mhar.bench.shapes import SHAPES
from megatron_mhar.bench.timing import Graphs, Timing, free, time_in_turns
from megatron_mhar.depth.residual import BLOCK, DELTA, MULTI_HEAD, Method, ResidualConfig
from megatron_mhar.depth.sites import DepthTable
from megatron_mhar.errors import UserError
from megatron_mhar.routing import resolve_backend
from megatron_mhar.routing.schedule import describe

VERSION = 2  # of the JSON
OURS, PAPER = "ours", "paper"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_case(
    name: str,
    *,
    method: Method | None = None,
    num_heads: int | None = None,
    tokens: int | None = None,
    dtype: str = "bf16",
    bare: bool = False,
) -> Case:
    """Case of a named shape; what is None is the shape's own.

    Args:
        bare: delta methods without null sources and gates.

    Raises:
        UserError: method, heads and shape do not fit.
    """
    shape = SHAPES[name]
    method = method or shape.method
    values: dict[str, object] = {"method": method}
    if method in MULTI_HEAD:
        values["num_heads"] = num_heads or shape.num_heads
    elif num_heads not in (None, 1):
        raise UserError(f"--heads: {num_heads} given, but {method} has one head")
    if method in BLOCK:
        values |= {"block_layers": shape.block_layers, "allow_partial_block": True}
    if method in DELTA:
        values["null_source"] = not bare
    try:
        residual = ResidualConfig.model_validate(values)
        residual.check(hidden_size=shape.width, num_sublayers=shape.sublayers)
    except PydanticCustomError as error:
        raise UserError(f"--shape {name} --heads {num_heads or shape.num_heads}: {error}") from None
    table = DepthTable(residual, shape.sublayers)
    if not table.num_sites:
        raise UserError(f"--method: {method} given, but its sites read no sources")
    return Case(table, shape.width, tokens or shape.batch * shape.sequence, DTYPES[dtype], gated=not bare)


@dataclass(frozen=True)
class Result:
    """One algorithm on one case, eager or as a CUDA graph.

    Attributes:
        errors: largest relative errors against the definition, by what they are of.
        forward, both: times of the forward, and of forward and backward; None where it failed.
        over_paper_forward, over_paper: times of the paper's algorithm in the same run and mode, divided by these.
        by_ours: time of forward and backward, divided by that of ours.
        read_gb_per_s: bytes that the sites read one by one, by the forward's time: more than the memory's speed where
            a source is read once for several sites.
        peak_bytes: device memory of one forward and backward beyond the sources and output gradients themselves.
        failed: why no speed is told.
    """

    algorithm: str
    graph: bool
    errors: dict[str, float]
    forward: Timing | None = None
    both: Timing | None = None
    over_paper_forward: float | None = None
    over_paper: float | None = None
    by_ours: float | None = None
    read_gb_per_s: float | None = None
    peak_bytes: int | None = None
    failed: str | None = None


@dataclass(frozen=True)
class CaseReport:
    """All algorithms on one case.

    Attributes:
        schedule: how our kernels read, see :func:`megatron_mhar.routing.schedule.describe`.
        absent: why some algorithms are not among the results.
    """

    shape: str
    method: str
    num_heads: int
    sites: int
    width: int
    tokens: int
    dtype: str
    null_source: bool
    gate: bool
    schedule: str
    results: tuple[Result, ...]
    absent: dict[str, str]


@dataclass(frozen=True)
class RoutingReport:
    """The JSON of ``mhar bench routing``."""

    version: int
    kind: str
    machine: Machine
    cases: tuple[CaseReport, ...]

    @property
    def failed(self) -> bool:
        """Whether any algorithm failed."""
        return any(result.failed for case in self.cases for result in case.results)


def paper(inputs: Inputs) -> PaperReads:
    """The paper's published algorithm."""
    return PaperReads(inputs.case.plan, inputs.sites, inputs.sources)


ALGORITHMS = (PAPER, OURS, *PEERS)


def algorithms_for(case: Case, names: Collection[str] = ALGORITHMS) -> tuple[dict[str, Algorithm], dict[str, str]]:
    """Of those named the ones that can do the case, and why others are not among them."""
    chosen: dict[str, Algorithm] = {PAPER: paper, OURS: fused}
    chosen = {name: algorithm for name, algorithm in chosen.items() if name in names}
    if case.plan.num_heads == 1 and not case.has_null:
        peers, absent = find_peers(names)
        return chosen | peers, absent
    return chosen, dict.fromkeys((name for name in PEERS if name in names), "has one head and no null source")


def bench_case(
    name: str,
    case: Case,
    device: torch.device,
    *,
    rounds: int = 10,
    graphs: bool = True,
    names: Collection[str] = ALGORITHMS,
    algorithms: Mapping[str, Algorithm] | None = None,
) -> CaseReport:
    """Check all algorithms on a case, then time in turns those that passed.

    Args:
        name: of the shape, for the report.
        rounds: timed rounds.
        graphs: also as CUDA graphs, on a GPU.
        names: of the algorithms.
        algorithms: others, by name.

    Raises:
        UserError: the device cannot run the kernels.
    """
    try:
        resolve_backend("triton", device)
    except ValueError as error:
        raise UserError(
            f"mhar bench routing: it needs Triton and a GPU ({error}). To try it without: "
            "TRITON_INTERPRET=1 mhar bench routing --shape tiny --dtype fp32"
        ) from None
    absent: dict[str, str] = {}
    if algorithms is None:
        algorithms, absent = algorithms_for(case, names)
    free()
    inputs = Inputs(case, device)
    tokens = some_tokens(case.tokens, device)
    inputs.keep_gradients_of(tokens)
    truth = reference(inputs, tokens)
    pool = Graphs() if graphs and platform.HAS_GPU else None
    variants = [(algorithm, graph) for graph in ((False, True) if pool else (False,)) for algorithm in algorithms]
    errors: dict[tuple[str, bool], dict[str, float]] = {}
    failed: dict[tuple[str, bool], str] = {}
    peaks: dict[tuple[str, bool], int | None] = {}
    calls: dict[tuple[str, bool, bool], Callable[[], object]] = {}

    def captured(algorithm: Algorithm, inputs: Inputs, *, backward: bool, record: Record) -> None:
        """A pass as the replay of a graph, which records into tensors of the capture."""
        assert pool is not None
        replay = pool.capture(lambda: run(algorithm, inputs, backward=backward, record=record))
        replay()
        platform.synchronize()  # before the graph goes

    for variant in variants:
        algorithm, graph = algorithms[variant[0]], variant[1]
        with _failures(failed, variant):
            errors[variant] = check(algorithm, inputs, truth, through=captured if graph else run)
    inputs.refill_gradients()
    for variant in variants:
        if variant in failed:
            continue
        with _failures(failed, variant):
            own: dict[bool, Callable[[], object]] = {
                backward: _pass(algorithms[variant[0]], inputs, backward) for backward in (False, True)
            }
            if not variant[1]:
                peaks[variant] = _peak_bytes(own[True])
            elif pool is not None:
                own = {backward: pool.capture(call) for backward, call in own.items()}
            calls |= {(*variant, backward): call for backward, call in own.items()}
    times = time_in_turns(calls, rounds=rounds)
    results = []
    for algorithm_name, graph in variants:
        variant = (algorithm_name, graph)
        if variant in failed:
            results.append(Result(*variant, errors.get(variant, {}), failed=failed[variant]))
            continue
        forward, both = (times[(*variant, backward)] for backward in (False, True))
        results.append(
            Result(
                *variant,
                errors[variant],
                forward,
                both,
                over_paper_forward=_ratio(times.get((PAPER, graph, False)), forward),
                over_paper=_ratio(times.get((PAPER, graph, True)), both),
                by_ours=_ratio(both, times.get((OURS, graph, True))),
                read_gb_per_s=case.read_bytes / forward.median_ms / 1e6,
                peak_bytes=peaks.get(variant),
            )
        )
    residual = case.table.config
    return CaseReport(
        name, residual.method, residual.num_heads, case.table.num_sites, case.width, case.tokens,
        next(key for key, dtype in DTYPES.items() if dtype == case.dtype), case.has_null, case.has_gate,
        describe(case.plan, case.width), tuple(results), absent,
    )  # fmt: skip


def _ratio(one: Timing | None, other: Timing | None) -> float | None:
    return None if one is None or other is None else one.median_ms / other.median_ms


def _pass(algorithm: Algorithm, inputs: Inputs, backward: bool) -> Callable[[], None]:
    return lambda: run(algorithm, inputs, backward=backward)


@contextmanager
def _failures(failed: dict[tuple[str, bool], str], variant: tuple[str, bool]) -> Iterator[None]:
    """Within the context an error becomes the reason why a variant has no speed."""
    free()
    try:
        yield
    except Exception as error:  # another library's may be any
        lines = str(error).strip().splitlines() or [""]
        failed[variant] = f"{type(error).__name__}: {lines[0]}"


def _peak_bytes(call: Callable[[], object]) -> int | None:
    if not platform.HAS_GPU:
        return None
    platform.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    platform.synchronize()
    return torch.cuda.max_memory_allocated() - before
