"""Routing in plain torch with a hand-written backward: saves sources, weights and one statistic a source and token.

Per source i, head h (slices of width K = d/H; qg = query * norm_weight; r_i = 1/rms of the source):

    logit_i[h] = r_i * < qg[h], s_i[h] >          a = softmax over i
    da_i[h]    = < dout[h], s_i[h] >              dl_i[h] = a_i[h] * (da_i[h] - sum_j a_j[h] da_j[h])
    u[h]       = sum over i, tokens of dl_i[h] * r_i * s_i[h]      dquery = u * norm_weight, dnorm_weight = u * query
    ds_i       = a_i dout + r_i dl_i qg - s_i * r_i^3 / d * sum_h dl_i[h] < qg[h], s_i[h] >

Head-wise dot products with qg are matrix products with a block-diagonal `[d, H]` factor. Sums run in a fixed order: two
runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mhar.routing.reference import compute_dtype, widest


def _block_diagonal(vector: Tensor, num_heads: int) -> Tensor:
    """`[d]` -> `[d, H]`: column h holds the vector's slice h at its own rows."""
    return torch.block_diag(*vector.view(num_heads, 1, -1)).t()


def _diagonal_blocks(matrix: Tensor) -> Tensor:
    """`[H, d]` -> `[d]`: slice h of row h."""
    num_heads = matrix.shape[0]
    return matrix.view(num_heads, num_heads, -1).diagonal(dim1=0, dim2=1).t().reshape(-1)


class _Route(torch.autograd.Function):
    """Sources come one by one, or, if ``stacked``, as one `[N, ..., d]` tensor."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, norm_weight: Tensor, num_heads: int, eps: float, stacked: bool, *sources: Tensor
    ) -> Tensor:
        each: Sequence[Tensor] = sources[0] if stacked else sources  # type: ignore[assignment]
        rows = _rows(each)
        dtype = compute_dtype(each)
        factor = _block_diagonal(query.to(dtype) * norm_weight.to(dtype), num_heads)
        like = widest(each)
        tokens = like.numel() // like.shape[-1]
        logits = query.new_empty((len(rows), tokens, num_heads), dtype=dtype)
        inverse_rms = []
        for i, row in enumerate(rows):
            x = row.to(dtype)
            r = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)
            logits[i] = (x @ factor) * r
            inverse_rms.append(r)
        weights = logits.softmax(0)
        out = query.new_zeros((tokens, num_heads, query.numel() // num_heads), dtype=dtype)
        for row, weight in zip(rows, weights, strict=True):
            out.addcmul_(row.to(dtype).view(-1, *out.shape[1:]), weight.unsqueeze(-1))
        ctx.save_for_backward(query, norm_weight, weights, *inverse_rms, *sources)
        ctx.num_heads, ctx.stacked = num_heads, stacked
        return out.view(like.shape).to(like.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, norm_weight, weights, *rest = ctx.saved_tensors
        count, tokens, num_heads = weights.shape
        inverse_rms, sources = rest[:count], rest[count:]
        stacked = ctx.stacked
        rows = _rows(sources[0] if stacked else sources)
        dtype, width = weights.dtype, query.numel()
        qg = query.to(dtype) * norm_weight.to(dtype)
        factor = _block_diagonal(qg, num_heads)
        grad = grad_out.reshape(tokens, width).to(dtype)
        heads = (-1, num_heads, width // num_heads)

        grad_weights = torch.empty_like(weights)
        for i, row in enumerate(rows):
            torch.sum((grad * row.to(dtype)).view(heads), -1, out=grad_weights[i])
        grad_logits = weights * (grad_weights - (weights * grad_weights).sum(0))

        need_query, need_norm, _, _, _, *need_sources = ctx.needs_input_grad
        need_row = need_sources * count if stacked else need_sources
        u = torch.zeros_like(qg)
        grad_rows: list[Tensor | None] = []
        for row, r, weight, grad_logit, need in zip(rows, inverse_rms, weights, grad_logits, need_row, strict=True):
            x = row.to(dtype)
            if x.shape[0] != tokens:  # a source shared by all tokens: its gradient is linear in these sums
                grad_logit = grad_logit.sum(0, keepdim=True)
            scaled = grad_logit * r
            if need_query or need_norm:
                u += _diagonal_blocks(scaled.t() @ x)
            if not need:
                grad_rows.append(None)
                continue
            radial = (scaled * (x @ factor)).sum(-1, keepdim=True) * r.square() / width
            grad_row = scaled @ factor.t()
            grad_row.addcmul_(x, radial, value=-1)
            if x.shape[0] == tokens:
                grad_row.view(heads).addcmul_(grad.view(heads), weight.unsqueeze(-1))
            else:
                grad_row += _diagonal_blocks(weight.t() @ grad)
            grad_rows.append(grad_row.to(row.dtype))

        if stacked:
            whole = torch.stack([g for g in grad_rows if g is not None]) if need_sources[0] else None
            grad_sources: list[Tensor | None] = [None if whole is None else whole.view_as(sources[0])]
        else:
            grad_sources = [None if g is None else g.view_as(s) for g, s in zip(grad_rows, sources, strict=True)]
        return (
            (u * norm_weight.to(dtype)).to(query.dtype) if need_query else None,
            (u * query.to(dtype)).to(norm_weight.dtype) if need_norm else None,
            None,
            None,
            None,
            *grad_sources,
        )


def _rows(sources: Sequence[Tensor]) -> list[Tensor]:
    """Sources as views `[tokens, d]`, or `[1, d]` for one that all tokens share."""
    return [source.reshape(-1, source.shape[-1]) for source in sources]


def route_eager(
    sources: Sequence[Tensor] | Tensor, query: Tensor, norm_weight: Tensor, num_heads: int, eps: float
) -> Tensor:
    """See :func:`megatron_mhar.routing.route`."""
    stacked = isinstance(sources, Tensor)
    return _Route.apply(query, norm_weight, num_heads, eps, stacked, *((sources,) if stacked else sources))
