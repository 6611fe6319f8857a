"""A chain: all reads of one micro-batch's sources on one stage, with their backward by pull.

Read by read, every read of a source would send back a gradient of its own, to be added to the others by autograd in
passes over memory. In a chain a read's backward only notes its output gradient; a source's gradient is formed once,
just before its producer's backward is about to run, from the output gradients of all the sites that read it. Autograd
sees every dependency: sources pass through :meth:`Chain.add` and into :meth:`Chain.read`, and the engine runs a node
after all those that used what it made. Parameters get their gradients last, when all sources have.

A source is copied once, into the chain's buffer, where its statistic is taken; the tensor that it came in is free from
then on. A chain serves one backward; any number of chains may be in flight, and parts of one may be run again in the
backward (recomputation).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mhar.routing import kernels
from megatron_mhar.routing.plan import ReadPlan

LOG2_E = 1.4426950408889634
GROUP: int = kernels.GROUP.value
_PARTS = 32  # of the tokens, in sums over them: enough programs to fill a GPU, few enough that partial sums cost little
_NULL_TOKENS = 32  # a program of the null sources' kernel, which goes through them one by one


class SiteParameters(NamedTuple):
    """Parameters `[d]` of one site."""

    query: Tensor
    norm_weight: Tensor
    null_source: Tensor | None = None


class Chain:
    """Sources and reads of one micro-batch on one stage; made by :func:`start`."""

    def __init__(self, plan: ReadPlan, sites: dict[int, SiteParameters], grouped: bool) -> None:
        self.plan = plan
        # Detached: a chain is held by autograd's nodes, and must not hold them.
        self._sites = {
            site: SiteParameters(*(None if p is None else p.detach() for p in parameters))  # type: ignore[arg-type]
            for site, parameters in sites.items()
        }
        self._rows: set[int] = set()  # sources that have been added and not yet pulled
        self._read_back: set[int] = set()  # sites whose output gradient is there
        self._buffers: _Buffers | None = None
        self._grouped = grouped and plan.grows_by_one
        self._group: tuple[int, Tensor, Tensor] | None = None  # the group read last

    def add(self, row: int, source: Tensor, ticket: Tensor) -> Tensor:
        """Take a source `[..., d]` into ``row``; what is returned is used in place of it from here on."""
        added: Tensor = _Add.apply(self, row, source, ticket)
        return added

    def read(self, site: int, sources: Sequence[Tensor], ticket: Tensor) -> Tensor:
        """Routed sources `[..., d]` of ``site``.

        Args:
            sources: what :meth:`add` gave for the rows that the plan names, in order.
        """
        routed: Tensor = _Read.apply(self, site, ticket, *sources)
        return routed

    # What the kernels do, tensors in and out.

    def _add(self, row: int, source: Tensor) -> Tensor:
        if self._buffers is None:
            self._buffers = _Buffers(self.plan, source)
        b = self._buffers
        if row not in self._rows:  # else it is run again in the backward, and there already
            self._rows.add(row)
            kernels.add[(b.tokens,)](
                source.contiguous(), b.sources, b.inverse_rms, row, b.tokens, self.plan.eps,
                D=b.width, DP=triton.next_power_of_2(b.width), num_warps=4,
            )  # fmt: skip
        return b.sources[row].view(source.shape)

    def _read(self, site: int, like: Tensor) -> Tensor:
        b, (query, norm_weight, null), reads = self._ready(), self._sites[site], self.plan.reads[site]
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        older = site // GROUP * GROUP if self._grouped else 0  # rows that are there before the site's group
        mixed, lse = self._older(site // GROUP) if older else (None, None)
        kernels.read[(b.tokens,)](
            b.sources, b.inverse_rms, query, norm_weight, null, b.null_inverse_rms(site, null, self.plan.eps),
            mixed, lse, out, b.scaled_queries, b.lse, b.tokens, site,
            0 if older else reads.prefix, older if older else reads.start - reads.prefix, reads.total - older,
            HAS_NULL=null is not None, HAS_OLDER=older > 0, **b.tile, STAGES=3, num_warps=b.num_warps,
        )  # fmt: skip
        return out

    def _older(self, group: int) -> tuple[Tensor, Tensor]:
        """What the sites of a group read of the rows before it; made for all of them when the first one asks."""
        if self._group is None or self._group[0] != group:
            b = self._ready()
            self._group = None  # its memory is free for the next
            first = group * GROUP
            sites = [site for site in range(first, first + GROUP) if site in self._sites]
            if not b.queries_scaled:
                b.scale_queries(self._sites)
            mixed = torch.empty((GROUP, b.tokens, b.width), dtype=b.sources.dtype, device=b.sources.device)
            lse = torch.empty((b.tokens, self.plan.num_heads, GROUP), dtype=torch.float32, device=b.sources.device)
            # A chain of one pipeline stage may begin within a group; the slots of a group's sites are always the same.
            skipped = sites[0] - first
            kernels.read_group[(b.tokens * self.plan.num_heads,)](
                b.sources, b.inverse_rms, b.scaled_queries, mixed[skipped:], lse[..., skipped:], b.tokens, sites[0],
                len(sites), first, H=b.tile["H"], K=b.tile["K"], K1=max(16, b.tile["K1"]), K2=b.tile["K2"], STAGES=3,
                num_warps=1 if b.tile["K1"] <= 128 else 4,
            )  # fmt: skip
            self._group = group, mixed, lse
        return self._group[1:]

    def _couple(self, site: int, out: Tensor, grad_out: Tensor) -> None:
        b = self._ready()
        self._read_back.add(site)
        grad_outs = b.grad_outs
        kernels.couple[(b.tokens,)](
            out, grad_out.contiguous(), grad_outs, b.coupling, b.tokens, site, **b.tile, num_warps=b.num_warps
        )
        null = self._sites[site].null_source
        if null is not None:
            parts = triton.cdiv(b.tokens, _NULL_TOKENS)
            mixed = torch.empty((parts, b.width), dtype=torch.float32, device=out.device)
            grad_logit = torch.empty((parts, self.plan.num_heads), dtype=torch.float32, device=out.device)
            kernels.null[(parts,)](
                null, b.null_inverse_rms(site, null, self.plan.eps), grad_outs, b.scaled_queries, b.lse, b.coupling,
                mixed, grad_logit, b.tokens, site, _NULL_TOKENS, **b.tile, num_warps=b.num_warps,
            )  # fmt: skip
            b.null_sums[site] = mixed.sum(0), grad_logit.sum(0)

    def _pull(self, row: int, grad: Tensor | None) -> Tensor | None:
        """Gradient of a source: ``grad``, which came to it from elsewhere, and that of all reads."""
        b = self._ready()
        self._rows.remove(row)
        sites = [site for site in self.plan.readers[row] if site in self._read_back]
        if not sites:
            return grad
        assert sites == list(range(sites[0], sites[-1] + 1)), "a read's backward has not run"
        grad_source = torch.empty_like(b.sources[row])
        heads, count = self.plan.num_heads, len(sites)
        grad_logit = torch.empty((heads, count, b.tokens), dtype=b.sources.dtype, device=b.sources.device)
        kernels.pull[(triton.cdiv(b.tokens, b.pull_tokens),)](
            b.sources, None if grad is None else grad.contiguous(), grad_source, b.grad_outs, b.inverse_rms,
            b.scaled_queries, b.lse, b.coupling, grad_logit, b.tokens, row, sites[0], count,
            HAS_GRAD=grad is not None, **b.tile, TOKENS=b.pull_tokens, STAGES=3,
            num_warps=2 if b.pull_tokens > 1 else b.num_warps,
        )  # fmt: skip
        key = b.width // heads
        block = max(16, min(64, triton.next_power_of_2(count)))
        kernels.query[(triton.cdiv(count, block), heads, b.parts)](
            b.sources, grad_logit, b.partial, b.tokens, row, sites[0], count, len(self.plan.rows), b.tokens_a_part,
            H=heads, K=key, KP=max(16, triton.next_power_of_2(key)), SITES=block, BLOCK=32, STAGES=2, num_warps=4,
        )  # fmt: skip
        return grad_source

    def _parameter_gradients(self) -> list[Tensor | None]:
        """Gradients of all sites' queries, norm weights and null sources, in order."""
        b = self._buffers
        assert not self._rows, f"sources whose gradients have not been formed: {sorted(self._rows)}"
        grads: list[Tensor | None] = []
        u = None if b is None else b.partial.sum(0)
        for site, (query, norm_weight, null) in self._sites.items():
            if b is None or u is None or site not in self._read_back:
                grads += [None] * (2 if null is None else 3)
                continue
            own = u[site]
            if null is not None:
                grad_null, from_null = self._null_gradient(site)
                own = own + from_null
            grads += [(own * norm_weight.float()).to(query.dtype), (own * query.float()).to(norm_weight.dtype)]
            if null is not None:
                grads.append(grad_null.to(null.dtype))
        self._buffers = self._group = None
        return grads

    def _null_gradient(self, site: int) -> tuple[Tensor, Tensor]:
        """Gradient of a site's null source, and the null source's part of u, both `[d]` in fp32."""
        b, (query, norm_weight, null) = self._ready(), self._sites[site]
        mixed, dl = b.null_sums[site]
        r = b.null_inverse_rms(site, null, self.plan.eps)
        assert null is not None and r is not None
        x, qg = null.float(), query.float() * norm_weight.float()
        per_head = (self.plan.num_heads, -1)
        logit = (x * qg).view(per_head).sum(1) * r
        scaled = (dl * r).repeat_interleave(b.width // self.plan.num_heads)
        grad = mixed + scaled * qg - x * (r.square() / b.width * (dl * logit).sum())
        return grad, scaled * x

    def _ready(self) -> _Buffers:
        if self._buffers is None:
            raise RuntimeError("this routing chain has been through its backward, or has no source yet")
        return self._buffers


class _Buffers:
    """What a chain's kernels share, once the shape of a source is known."""

    def __init__(self, plan: ReadPlan, like: Tensor) -> None:
        device, sites, heads = like.device, len(plan.rows), plan.num_heads
        self.width = like.shape[-1]
        self.tokens = like.numel() // self.width
        self.tile = _tile(heads, self.width // heads)
        # Best of what was measured on an H200, at widths of 512 to 4,096. In the backward two tokens share what is
        # loaded of the queries, as long as a program's registers hold both.
        channels = self.tile["HP"] * self.tile["K1"]
        self.num_warps = max(1, min(4, channels // 512))
        self.pull_tokens = 2 if channels <= 1024 else 1
        self.tokens_a_part = max(64, triton.cdiv(self.tokens, _PARTS))
        self.parts = triton.cdiv(self.tokens, self.tokens_a_part)
        self._empty = partial(torch.empty, device=device)
        self._num_sites = sites
        self.sources = self._empty(plan.num_rows, self.tokens, self.width, dtype=like.dtype)
        fp32 = partial(self._empty, dtype=torch.float32)
        self.inverse_rms = fp32(plan.num_rows, self.tokens)
        self.scaled_queries = fp32(sites, self.width)  # query * norm_weight * log2(e)
        self.lse = fp32(sites, self.tokens, heads)
        self.queries_scaled = False
        self.null_sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._null_inverse_rms: dict[int, Tensor] = {}

    # What the backward alone needs is made when it begins.

    @cached_property
    def grad_outs(self) -> Tensor:
        """Output gradients of the sites, `[sites, T, d]`."""
        return self._empty(self._num_sites, self.tokens, self.width, dtype=self.sources.dtype)

    @cached_property
    def coupling(self) -> Tensor:
        """Their products with the outputs, `[sites, T, H]`."""
        return torch.empty_like(self.lse)

    @cached_property
    def partial(self) -> Tensor:
        """u of every site over each part of the tokens, `[parts, sites, d]`."""
        return torch.zeros((self.parts, self._num_sites, self.width), dtype=torch.float32, device=self.sources.device)

    def scale_queries(self, sites: dict[int, SiteParameters]) -> None:
        """Queries of all sites, which follow each other, as kernels want them."""
        numbers = list(sites)
        queries, norm_weights = (torch.stack([p[i] for p in sites.values()]).float() for i in (0, 1))  # type: ignore[misc]
        torch.mul(queries, norm_weights * LOG2_E, out=self.scaled_queries[numbers[0] : numbers[-1] + 1])
        self.queries_scaled = True

    def null_inverse_rms(self, site: int, null: Tensor | None, eps: float) -> Tensor | None:
        """1/rms of a site's null source, `[1]`."""
        if null is not None and site not in self._null_inverse_rms:
            self._null_inverse_rms[site] = torch.rsqrt(null.float().square().mean(0, keepdim=True) + eps)
        return self._null_inverse_rms.get(site)


def _tile(heads: int, key: int) -> dict[str, int]:
    """Tiles that cover the channels of all heads: 160 as 128 + 32; one tile where that would not fit."""
    first = triton.next_power_of_2(key)
    second = key - first // 2
    if first == key or second != triton.next_power_of_2(second):
        return {"H": heads, "K": key, "HP": triton.next_power_of_2(heads), "K1": first, "K2": 1}
    return {"H": heads, "K": key, "HP": triton.next_power_of_2(heads), "K1": first // 2, "K2": second}


def start(plan: ReadPlan, sites: dict[int, SiteParameters], *, grouped: bool = True) -> tuple[Chain, Tensor]:
    """A chain, and the ticket that its sources and reads are called with.

    Args:
        plan: which site reads what.
        sites: parameters of the sites of this stage, by number.
        grouped: whether sites read older sources together where the plan allows it. The parameters of all sites must
            then be there when the first one reads.

    Every read and every source depends on the ticket, and it on the sites' parameters: autograd forms their gradients
    after all else. It is not kept by the chain, which is itself kept by autograd.
    """
    chain = Chain(plan, sites, grouped)
    given = [p for parameters in sites.values() for p in parameters if p is not None]
    return chain, _Parameters.apply(chain, *given)


class _Parameters(torch.autograd.Function):
    """Forward makes the ticket; backward runs last."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, *parameters: Tensor) -> Tensor:
        ctx.chain = chain
        ctx.set_materialize_grads(False)
        return parameters[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = ctx.chain._parameter_gradients()
        return (None, *(g if need else None for g, need in zip(grads, ctx.needs_input_grad[1:], strict=True)))


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chain, row: int, source: Tensor, ticket: Tensor) -> Tensor:
        ctx.chain, ctx.row, ctx.shape = chain, row, source.shape
        ctx.set_materialize_grads(False)
        return chain._add(row, source.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, Tensor | None, None]:
        grad_source = ctx.chain._pull(ctx.row, grad)
        return None, None, None if grad_source is None else grad_source.view(ctx.shape), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chain, site: int, ticket: Tensor, *sources: Tensor) -> Tensor:
        ctx.chain, ctx.site, ctx.count = chain, site, len(sources)
        out = chain._read(site, sources[0])
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[None, ...]:
        (out,) = ctx.saved_tensors
        ctx.chain._couple(ctx.site, out, grad_out)
        return (None,) * (3 + ctx.count)


def route_fused(
    sources: Sequence[Tensor] | Tensor, query: Tensor, norm_weight: Tensor, num_heads: int, eps: float
) -> Tensor:
    """See :func:`megatron_mhar.routing.route`: a chain of one site.

    Raises:
        ValueError: the sources' dtype has no kernels.
    """
    wide = [source for source in sources if source.dim() > 1]
    shared = [source for source in sources if source.dim() == 1]
    like = wide[0] if wide else shared[0]
    if like.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"routing backend 'triton' takes sources in fp32, bf16 or fp16: {like.dtype} given")
    if not wide:
        wide, shared = [shared[0].unsqueeze(0)], shared[1:]
        return route_fused([*wide, *shared], query, norm_weight, num_heads, eps).squeeze(0)
    wide += [source.to(like.dtype).expand_as(like) for source in shared[1:]]
    chain, ticket = start(
        ReadPlan((tuple(range(len(wide))),), num_heads, eps), {0: SiteParameters(query, norm_weight, *shared[:1])}
    )
    return chain.read(0, [chain.add(row, source, ticket) for row, source in enumerate(wide)], ticket)
