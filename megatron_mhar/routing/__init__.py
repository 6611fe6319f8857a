"""The routing operator: tensors in and out, no Megatron.

:func:`route` reads N sources by a softmax over depth, one softmax a head, each head on its own slice of the width:

    k_i      = RMSNorm(s_i; g)
    a_i[h]   = softmax over i of < q[h], k_i[h] >
    out[h]   = sum over i of a_i[h] * s_i[h]

(Multi-Head Attention Residuals, arXiv 2607.27230; with one head, Attention Residuals, arXiv 2603.15031.)
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "BACKENDS": "megatron_mhar.routing.api",
    "depth_weights": "megatron_mhar.routing.reference",
    "resolve_backend": "megatron_mhar.routing.api",
    "route": "megatron_mhar.routing.api",
    "through_gate": "megatron_mhar.routing.api",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Load on first use: configs and plans name sources and read :mod:`megatron_mhar.routing.plan` without torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
