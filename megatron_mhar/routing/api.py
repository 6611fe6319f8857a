"""The public call, its checks and the choice of backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from megatron_mhar.routing.eager import route_eager
from megatron_mhar.routing.reference import route_reference

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of sources that the fused kernels take


def resolve_backend(backend: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> str:
    """Name of the backend that ``backend`` means for sources of ``dtype`` on ``device``.

    "auto" is the fused kernels on a GPU, for dtypes that they take, else torch.

    Raises:
        ValueError: unknown backend, or one that does not run on ``device`` or take ``dtype``.
    """
    fused = torch.device(device).type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "auto":
        on_gpu = torch.device(device).type == "cuda" and find_spec("triton")
        return "triton" if on_gpu and dtype in KERNEL_DTYPES else "torch"
    if backend not in BACKENDS:
        raise ValueError(f"routing backend {backend!r} given; allowed: auto, {', '.join(BACKENDS)}")
    if backend == "triton" and not (fused and find_spec("triton")):
        raise ValueError(
            f"routing backend 'triton' given, but it needs Triton and a GPU, and the sources are on {device}; allowed "
            "here: auto, reference, torch (TRITON_INTERPRET=1 runs the kernels in Triton's interpreter, for tests)"
        )
    if backend == "triton" and dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"routing backend 'triton' takes sources in fp32, bf16 or fp16: {dtype} given; allowed for it: auto, "
            "reference, torch"
        )
    return backend


def _route_fused(
    sources: Sequence[Tensor] | Tensor, query: Tensor, norm_weight: Tensor, num_heads: int, eps: float
) -> Tensor:
    from megatron_mhar.routing.chain import route_fused  # Triton is not everywhere

    return route_fused(sources, query, norm_weight, num_heads, eps)


BACKENDS: dict[str, Callable[[Sequence[Tensor] | Tensor, Tensor, Tensor, int, float], Tensor]] = {
    "reference": route_reference,
    "torch": route_eager,
    "triton": _route_fused,
}


def route(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    norm_weight: Tensor,
    *,
    num_heads: int,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """Read N sources by one softmax over depth a head.

    Args:
        sources: sequence of N tensors `[..., d]` of one shape and dtype, or one `[N, ..., d]` tensor. In a sequence, a
            source of shape `[d]` (a null source) is the same for every token and is never expanded.
        query: `[d]`; head h owns the slice `[h * d/H, (h+1) * d/H)`.
        norm_weight: `[d]`, weight of the RMSNorm that makes keys of sources.
        num_heads: H; H = 1 is attention residuals.
        eps: epsilon of the keys' RMSNorm.
        backend: "reference" (the definition), "torch" (saves for backward only the sources, the weights and one number
            a source and token), "triton" (fused kernels), or "auto", see :func:`resolve_backend`.

    Returns:
        `[..., d]` in the sources' dtype. Statistics, softmax and sums are fp32 (float64 for float64 sources).

    Raises:
        ValueError: shapes, dtypes or H do not fit, or the backend is unknown, or does not run on the sources' device or
            take their dtype ("triton" and float64).
    """
    _check(sources, query, norm_weight, num_heads)
    dtype = next((source.dtype for source in sources if source.dim() > 1), sources[0].dtype)
    return BACKENDS[resolve_backend(backend, query.device, dtype)](sources, query, norm_weight, num_heads, eps)


def _check(sources: Sequence[Tensor] | Tensor, query: Tensor, norm_weight: Tensor, num_heads: int) -> None:
    width = query.shape[-1] if query.dim() == 1 else -1
    if width < 1 or query.shape != norm_weight.shape:
        raise ValueError(f"query and norm_weight must be [d]: {list(query.shape)} and {list(norm_weight.shape)} given")
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"num_heads {num_heads} given, but it must be at least 1 and divide the width {width}")
    if isinstance(sources, Tensor) and sources.dim() < 2:
        raise ValueError(f"sources as one tensor must be [N, ..., d]: {list(sources.shape)} given")
    if len(sources) == 0:
        raise ValueError("no source given: a site reads at least one")
    if any(s.dim() == 0 for s in sources):
        raise ValueError(f"a source must be [..., {width}] or [{width}]: a number given")
    shapes = {tuple(s.shape) for s in sources if s.dim() != 1}
    if len(shapes) > 1 or any(s.shape[-1] != width for s in sources):
        raise ValueError(
            f"sources must be [..., {width}] of one shape (or [{width}]): "
            f"{', '.join(str(list(s.shape)) for s in sources)} given"
        )
    if len({s.dtype for s in sources if s.dim() != 1}) > 1:
        raise ValueError(f"sources must have one dtype: {', '.join(str(s.dtype) for s in sources)} given")


def through_gate(routed: Tensor, gate: Tensor | None, stream: Tensor | None) -> Tensor:
    """What a sublayer reads of routed sources `[..., d]`: themselves, or in the delta form stream + gate * routed.

    Rounded once: a gate `[1]` of zero leaves the stream's bits as they are.
    """
    if gate is None:
        return routed
    assert stream is not None, "a gate goes with a stream"
    return torch.addcmul(stream, gate, routed)
