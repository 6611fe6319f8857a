"""The routing algorithm that the MHAR paper publishes (arXiv 2607.27230), the yardstick of ours.

One program a token goes through a site's sources by online softmax, taking each source's statistic anew, and keeps the
logits (the paper keeps the weights: a pass more). A site's backward goes through its sources twice, once for the
coupling term of the softmax and once for the gradients, and adds to the gradient of every source in place, in fp32. So
it needs the sources in one buffer, and backwards in strictly reverse order.

Written from the paper's description for this benchmark. It has null sources, and does without a pass over the weights
and with one partial sum for query and norm weight: where it differs from the paper's, it is the faster one.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton compiles the kernels and takes their types from what they are called with.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mhar.routing import through_gate
from megatron_mhar.routing.chain import SiteParameters
from megatron_mhar.routing.plan import ReadPlan


@triton.jit
def _channels(H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr):
    """Heads `[HP]`; offsets of a token's channels `[HP, KP]`, and which of them there are."""
    head = tl.arange(0, HP)
    channel = tl.arange(0, KP)
    return head, head[:, None] * K + channel[None, :], (head < H)[:, None] & (channel < K)[None, :]


@triton.jit
def _source(sources, null, i, row, token, tokens, count, at, there, D: tl.constexpr, HAS_NULL: tl.constexpr):
    """Source ``i`` of a site: one of ``count`` rows, or behind them the null source."""
    x = tl.load(sources + (row * tokens.to(tl.int64) + token) * D + at, mask=there & (i < count), other=0.0)
    x = x.to(tl.float32)
    if HAS_NULL:
        x += tl.load(null + at, mask=there & (i == count), other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["tokens", "prefix", "skip", "count"])
def read(
    sources, query, norm_weight, null, out, logits, lse, tokens, prefix, skip, count, eps,
    HAS_NULL: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """One site's output `[T, d]`, its logits `[count, T, H]` and log sum exp of these `[T, H]`."""
    D: tl.constexpr = H * K
    token = tl.program_id(0).to(tl.int64)
    head, at, there = _channels(H, K, HP, KP)
    q = tl.load(query + at, mask=there, other=0.0).to(tl.float32)
    q *= tl.load(norm_weight + at, mask=there, other=0.0).to(tl.float32)
    top = tl.full([HP], -1e30, tl.float32)
    total = tl.zeros([HP], tl.float32)
    mixed = tl.zeros([HP, KP], tl.float32)
    for i in range(count + HAS_NULL):
        row = tl.where(i < prefix, i, i + skip)
        x = _source(sources, null, i, row, token, tokens, count, at, there, D, HAS_NULL)
        r = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / D + eps)
        logit = tl.sum(q * x, 1) * r
        tl.store(logits + (i * tokens.to(tl.int64) + token) * H + head, logit, mask=head < H)
        higher = tl.maximum(top, logit)
        old = tl.exp(top - higher)
        new = tl.exp(logit - higher)
        total = total * old + new
        mixed = mixed * old[:, None] + new[:, None] * x
        top = higher
    tl.store(out + token * D + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=there)
    tl.store(lse + token * H + head, top + tl.log(total), mask=head < H)


@triton.jit(do_not_specialize=["tokens", "prefix", "skip", "count", "fresh"])
def read_backward(
    sources, query, norm_weight, null, grad_out, logits, lse, grad_sources, partial_u, partial_null,
    tokens, prefix, skip, count, fresh, eps,
    HAS_NULL: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Add to the gradients `[rows, T, d]` of a site's sources; those from the ``fresh``-th on have none yet.

    A token's part of u, with dquery = u norm_weight and dnorm_weight = u query, and of the null source's gradient go to
    ``partial_u`` and ``partial_null`` `[T, d]`.
    """
    D: tl.constexpr = H * K
    token = tl.program_id(0).to(tl.int64)
    head, at, there = _channels(H, K, HP, KP)
    q = tl.load(query + at, mask=there, other=0.0).to(tl.float32)
    q *= tl.load(norm_weight + at, mask=there, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + token * D + at, mask=there, other=0.0).to(tl.float32)
    top = tl.load(lse + token * H + head, mask=head < H, other=0.0)
    coupling = tl.zeros([HP], tl.float32)
    for i in range(count + HAS_NULL):
        row = tl.where(i < prefix, i, i + skip)
        x = _source(sources, null, i, row, token, tokens, count, at, there, D, HAS_NULL)
        logit = tl.load(logits + (i * tokens.to(tl.int64) + token) * H + head, mask=head < H, other=-1e30)
        coupling += tl.exp(logit - top) * tl.sum(grad * x, 1)
    u = tl.zeros([HP, KP], tl.float32)
    grad_null = tl.zeros([HP, KP], tl.float32)
    for i in range(count + HAS_NULL):
        row = tl.where(i < prefix, i, i + skip)
        x = _source(sources, null, i, row, token, tokens, count, at, there, D, HAS_NULL)
        logit = tl.load(logits + (i * tokens.to(tl.int64) + token) * H + head, mask=head < H, other=-1e30)
        weight = tl.exp(logit - top)
        dl = weight * (tl.sum(grad * x, 1) - coupling)
        r = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / D + eps)
        u += dl[:, None] * (x * r)
        dk = dl[:, None] * q
        along = tl.sum(tl.sum(dk * x, 1), 0)
        dx = weight[:, None] * grad + r * dk - (r * r * r / D * along) * x
        place = grad_sources + (row * tokens.to(tl.int64) + token) * D + at
        dx += tl.load(place, mask=there & (i < fresh), other=0.0)
        tl.store(place, dx, mask=there & (i < count))
        if HAS_NULL:
            grad_null += tl.where(i == count, dx, 0.0)
    tl.store(partial_u + token * D + at, u, mask=there)
    if HAS_NULL:
        tl.store(partial_null + token * D + at, grad_null, mask=there)


class PaperReads:
    """Sources and reads of one micro-batch, as :class:`megatron_mhar.routing.chain.Chain` is for ours.

    Args:
        plan: which site reads what.
        sites: parameters of all sites, by number.
        sources: `[rows, T, d]`, where the sources lie or will lie; what :meth:`add` is given is a row of it.
    """

    def __init__(self, plan: ReadPlan, sites: Mapping[int, SiteParameters], sources: Tensor) -> None:
        self.plan, self.sites, self.sources = plan, sites, sources
        self.tokens, self.width = sources.shape[1:]
        key = self.width // plan.num_heads
        self.tile = {
            "H": plan.num_heads, "K": key,
            "HP": triton.next_power_of_2(plan.num_heads), "KP": triton.next_power_of_2(key),
        }  # fmt: skip
        channels = self.tile["HP"] * self.tile["KP"]
        self.num_warps = 8 if channels >= 4096 else 4 if channels >= 1024 else 2
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}  # logits and log sum exp of each site
        self.grad_sources: Tensor | None = None  # made as the backward begins

    def add(self, row: int, source: Tensor) -> Tensor:
        """Take a source; what is returned is used in place of it from here on."""
        added: Tensor = _Add.apply(self, row, source)
        return added

    def read(self, site: int, sources: Sequence[Tensor], stream: Tensor | None) -> Tensor:
        """Routed sources `[T, d]` of a site, of what :meth:`add` gave; through its gate if there is a stream."""
        query, norm_weight, null, gate = self.sites[site]
        return through_gate(_Read.apply(self, site, query, norm_weight, null, *sources), gate, stream)

    def fresh(self, site: int) -> int:
        """Of the rows that a site reads, how many have been given a gradient when its backward runs."""
        return self.plan.reads[site].shared if site + 1 < len(self.plan.rows) else 0

    def rows(self, site: int) -> tuple[int, int, int]:
        """Rows of a site, as kernels are told them: so many from 0 on, how much further the others are, and of all."""
        count, own = self.plan.reads[site]
        return (count, 0, count) if own is None else (count, own - count, count + 1)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reads: PaperReads, row: int, source: Tensor) -> Tensor:
        ctx.reads, ctx.row = reads, row
        ctx.set_materialize_grads(False)
        return reads.sources[row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        reads = ctx.reads
        return None, None, reads.grad_sources[ctx.row].to(reads.sources.dtype)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        reads: PaperReads,
        site: int,
        query: Tensor,
        norm_weight: Tensor,
        null: Tensor | None,
        *sources: Tensor,
    ) -> Tensor:
        tokens, width, heads = reads.tokens, reads.width, reads.plan.num_heads
        rows = reads.rows(site)
        out = torch.empty((tokens, width), dtype=reads.sources.dtype, device=reads.sources.device)
        has_null = int(null is not None)  # one source more
        logits = torch.empty((rows[-1] + has_null, tokens, heads), dtype=torch.float32, device=out.device)
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=out.device)
        read[(tokens,)](
            reads.sources, query, norm_weight, null, out, logits, lse, tokens, *rows, reads.plan.eps,
            HAS_NULL=has_null, **reads.tile, num_warps=reads.num_warps,
        )  # fmt: skip
        reads.saved[site] = logits, lse
        ctx.reads, ctx.site, ctx.count = reads, site, len(sources)
        ctx.save_for_backward(query, norm_weight, null)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        reads, site = ctx.reads, ctx.site
        query, norm_weight, null = ctx.saved_tensors
        if reads.grad_sources is None:
            reads.grad_sources = torch.empty_like(reads.sources, dtype=torch.float32)
        logits, lse = reads.saved.pop(site)
        partial_u = torch.empty((reads.tokens, reads.width), dtype=torch.float32, device=grad_out.device)
        partial_null = torch.empty_like(partial_u) if null is not None else None
        read_backward[(reads.tokens,)](
            reads.sources, query, norm_weight, null, grad_out.contiguous(), logits, lse, reads.grad_sources, partial_u,
            partial_null, reads.tokens, *reads.rows(site), reads.fresh(site), reads.plan.eps,
            HAS_NULL=int(null is not None), **reads.tile, num_warps=reads.num_warps,
        )  # fmt: skip
        u = partial_u.sum(0)
        grad_query, grad_norm = (u * norm_weight.float()).to(query.dtype), (u * query.float()).to(norm_weight.dtype)
        grad_null = None if partial_null is None else partial_null.sum(0).to(null.dtype)
        return (None, None, grad_query, grad_norm, grad_null, *(None for _ in range(ctx.count)))
