"""Multi-Head Attention Residuals on Megatron-core.

Use from a Megatron script of your own::

    from megatron_mhar import ResidualConfig, routed_stack_spec

The names are loaded on first use: ``import megatron_mhar`` alone imports neither torch nor megatron-core.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "ResidualConfig": "megatron_mhar.depth.residual",
    "route": "megatron_mhar.routing",
    "routed_stack_spec": "megatron_mhar.model.specs",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
