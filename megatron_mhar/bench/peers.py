"""Other implementations of the same reads, where they are installed. This is the one place that imports them.

All of them have one head and no null source; a model calls them site by site with the list of its sources.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_mhar.bench.reads import Algorithm, SiteBySite

Call = Callable[[Sequence[Tensor], Tensor, Tensor, int, float], Tensor]


def _flash_linear_attention() -> Call:
    from fla.ops.attnres import fused_attnres

    return lambda sources, query, norm_weight, _, eps: fused_attnres(query, list(sources), norm_weight, rms_eps=eps)


def _fast_attnres() -> Call:
    from attnres import attnres

    # It has no norm weight, which is the same as a factor of the query.
    return lambda sources, query, norm_weight, _, eps: attnres(list(sources), query * norm_weight, eps=eps)


def _liger() -> Call:
    from liger_kernel.ops.attn_res import LigerAttnResFunction

    function: Any = LigerAttnResFunction
    return lambda sources, query, norm_weight, _, eps: function.apply(
        torch.stack(tuple(sources)), query, norm_weight, eps
    )


PEERS: dict[str, Callable[[], Call]] = {
    "flash-linear-attention": _flash_linear_attention,
    "fast-attnres": _fast_attnres,
    "Liger": _liger,
}


def find_peers(names: Collection[str] = tuple(PEERS)) -> tuple[dict[str, Algorithm], dict[str, str]]:
    """Those of ``names`` that can be imported here, and why the others cannot, by name."""
    found: dict[str, Algorithm] = {}
    absent: dict[str, str] = {}
    for name, load in PEERS.items():
        if name not in names:
            continue
        try:
            found[name] = partial(SiteBySite, call=load())
        except ModuleNotFoundError as error:
            absent[name] = f"not installed ({error.name})"
        except Exception as error:  # a library may fail on this device in any way
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, absent
