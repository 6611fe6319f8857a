"""Who serves the operations that have fused kernels: Transformer Engine, apex, or torch where both are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from torch import Tensor, nn

from megatron_mhar import platform

# Gradients of weights are added to their fp32 sum by the product that makes them: megatron-core's linear layers.
APEX_ACCUMULATES: bool = platform.HAS_GPU and tensor_parallel_layers._grad_accum_fusion_available


def apex_rms_norm() -> Callable[[Tensor, Tensor, Any, float], Tensor] | None:
    """apex's RMSNorm of (x, weight, shape of the weight, epsilon), on a GPU where it is built; else None."""
    if not platform.HAS_GPU or find_spec("fused_layer_norm_cuda") is None:
        return None
    try:
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine
    except ImportError:
        return None
    return fused_rms_norm_affine


def accumulate_in_layers(model: nn.Module) -> None:
    """Let Transformer Engine's layers add weight gradients to the ``main_grad`` of a data-parallel wrapper themselves.

    Megatron-core has one switch for its own layers, which need apex for it (the output layer always is one), and
    Transformer Engine's, which do not.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def served_by(layers: str, sites: str | None) -> dict[str, str]:
    """Library of each operation here.

    Args:
        layers: "local" or "transformer_engine".
        sites: routing backend of sites that compute the norms of their sublayers; None where none do.
    """
    engine, torchs = layers == "transformer_engine", "apex" if apex_rms_norm() else "torch"
    norm = "Transformer Engine" if engine else torchs
    at_sites = "routing kernels" if sites == "triton" else torchs
    if sites is not None and at_sites != norm:
        norm = f"{at_sites} where a replacement form reads, {norm} elsewhere"
    accumulates = "apex" if APEX_ACCUMULATES else "torch"
    return {
        "gradient accumulation": f"Transformer Engine ({accumulates} for the output layer)" if engine else accumulates,
        "norm": norm,
        "optimizer": f"{_library(megatron_optimizer.Adam)} {megatron_optimizer.Adam.__name__}",
        "gradient norm and clipping": _library(clip_grads.multi_tensor_applier),
    }


def _library(thing: Any) -> str:
    top = thing.__module__.split(".")[0]
    # Megatron-core's own stand-ins are loops of torch's operations.
    return {"transformer_engine": "Transformer Engine", "megatron": "torch"}.get(top, top)
