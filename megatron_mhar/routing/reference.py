"""The readable definition of routing. Every other backend is held against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def widest(sources: Sequence[Tensor] | Tensor) -> Tensor:
    """The source whose shape and dtype the output has: any but those that all tokens share."""
    return max(sources, key=Tensor.dim)


def compute_dtype(sources: Sequence[Tensor] | Tensor) -> torch.dtype:
    """Statistics, softmax and sums are fp32, whatever the storage type; float64 stays float64."""
    return torch.float64 if widest(sources).dtype == torch.float64 else torch.float32


def depth_weights(
    sources: Sequence[Tensor] | Tensor, query: Tensor, norm_weight: Tensor, *, num_heads: int, eps: float = 1e-6
) -> Tensor:
    """Routing weights a_i[h] of one site.

    Args:
        sources: N tensors `[..., d]`, or one `[N, ..., d]`. A `[d]` source is the same for every token.
        query: `[d]`, head h owns the slice `[h * d/H, (h+1) * d/H)`.
        norm_weight: `[d]`, weight of the keys' RMSNorm.
        num_heads: H.
        eps: epsilon of the keys' RMSNorm.

    Returns:
        `[N, ..., H]` in fp32 (float64 for float64 sources); sums to one over N.
    """
    dtype = compute_dtype(sources)
    q = query.to(dtype).unflatten(-1, (num_heads, -1))  # [H, K]
    logits = []
    for source in sources:
        x = source.to(dtype)
        key = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_weight.to(dtype)
        logits.append((q * key.unflatten(-1, (num_heads, -1))).sum(-1))  # [..., H]
    return torch.stack(torch.broadcast_tensors(*logits)).softmax(0)


def route_reference(
    sources: Sequence[Tensor] | Tensor, query: Tensor, norm_weight: Tensor, num_heads: int, eps: float
) -> Tensor:
    """See :func:`megatron_mhar.routing.route`; autograd keeps every intermediate."""
    weights = depth_weights(sources, query, norm_weight, num_heads=num_heads, eps=eps)
    out = sum(
        weight.unsqueeze(-1) * source.to(weight.dtype).unflatten(-1, (num_heads, -1))
        for weight, source in zip(weights, sources, strict=True)
    )
    assert isinstance(out, Tensor)
    return out.flatten(-2).to(widest(sources).dtype)
