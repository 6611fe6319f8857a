"""All reads of one micro-batch, without the sublayers between them: what ``mhar bench routing`` times and checks.

Sources come to be in a model's order: a site's output is what the next source is made of. The sublayer that stands
between costs nothing: it gives a tensor that is there already, and sends back a gradient that is there already.
Autograd sees the dependencies of a model and none of its other work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mhar.depth.residual import DELTA
from megatron_mhar.depth.sites import NULL, DepthTable
from megatron_mhar.routing.api import BACKENDS, through_gate
from megatron_mhar.routing.chain import SiteParameters, start
from megatron_mhar.routing.plan import ReadPlan
from megatron_mhar.routing.reference import route_reference


@dataclass(frozen=True)
class Case:
    """What is read: a method's sites over so many tokens.

    Args:
        table: sources of every site.
        width: d.
        tokens: T of a micro-batch on one rank.
        dtype: of sources, parameters and gradients.
        gated: whether the routed sources of a delta method go through its gate and are added to a stream.
        normed: whether what a site reads goes through its sublayer's norm, as in training. Not with gates; for ours
            and the plain reads alone.
    """

    table: DepthTable
    width: int
    tokens: int
    dtype: torch.dtype
    gated: bool = True
    normed: bool = False

    @property
    def plan(self) -> ReadPlan:
        """Rows that each site reads."""
        return self.table.read_plan

    @property
    def has_null(self) -> bool:
        """Whether every site reads a null source."""
        return any(NULL in site for site in self.table.reads)

    @property
    def has_gate(self) -> bool:
        """Whether sites have gates."""
        return self.gated and self.table.config.method in DELTA

    @cached_property
    def made_after(self) -> dict[int, int]:
        """Row of the source that a sublayer's output becomes, by sublayer; -1 is the embedding."""
        made: dict[int, int] = {}
        for source, row in self.table.rows.items():
            assert made.setdefault(self.table.made_by(source), row) == row, f"two sources after one sublayer: {source}"
        return made

    @property
    def read_bytes(self) -> int:
        """Bytes of all sites' reads if each site reads its sources once for itself, and of their outputs."""
        reads = sum(map(len, self.plan.rows)) + len(self.plan.rows)
        return reads * self.tokens * self.width * self.dtype.itemsize


class Reader(Protocol):
    """One algorithm's way through one micro-batch."""

    def add(self, row: int, source: Tensor) -> Tensor:
        """Take a source `[T, d]`; what is returned stands for it from here on."""

    def read(self, site: int, sources: Sequence[Tensor], stream: Tensor | None) -> Tensor:
        """Routed sources `[T, d]` of what :meth:`add` gave; through the site's gate if there is a stream."""


@dataclass(frozen=True)
class SublayerNorm:
    """RMS norm behind a site; its epsilon is not that of the keys."""

    weight: Tensor
    eps: float = 1e-5


class Inputs:
    """Random tensors of a case, which stay where they are: graphs and passes read them in place."""

    def __init__(self, case: Case, device: torch.device, *, seed: int = 0) -> None:
        self.case = case
        self._generator = torch.Generator(device).manual_seed(seed)
        self._random = partial(torch.randn, generator=self._generator, device=device, dtype=case.dtype)
        sites, width = len(case.plan.rows), case.width
        self.sources = self._random(case.plan.num_rows, case.tokens, width)
        self.grad_outs = self._random(sites, case.tokens, width)
        self.stream = self._random(case.tokens, width) if case.has_gate else None
        # Logits of N(0, 1): a softmax that is neither flat nor one-hot.
        spread = 1 / math.sqrt(width / case.plan.num_heads)
        self.sites = {
            site: SiteParameters(
                (self._random(width) * spread).requires_grad_(),
                (1 + 0.2 * self._random(width)).requires_grad_(),
                self._random(width).requires_grad_() if case.has_null else None,
                (1 + 0.2 * self._random(1)).requires_grad_() if case.has_gate else None,
            )
            for site in range(sites)
        }
        assert not (case.normed and case.has_gate), "what comes through a gate is not normed"
        self.norms = [
            SublayerNorm((1 + 0.2 * self._random(width)).requires_grad_()) if case.normed else None
            for _ in range(sites)
        ]
        self.root = torch.zeros((), device=device, requires_grad=True)  # what the embedding is made of

    @property
    def parameters(self) -> dict[str, list[Tensor]]:
        """Parameters of all sites by kind."""
        kinds = {"query": [p.query for p in self.sites.values()], "norm": [p.norm_weight for p in self.sites.values()]}
        if self.case.has_null:
            kinds["null"] = [p.null_source for p in self.sites.values() if p.null_source is not None]
        if self.case.has_gate:
            kinds["gate"] = [p.gate for p in self.sites.values() if p.gate is not None]
        if self.case.normed:
            kinds["sublayer norm"] = [norm.weight for norm in self.norms if norm is not None]
        return kinds

    def keep_gradients_of(self, tokens: Tensor) -> None:
        """Make the output gradients of all other tokens zero: sums over tokens are then sums over these."""
        kept = self.grad_outs[:, tokens]
        self.grad_outs.zero_()
        self.grad_outs[:, tokens] = kept

    def refill_gradients(self) -> None:
        """Output gradients of all tokens, random."""
        self.grad_outs.normal_(generator=self._generator)


@dataclass
class Record:
    """What a pass made of some tokens.

    Attributes:
        tokens: their numbers.
        outs: `[len(tokens), d]` of each site, behind the gate where there is one.
        grad_sources: of each row, what its producer is sent back.
        grads: of the parameters, by kind.
    """

    tokens: Tensor
    outs: dict[int, Tensor] = field(default_factory=dict)
    grad_sources: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[str, list[Tensor]] = field(default_factory=dict)


class _Sublayer(torch.autograd.Function):
    """Makes a source of sites' outputs, at no cost in either direction."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Inputs, record: Record | None, row: int, sites: Sequence[int], *read: Tensor
    ) -> Tensor:
        ctx.inputs, ctx.record, ctx.row, ctx.sites = inputs, record, row, sites
        ctx.set_materialize_grads(False)
        return inputs.sources[row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.record is not None and grad is not None:
            ctx.record.grad_sources[ctx.row] = grad.index_select(0, ctx.record.tokens)
        before = tuple(ctx.inputs.grad_outs[site] for site in ctx.sites)
        return (None, None, None, None, *(before or (None,)))


Algorithm = Callable[[Inputs], Reader]  # called once a pass


def run(algorithm: Algorithm, inputs: Inputs, *, backward: bool, record: Record | None = None) -> None:
    """One micro-batch's reads, and their backward."""
    case, reader = inputs.case, algorithm(inputs)

    def source(row: int, sites: Sequence[int], read: Sequence[Tensor]) -> Tensor:
        return reader.add(row, _Sublayer.apply(inputs, record, row, sites, *read))

    sources = {case.made_after[-1]: source(case.made_after[-1], (), [inputs.root])}
    open_sites: dict[int, Tensor] = {}  # outputs that no source has been made of yet
    for site, rows in enumerate(case.plan.rows):
        out = reader.read(site, [sources[row] for row in rows], inputs.stream)
        if record is not None:
            record.outs[site] = out.detach().index_select(0, record.tokens)
        open_sites[site] = out
        if site in case.made_after:
            row = case.made_after[site]
            sources[row] = source(row, tuple(open_sites), list(open_sites.values()))
            open_sites = {}
    if not backward:
        return
    kinds = inputs.parameters
    leaves = [inputs.root, *(p for parameters in kinds.values() for p in parameters)]
    ends = [inputs.grad_outs[site] for site in open_sites]
    found = iter(torch.autograd.grad(list(open_sites.values()), leaves, ends, allow_unused=True)[1:])
    if record is not None:
        # Where a site has one source, its query has no gradient, or zero.
        record.grads = {
            kind: [torch.zeros_like(p) if (grad := next(found)) is None else grad for p in parameters]
            for kind, parameters in kinds.items()
        }


class _Chain:
    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self._reader = inputs, start(inputs.case.plan, inputs.sites)

    def add(self, row: int, source: Tensor) -> Tensor:
        return self._reader.add(row, source)

    def read(self, site: int, sources: Sequence[Tensor], stream: Tensor | None) -> Tensor:
        if not sources:  # the released form's first site reads its null source alone
            return plain(self._inputs).read(site, sources, stream)
        own = None if self._inputs.case.plan.reads[site].own is None else sources[-1]
        return self._reader.read(site, stream, self._inputs.norms[site], own)


def fused(inputs: Inputs) -> Reader:
    """The chain that training uses."""
    return _Chain(inputs)


class SiteBySite:
    """Each read a call of its own, its gradients added up by autograd.

    Args:
        call: sources (a null source first), query, norm weight, H and epsilon to routed sources.
    """

    def __init__(self, inputs: Inputs, call: Callable[[Sequence[Tensor], Tensor, Tensor, int, float], Tensor]) -> None:
        self._inputs, self._call = inputs, call

    def add(self, row: int, source: Tensor) -> Tensor:
        """The source itself."""
        return source

    def read(self, site: int, sources: Sequence[Tensor], stream: Tensor | None) -> Tensor:
        """Routed sources `[T, d]`, through the site's gate if there is a stream."""
        query, norm_weight, null, gate = self._inputs.sites[site]
        plan = self._inputs.case.plan
        each = sources if null is None else [null, *sources]
        out = through_gate(self._call(each, query, norm_weight, plan.num_heads, plan.eps), gate, stream)
        return through_norm(out, self._inputs.norms[site])


def through_norm(out: Tensor, norm: SublayerNorm | None) -> Tensor:
    """What a sublayer is given of what its site has read."""
    return out if norm is None else torch.nn.functional.rms_norm(out, norm.weight.shape, norm.weight, norm.eps)


def plain(inputs: Inputs) -> Reader:
    """The backend "torch"."""
    return SiteBySite(inputs, BACKENDS["torch"])


# Relative errors that are still right: of outputs, and of gradients. In bf16 an output is rounded once or twice (2e-3
# each); gradients of sources are rounded as often as an algorithm adds to them.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (6e-3, 3e-2)}


class WrongResult(Exception):
    """An algorithm's results are not those of the definition; says which, and by how much."""


def check(
    algorithm: Algorithm, inputs: Inputs, truth: Record, *, through: Callable[..., None] = run
) -> dict[str, float]:
    """Hold a pass against the definition.

    Args:
        algorithm: what is checked.
        inputs: whose output gradients are those of the truth.
        truth: of some tokens, see :func:`reference`.
        through: runs the pass, as :func:`run` does.

    Returns:
        Largest relative error (of norms) of outputs, of source gradients, and of the gradients of each kind of
        parameter.

    Raises:
        WrongResult: an error is larger than :data:`TOLERANCES` allow.
    """
    found = Record(truth.tokens)
    through(algorithm, inputs, backward=True, record=found)
    errors = {
        "outputs": max(_error(found.outs[site], expected) for site, expected in truth.outs.items()),
        "source gradients": max(
            _error(found.grad_sources.get(row), expected) for row, expected in truth.grad_sources.items()
        ),
    }
    for kind, expected in truth.grads.items():  # one site's may be nothing: together
        errors[f"{kind} gradients"] = _error(torch.cat(found.grads[kind]), torch.cat(expected))
    allowed = dict.fromkeys(errors, TOLERANCES[inputs.case.dtype][1]) | {"outputs": TOLERANCES[inputs.case.dtype][0]}
    wrong = [f"{name} {error:.1e} (allowed {allowed[name]:.0e})" for name, error in errors.items()
             if not error <= allowed[name]]  # fmt: skip
    if wrong:
        raise WrongResult(f"relative errors: {', '.join(wrong)}")
    return errors


def _error(found: Tensor | None, expected: Tensor) -> float:
    if found is None:
        return math.inf
    norm = torch.linalg.vector_norm(expected)
    return float(torch.linalg.vector_norm(found.double() - expected) / norm) if norm else float(found.abs().max())


def reference(inputs: Inputs, tokens: Tensor) -> Record:
    """What :mod:`megatron_mhar.routing.reference` makes of some tokens, in float64, site by site."""
    case, record = inputs.case, Record(tokens)

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().double().requires_grad_()

    sources = [leaf(row[tokens]) for row in inputs.sources]
    grads: dict[str, list[Tensor]] = {kind: [] for kind in inputs.parameters}
    for site, rows in enumerate(case.plan.rows):
        query, norm_weight, null, gate = (None if p is None else leaf(p) for p in inputs.sites[site])
        assert query is not None and norm_weight is not None
        read = [*([] if null is None else [null]), *(sources[row] for row in rows)]
        out = route_reference(read, query, norm_weight, case.plan.num_heads, case.plan.eps)
        out = through_gate(out, gate, None if inputs.stream is None else inputs.stream[tokens].double())
        norm = inputs.norms[site]
        behind = None if norm is None else leaf(norm.weight)
        out = through_norm(out, None if norm is None or behind is None else SublayerNorm(behind, norm.eps))
        given = {"query": query, "norm": norm_weight, "null": null, "gate": gate, "sublayer norm": behind}
        own = {kind: parameter for kind, parameter in given.items() if parameter is not None}
        record.outs[site] = out.detach()
        out.backward(inputs.grad_outs[site, tokens].double())
        for kind, parameter in own.items():
            assert parameter.grad is not None
            grads[kind].append(parameter.grad)
    record.grad_sources = {row: s.grad for row, s in enumerate(sources) if s.grad is not None}
    record.grads = grads
    return record


def some_tokens(count: int, device: torch.device, *, at_most: int = 64) -> Tensor:
    """Numbers of tokens that are checked: first, last, and others evenly between."""
    return torch.linspace(0, count - 1, min(count, at_most), device=device, dtype=torch.float64).round().long()


def check_case(case: Case, algorithm: Algorithm, device: torch.device) -> dict[str, float]:
    """Errors of one algorithm on one case, see :func:`check`."""
    inputs = Inputs(case, device)
    tokens = some_tokens(case.tokens, device)
    inputs.keep_gradients_of(tokens)
    return check(algorithm, inputs, reference(inputs, tokens))
