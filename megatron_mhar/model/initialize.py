"""Initial weights that depend on the seed and a parameter's global name alone.

Not on the parallel layout, so that a run starts the same on one GPU and on a thousand; not on the residual method, so
that two methods are compared from the same weights.
"""

from __future__ import annotations

import hashlib
import re

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def global_name(model: HybridModel, name: str) -> str:
    """A parameter's name with its layer's number over all pipeline stages, as in checkpoints."""
    return _LAYER.sub(lambda m: f"decoder.layers.{model.decoder.layers[int(m[1])].layer_number - 1}.", name)


def generator(seed: int, name: str, device: torch.device | str) -> torch.Generator:
    """Generator of the random numbers of one parameter."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


@torch.no_grad()
def initialize_weights(model: HybridModel, *, seed: int, std: float) -> None:
    """Fill every matrix of ``model`` with N(0, std): this rank's part of what one rank alone would hold.

    Vectors (norms) keep what their modules gave them, and so do all parameters of residual sites.
    """
    group = model.pg_collection.tp
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or ".site." in name:
            continue
        source = generator(seed, global_name(model, name), parameter.device)
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] *= group.size()
        whole = torch.randn(shape, generator=source, device=parameter.device) * std
        gated = model.config.gated_linear_unit and name.endswith("linear_fc1.weight")
        parameter.copy_(whole if dim is None else _part(whole, dim, group.rank(), group.size(), 2 if gated else 1))


def _part(whole: Tensor, dim: int, rank: int, ranks: int, pieces: int) -> Tensor:
    """Part of a rank: of each of ``pieces`` stacked matrices (gate and up projection) its own slice."""
    return torch.cat([piece.chunk(ranks, dim)[rank] for piece in whole.chunk(pieces, dim)], dim)
