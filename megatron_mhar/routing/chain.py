"""A chain: all reads of one micro-batch's sources on one stage, with their backward by pull.

Read by read, every read of a source would send back a gradient of its own, to be added to the others by autograd in
passes over memory. In a chain a read's backward only notes its output gradient; a source's gradient is formed once,
just before its producer's backward is about to run, from the output gradients of all the sites that read it. Autograd
keeps the order, see :class:`Reader`. Parameters get their gradients last, when all sources have.

A source is copied once, into the chain's buffer, where its statistic is taken; the tensor that it came in is free from
then on. A source that one site alone reads stays out of all this: it goes into its read and gets its gradient in that
read's backward. A chain serves one backward; any number of chains may be in flight, and parts of one may be run again
in the backward (recomputation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mhar.routing import kernels
from megatron_mhar.routing.plan import ReadPlan
from megatron_mhar.routing.schedule import GROUP, HALF, schedule

LOG2_E = 1.4426950408889634
_PARTS = 32  # of the tokens, in sums over them: enough programs to fill a GPU, few enough that partial sums cost little
_LOGITS_SHARE = 8  # where the logits of all pairs are kept, they need at most this part of the sites' outputs
_MANY_PARTS = 1024  # of the tokens, in sums that are taken on the way: where a program goes through its part's tokens
_NULL_TOKENS = 32  # a program of the null sources' kernel, which goes through them one by one
_USED = "this routing chain has been through its backward, which it serves once, or has no source yet"


class SiteParameters(NamedTuple):
    """Parameters of one site, `[d]`; the gate is `[1]`."""

    query: Tensor
    norm_weight: Tensor
    null_source: Tensor | None = None
    gate: Tensor | None = None


def _taken(parameters: SiteParameters) -> SiteParameters:
    """Detached: a chain is held by autograd's nodes, and must not hold them. Contiguous: kernels know no strides."""
    return SiteParameters(*(None if p is None else p.detach().contiguous() for p in parameters))  # type: ignore[arg-type]


class Norm(Protocol):
    """An RMS norm."""

    @property
    def eps(self) -> float:
        """Of the mean square."""

    @property
    def weight(self) -> Tensor:
        """`[d]`."""


class Reader:
    """A forward's way through a chain; made by :func:`start`.

    Each shared source and each read takes the ticket that the one before has left, and leaves one: so their backwards
    run in the opposite order, however sublayers depend on each other, and a read needs no edge to each of its sources.
    The first ticket depends on the sites' parameters, whose gradients come last.

    Attributes:
        ticket: `[0]`, what was left last. The chain, which is kept by autograd, does not keep it.
    """

    def __init__(self, chain: Chain, ticket: Tensor) -> None:
        self._chain, self.ticket = chain, ticket

    def at(self, ticket: Tensor) -> Reader:
        """The same chain from another ticket on."""
        return Reader(self._chain, ticket)

    def add(self, row: int, source: Tensor) -> Tensor:
        """Take a source `[..., d]` into ``row``; what is returned is used in place of it from here on.

        Its values are there once a site has read it: whoever looks at them before calls :meth:`settle`. A source that
        no site of the chain reads, or a single one for itself, is none of its business.
        """
        if row >= self._chain.num_rows:
            return source
        added: Tensor
        added, self.ticket = _Add.apply(self._chain, row, source, self.ticket)
        return added

    def read(
        self, site: int, stream: Tensor | None = None, norm: Norm | None = None, own: Tensor | None = None
    ) -> Tensor:
        """Routed sources of ``site``, of their shape; those that it shares with others have been added.

        Args:
            stream: given where the site has a gate: what comes back is then stream + gate * routed sources.
            norm: what comes back has gone through it. Not for sites with a gate.
            own: the source that this site alone reads, where the plan names one.
        """
        out: Tensor
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        out, self.ticket = _Read.apply(self._chain, site, self.ticket, stream, weight, own, eps)
        return out

    def settle(self) -> None:
        """Write the values of all sources that no site has read yet."""
        self._chain.settle()


class Chain:
    """Sources and reads of one micro-batch on one stage, tensors in and out: what the kernels do, and in which order.

    Attributes:
        sites: parameters of the sites, detached.
        num_rows: of the plan's first rows, so many are read here.
    """

    def __init__(self, plan: ReadPlan, sites: dict[int, SiteParameters]) -> None:
        self.plan = plan
        self.sites = {site: _taken(parameters) for site, parameters in sites.items()}
        key = next(iter(sites.values())).query.numel() // plan.num_heads
        self._how = schedule(plan.num_heads, key)
        self._grouped = plan.grows_by_one and self._how.groups
        self.num_rows = max(plan.reads[site].shared for site in sites)
        first, stop = min(sites), max(sites) + 1
        self._last_site: int | None = stop - 1  # until it has read
        self._readers = [range(max(first, reader), stop) for reader in plan.first_readers[: self.num_rows]]
        self._buffers: _Buffers | None = None
        self._rows: set[int] = set()  # sources that have been added and not yet pulled
        self._waiting: dict[int, Tensor] = {}  # those that the site which reads them first will take in
        self._noted: dict[int, tuple[Tensor, Tensor]] = {}  # outputs and their gradients that are still to be taken in
        self._read_back: set[int] = set()  # sites whose output gradient is there
        self._site_block: _SiteBlock | None = None  # the block of sites that has read last
        self._row_blocks: dict[int, _RowBlock] = {}  # blocks of rows of which some have been pulled

    def settle(self) -> None:
        """See :meth:`Reader.settle`."""
        for row in list(self._waiting):
            self._take(row, self._waiting.pop(row))

    def add(self, row: int, source: Tensor) -> Tensor:
        if self._buffers is None:
            self._buffers = _Buffers(
                self.plan, self.num_rows, list(self.sites), source, self._how.span if self._grouped else 0
            )
        if row not in self._rows:  # else it is run again in the backward, and there already
            self._rows.add(row)
            count, own = self.plan.reads[self._readers[row][0]]
            if row == count - 1 and own is None:
                self._waiting[row] = source.contiguous()
            else:
                self._take(row, source.contiguous())
        return self._buffers.sources[row].view(source.shape)

    def _take(self, row: int, source: Tensor) -> None:
        b, how = self._ready(), self._how
        kernels.add[(b.tokens,)](
            source, b.sources, b.inverse_rms, b.tokens, row, self.plan.eps, **how.tile, num_warps=how.num_warps
        )

    def read(
        self, site: int, stream: Tensor | None, norm: Tensor | None, own: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Routed sources, and what goes on to the sublayer: the same without a gate and a norm."""
        b, how = self._ready(), self._how
        query, norm_weight, null, gate = self.sites[site]
        assert (stream is None) == (gate is None), f"site {site}: a gate goes with a stream"
        assert gate is None or norm is None, f"site {site}: what comes through a gate is not normed"
        count, own_row = self.plan.reads[site]
        assert (own is None) == (own_row is None), f"site {site}: its own source is row {own_row}"
        assert own is None or own.shape == b.shape, f"site {site}: its own source is {own.shape}, others are {b.shape}"
        assert count or own is not None, f"site {site} reads no row"
        out = b.sources.new_empty(b.shape)
        given = out if stream is None and norm is None else torch.empty_like(out)
        newest = self._waiting.pop(count - 1, None) if own is None else own
        older = site // how.span * how.span if self._grouped else 0  # rows that are read together with other sites
        mixed, lse = self._read_group(site) if older else (None, None)
        kernels.read[(b.tokens,)](
            b.sources, b.inverse_rms, newest, query, norm_weight, null, gate,
            stream, norm, mixed, lse, out, given, b.scaled_queries, b.lse, b.logits, b.tokens, site - b.base,
            self.num_rows, older, count if own is not None else count - 1, self.plan.eps, eps,
            HAS_NEWEST=newest is not None, HAS_OWN=own is not None, HAS_NULL=null is not None,
            HAS_GATE=gate is not None, HAS_NORM=norm is not None, HAS_OLDER=older > 0, KEEP=b.logits is not None,
            SPAN=b.span, **how.tile, **how.read,
        )  # fmt: skip
        if site == self._last_site:
            # What comes now, the logits of a large vocabulary, needs its memory. Only once: if reads are run again, the
            # block that they make anew serves the sites before too.
            self._site_block = self._last_site = None
        return out, given

    def _read_group(self, site: int) -> tuple[Tensor, Tensor]:
        """What the sites of a block read of older rows; made for all of them, or half, when the first one asks."""
        b, how, number = self._ready(), self._how, site // GROUP
        if self._site_block is None or self._site_block.number != number:
            self._site_block = None  # its memory is free for the next
            self._site_block = _SiteBlock(number, b.new_group(), b.new_group_statistic(), halved=False)
            if number:
                self._read_rows(self._site_block, 0, 0, number * GROUP)
        block = self._site_block
        if how.span == HALF and site % GROUP >= HALF and not block.halved:
            self._read_rows(block, HALF, number * GROUP, number * GROUP + HALF)
            block.halved = True
        return block.mixed, block.lse

    def _read_rows(self, block: _SiteBlock, skipped: int, start: int, stop: int) -> None:
        """Rows ``start`` to ``stop - 1``, as the sites of a block read them but for the first ``skipped``."""
        b, how, base = self._ready(), self._how, block.number * GROUP
        # A chain of one pipeline stage may begin within a block; the slots of a block's sites are always the same.
        sites = [site for site in range(base + skipped, base + GROUP) if site in self.sites]
        skipped = sites[0] - base
        kernels.read_group[(b.tokens * self.plan.num_heads,)](
            b.sources, b.inverse_rms, *b.split_queries(self.sites), block.mixed[skipped:], block.lse[..., skipped:],
            b.tokens, sites[0] - b.base, len(sites), start, stop, GO_ON=0 < start, **how.group_tile,
            **(how.read_half if stop - start == HALF else how.read_group),
        )  # fmt: skip

    def note(self, site: int, out: Tensor, grad_out: Tensor) -> None:
        self._begin_back(site)
        self._noted[site] = out, grad_out.contiguous()

    def _begin_back(self, site: int) -> _Buffers:
        """A site's output gradient is there; it comes once."""
        if site in self._read_back:
            raise RuntimeError(_USED)
        self._read_back.add(site)
        return self._ready()

    def take_back(self, site: int, out: Tensor, grad: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Take in what came back to a norm behind a site; the gradient of its weight."""
        b, how = self._begin_back(site), self._how
        parts, tokens, partial = b.many_parts()
        kernels.couple_normed[(parts,)](
            out, grad.contiguous(), norm.contiguous(), b.grad_outs, b.coupling, partial, b.tokens, site - b.base,
            tokens, eps, **how.tile, num_warps=how.num_warps,
        )  # fmt: skip
        return partial.sum(0).to(norm.dtype)

    def pull_own(self, site: int, source: Tensor) -> Tensor:
        """Gradient of a source that ``site`` alone reads, from its output gradient, which has come."""
        b, how = self._ready(), self._how
        if site in self._noted:
            self._couple(site)
        query, norm_weight, *_ = self.sites[site]
        parts, tokens, partial = b.many_parts()
        grad_source = torch.empty_like(source)
        kernels.own[(parts,)](
            source, query, norm_weight, b.grad_outs, b.lse, b.coupling, grad_source, partial, b.tokens, site - b.base,
            tokens, self.plan.eps, **how.tile, num_warps=how.num_warps,
        )  # fmt: skip
        torch.sum(partial, 0, out=b.partial[-1, site - b.base])
        return grad_source

    def _couple(self, site: int) -> None:
        """Take in the output gradient of a site."""
        b, how = self._ready(), self._how
        out, grad_out = self._noted.pop(site)
        gate = self.sites[site].gate
        kernels.couple[(b.tokens,)](
            out, grad_out, gate, b.grad_outs, b.coupling, None if gate is None else b.grad_gates, b.tokens,
            site - b.base,
            HAS_GATE=gate is not None, **how.tile, num_warps=how.num_warps,
        )  # fmt: skip

    def pull(self, row: int, grad: Tensor | None) -> Tensor | None:
        """Gradient of a source: ``grad``, which came to it from elsewhere, and that of all reads."""
        b, how = self._ready(), self._how
        if row not in self._rows:
            raise RuntimeError(_USED)
        self._rows.remove(row)
        self._waiting.pop(row, None)
        sites = [site for site in self._readers[row] if site in self._read_back]
        if not sites:
            self._close_block(row // GROUP)
            return grad
        first, last = sites[0], sites[-1] + 1
        assert sites == list(range(first, last)), "a read's backward has not run"
        block = self._row_blocks.get(row // GROUP)
        if block is None:
            rows = self._readers[row // GROUP * GROUP : (row // GROUP + 1) * GROUP]
            block = self._row_blocks[row // GROUP] = _RowBlock(b, rows)
        stop = min(last, (row // how.span + 1) * how.span) if self._grouped else last
        just_come = first < stop and first in self._noted  # most often the first site's gradient has
        for site in sites:
            if site in self._noted and not (just_come and site == first):
                self._couple(site)
        if stop < last:
            self._pull_group(block, row, first, last)
        out, grad_out = self._noted.pop(first) if just_come else (None, None)
        gate = self.sites[first].gate
        later, radial = block.later if stop < last and block.later else (None, None)
        grad_source = torch.empty_like(b.sources[row])
        kernels.pull[(triton.cdiv(b.tokens, how.pull_tokens),)](
            b.sources, None if grad is None else grad.contiguous(), grad_source, out, grad_out, gate, b.grad_outs,
            b.inverse_rms, b.scaled_queries, b.lse, b.coupling, None if gate is None else b.grad_gates, b.logits, later,
            radial, block.tiles, block.readers, b.tokens, self.num_rows, row, first - b.base, stop - b.base,
            last - b.base, block.first_site_block, block.num_site_blocks,
            HAS_GRAD=grad is not None, HAS_OUT=just_come, HAS_GATE=gate is not None, HAS_LATER=stop < last,
            KEPT=b.logits is not None, SPAN=b.span, **how.tile, TOKENS=how.pull_tokens, **how.pull,
        )  # fmt: skip
        self._close_block(row // GROUP)
        return grad_source

    def _pull_group(self, block: _RowBlock, row: int, first: int, last: int) -> None:
        """What later sites give to the rows of a block, or half; made for all of them when the first one asks."""
        b, how, number = self._ready(), self._how, row // GROUP
        middle, end = number * GROUP + HALF, (number + 1) * GROUP
        if block.later is None:
            block.later = b.new_group(), b.new_group_statistic()
            if last > end:
                self._pull_rows(block, number * GROUP, end, max(first, end), last, go_on=False)
        if how.span == HALF and row < middle and last > middle and not block.halved:
            if first < end:
                self._pull_rows(block, number * GROUP, middle, max(first, middle), min(last, end), go_on=last > end)
            block.halved = True

    def _pull_rows(self, block: _RowBlock, row: int, stop_row: int, first: int, stop: int, *, go_on: bool) -> None:
        """What the sites ``first`` to ``stop - 1`` give to the rows from ``row`` on, to ``block.later``."""
        b, how = self._ready(), self._how
        assert block.later is not None
        kernels.pull_group[(b.tokens * self.plan.num_heads,)](
            b.sources, b.grad_outs, b.inverse_rms, *b.split_queries(self.sites), b.lse, b.coupling, *block.later,
            block.tiles, b.tokens, row, min(stop_row, self.num_rows) - row, first // GROUP * GROUP - b.base,
            first - b.base, stop - b.base, block.first_site_block, block.num_site_blocks, GO_ON=go_on, **how.group_tile,
            **(how.pull_half if stop_row - row == HALF else how.pull_group),
        )  # fmt: skip

    def _close_block(self, number: int) -> None:
        """Once the last row of a block has been pulled: what the block gives to the queries' gradients."""
        if number not in self._row_blocks or any(row // GROUP == number for row in self._rows):
            return
        b, how, block = self._ready(), self._how, self._row_blocks.pop(number)
        heads, sites = self.plan.num_heads, block.num_site_blocks * GROUP
        key = b.width // heads
        columns = how.columns
        at_once = max(16, min(64, triton.next_power_of_2(sites)))
        kernels.query[(triton.cdiv(sites, at_once), heads * triton.cdiv(key, columns), b.parts)](
            b.sources, block.tiles, block.readers, b.partial, b.tokens, number * GROUP, block.first_site_block,
            block.num_site_blocks, b.num_sites, b.tokens_a_part,
            H=heads, K=key, KP=columns, SITES=at_once, BLOCK=64, STAGES=3, num_warps=4,
        )  # fmt: skip

    def parameter_gradients(self) -> list[Tensor | None]:
        """Gradients of all sites' queries, norm weights and null sources, in order."""
        if self._rows:
            raise RuntimeError(
                f"a routing chain's backward left out its sources {sorted(self._rows)}: the loss must depend on all of "
                "the chain, up to its last source and read"
            )
        b, grads = self._buffers, {}
        if b is not None and self._read_back:
            for site in list(self._noted):
                self._couple(site)
            first = b.first_site
            queries, norm_weights = b.stacked(self.sites)
            u = b.partial.sum(0)[first - b.base :]
            like = self.sites[first]
            grad_nulls: Tensor | None = None
            if like.null_source is not None:
                grad_nulls, from_nulls = self._null_gradients(queries * norm_weights)
                u = u + from_nulls
            grad_queries, grad_norms = (u * norm_weights).to(like.query.dtype), (u * queries).to(like.norm_weight.dtype)
            grad_gates = None if like.gate is None else b.grad_gates.sum((1, 2)).to(like.gate.dtype)[first - b.base :]
            for site in self._read_back:
                i = site - first
                null = None if grad_nulls is None else grad_nulls[i]
                gate = None if grad_gates is None else grad_gates[i : i + 1]
                grads[site] = (grad_queries[i], grad_norms[i], null, gate)
        self._buffers = self._site_block = None
        return [
            gradient
            for site, parameters in self.sites.items()
            for gradient, p in zip(grads.get(site, (None,) * 4), parameters, strict=True)
            if p is not None
        ]

    def _null_gradients(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the null sources `[sites, d]`, and their part of u in fp32.

        Args:
            scaled: query * norm_weight of the sites, in fp32.
        """
        b, how, heads, sites = self._ready(), self._how, self.plan.num_heads, len(self.sites)
        nulls = torch.stack([p.null_source for p in self.sites.values()])  # type: ignore[misc]
        parts = triton.cdiv(b.tokens, _NULL_TOKENS)
        mixed = torch.empty((sites, parts, b.width), dtype=torch.float32, device=nulls.device)
        grad_logit = torch.empty((sites, parts, heads), dtype=torch.float32, device=nulls.device)
        kernels.null[(parts, sites)](
            nulls, scaled, b.grad_outs, b.lse, b.coupling, mixed, grad_logit, b.tokens,
            b.first_site - b.base, _NULL_TOKENS, self.plan.eps, **how.tile, num_warps=how.num_warps,
        )  # fmt: skip
        x, dl = nulls.float(), grad_logit.sum(1)
        r = torch.rsqrt(x.square().mean(1, keepdim=True) + self.plan.eps)
        logit = (x * scaled).view(sites, heads, -1).sum(2) * r
        weight = (dl * r).repeat_interleave(b.width // heads, 1)
        grad = mixed.sum(1) + weight * scaled - x * (r.square() / b.width * (dl * logit).sum(1, keepdim=True))
        return grad.to(nulls.dtype), weight * x

    def _ready(self) -> _Buffers:
        if self._buffers is None:
            raise RuntimeError(_USED)
        return self._buffers


@dataclass
class _SiteBlock:
    """What the sites of a block read of older rows, `[GROUP, T, d]` and `[T, H, GROUP]`.

    Attributes:
        halved: whether the second half of the sites has read the rows of the first half.
    """

    number: int
    mixed: Tensor
    lse: Tensor
    halved: bool


class _RowBlock:
    """What the gradients of ``GROUP`` rows share, while they are being pulled.

    Attributes:
        tiles: gradients of their logits, `[H, blocks of sites, T, GROUP rows, GROUP sites]`.
        readers: sites of which each row has tiles, `[GROUP, 2]`.
        later: partial gradients from later sites, and their sums of dl logit.
        halved: whether the first half of the rows has theirs from the second half of the sites.
    """

    def __init__(self, b: _Buffers, rows: list[range]) -> None:
        self.first_site_block = (min(readers[0] for readers in rows) - b.base) // GROUP
        self.num_site_blocks = (max(readers[-1] for readers in rows) - b.base) // GROUP + 1 - self.first_site_block
        shape = (b.heads, self.num_site_blocks, b.tokens, GROUP, GROUP)
        self.tiles = torch.empty(shape, dtype=b.sources.dtype, device=b.sources.device)
        self.readers = torch.zeros((GROUP, 2), dtype=torch.int32, device=b.sources.device)
        self.later: tuple[Tensor, Tensor] | None = None
        self.halved = False


class _Buffers:
    """What a chain's kernels share, once the shape of a source is known.

    Args:
        plan: of all sites.
        num_rows: rows that are read here.
        sites: that read them.
        like: a source.
        span: see :class:`Schedule`; 0 where rows are read site by site.
    """

    def __init__(self, plan: ReadPlan, num_rows: int, sites: list[int], like: Tensor, span: int) -> None:
        device, heads = like.device, plan.num_heads
        # Sites follow each other; kernels number them from the first block on of which there are any.
        self.first_site, self.base = sites[0], sites[0] // GROUP * GROUP
        self.num_sites = sites[-1] + 1 - self.base
        assert sites == list(range(sites[0], sites[-1] + 1)), sites
        self.heads, self.shape = heads, like.shape
        self.width = like.shape[-1]
        self.tokens = like.numel() // self.width
        self.tokens_a_part = max(64, triton.cdiv(self.tokens, _PARTS))
        self.parts = triton.cdiv(self.tokens, self.tokens_a_part)
        self._empty = partial(torch.empty, device=device)
        self.sources = self._empty(num_rows, self.tokens, self.width, dtype=like.dtype)
        fp32 = partial(self._empty, dtype=torch.float32)
        self.inverse_rms = fp32(num_rows, self.tokens)
        self.lse = fp32(self.num_sites, self.tokens, heads)
        # Logits are kept for the backward: with groups those within spans, (span + 1) / 2 numbers a site, head and
        # token; without, those of all pairs where they are few.
        self.span = span
        pairs = triton.cdiv(self.num_sites, span) * (span * (span + 1) // 2) if span else self.num_sites * num_rows
        few = span or pairs * heads * 4 * _LOGITS_SHARE <= self.num_sites * self.width * like.element_size()
        self.logits = fp32(pairs, self.tokens, heads) if few else None
        # query * norm_weight * log2(e). With logits at hand the backward needs no more digits than the sources have.
        self.scaled_queries = self._empty(self.num_sites, self.width, dtype=like.dtype if few else torch.float32)
        self._stacked: tuple[Tensor, Tensor] | None = None
        self._split: tuple[Tensor, Tensor] | None = None

    def new_group(self) -> Tensor:
        """Something of the shape of a source for each member of a group, `[GROUP, T, d]`."""
        return self._empty(GROUP, self.tokens, self.width, dtype=self.sources.dtype)

    def new_group_statistic(self) -> Tensor:
        """A number for each member of a group, `[T, H, GROUP]`."""
        return self._empty(self.tokens, self.heads, GROUP, dtype=torch.float32)

    def stacked(self, sites: dict[int, SiteParameters]) -> tuple[Tensor, Tensor]:
        """Queries and norm weights `[sites of this chain, d]` in fp32."""
        if self._stacked is None:
            queries = torch.stack([p.query for p in sites.values()]).float()
            self._stacked = queries, torch.stack([p.norm_weight for p in sites.values()]).float()
        return self._stacked

    def split_queries(self, sites: dict[int, SiteParameters]) -> tuple[Tensor, Tensor]:
        """Scaled queries `[sites, d]` in two parts of the sources' type, whose sum has more digits than it."""
        if self._split is None:
            queries, norm_weights = self.stacked(sites)
            scaled = queries * (norm_weights * LOG2_E)
            high, low = (torch.empty_like(self.scaled_queries, dtype=self.sources.dtype) for _ in range(2))
            own = slice(self.first_site - self.base, None)
            high[own] = scaled
            low[own] = scaled - high[own].float()
            self._split = high, low
        return self._split

    # What the backward alone needs is made when it begins.

    @cached_property
    def grad_outs(self) -> Tensor:
        """Output gradients of the sites, `[sites, T, d]`."""
        return self._empty(self.num_sites, self.tokens, self.width, dtype=self.sources.dtype)

    @cached_property
    def coupling(self) -> Tensor:
        """Their products with the outputs, `[sites, T, H]`."""
        return torch.empty_like(self.lse)

    @cached_property
    def grad_gates(self) -> Tensor:
        """Products of what came back to gates with the outputs, parts of the gates' gradients, `[sites, T, H]`."""
        return torch.empty_like(self.lse)

    def many_parts(self) -> tuple[int, int, Tensor]:
        """Parts of the tokens, the tokens in one, and room for a sum over each, `[parts, d]`."""
        tokens = max(4, triton.cdiv(self.tokens, _MANY_PARTS))  # fewer, and the sums would be as large as a gradient
        parts = triton.cdiv(self.tokens, tokens)
        return parts, tokens, self._empty(parts, self.width, dtype=torch.float32)

    @cached_property
    def partial(self) -> Tensor:
        """u of every site over each part of the tokens, and last what its own source gives, `[parts + 1, sites, d]`."""
        return torch.zeros(
            (self.parts + 1, self.num_sites, self.width), dtype=torch.float32, device=self.sources.device
        )


def start(plan: ReadPlan, sites: dict[int, SiteParameters]) -> Reader:
    """Begin a chain.

    Args:
        plan: which site reads what.
        sites: parameters of the sites of this stage, by number, with their values.
            As with all that autograd saves, they must not be changed in place before the backward.
    """
    chain = Chain(plan, sites)
    given = [p for parameters in sites.values() for p in parameters if p is not None]
    return Reader(chain, _Parameters.apply(chain, *given))


class _Parameters(torch.autograd.Function):
    """Forward makes the first ticket; backward runs last."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, *parameters: Tensor) -> Tensor:
        ctx.chain = chain
        # For autograd to refuse what has been changed in place; what reads save comes too late if they are run again.
        ctx.save_for_backward(*parameters)
        ctx.set_materialize_grads(False)
        return parameters[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        grads = ctx.chain.parameter_gradients()
        return (None, *(g if need else None for g, need in zip(grads, ctx.needs_input_grad[1:], strict=True)))


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chain, row: int, source: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor]:
        ctx.chain, ctx.row, ctx.shape = chain, row, source.shape
        ctx.set_materialize_grads(False)
        return chain.add(row, source.detach()), ticket.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[None, None, Tensor | None, None]:
        grad_source = ctx.chain.pull(ctx.row, grad)
        return None, None, None if grad_source is None else grad_source.view(ctx.shape), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        chain: Chain,
        site: int,
        ticket: Tensor,
        stream: Tensor | None,
        norm: Tensor | None,
        own: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.chain, ctx.site, ctx.eps = chain, site, eps
        ctx.set_materialize_grads(False)
        stream, weight, source = (None if x is None else x.detach().contiguous() for x in (stream, norm, own))
        routed, out = chain.read(site, stream, weight, source, eps)
        # Parameters for autograd to refuse what has been changed in place, before a source gets a gradient of it.
        ctx.save_for_backward(routed, norm, own, *chain.sites[site])
        return out, ticket.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        routed, norm, own, *_ = ctx.saved_tensors
        grad = torch.zeros_like(routed) if grad_out is None else grad_out
        grad_norm = None
        if norm is not None:
            grad_norm = ctx.chain.take_back(ctx.site, routed, grad, norm, ctx.eps)
        else:
            ctx.chain.note(ctx.site, routed, grad)
        grad_own = None if own is None else ctx.chain.pull_own(ctx.site, own.contiguous())
        grads = (None, None, None, grad_out, grad_norm, grad_own, None)
        return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=True))


def route_fused(
    sources: Sequence[Tensor] | Tensor, query: Tensor, norm_weight: Tensor, num_heads: int, eps: float
) -> Tensor:
    """See :func:`megatron_mhar.routing.route`: a chain of one site."""
    wide = [source for source in sources if source.dim() > 1]
    shared = [source for source in sources if source.dim() == 1]
    like = wide[0] if wide else shared[0]
    if not wide:
        wide, shared = [shared[0].unsqueeze(0)], shared[1:]
        return route_fused([*wide, *shared], query, norm_weight, num_heads, eps).squeeze(0)
    wide += [source.to(like.dtype).expand_as(like) for source in shared[1:]]
    reader = start(
        ReadPlan((tuple(range(len(wide))),), num_heads, eps), {0: SiteParameters(query, norm_weight, *shared[:1])}
    )
    for row, source in enumerate(wide):
        reader.add(row, source)
    return reader.read(0)
