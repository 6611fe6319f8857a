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
    """A parameter's name in the whole model, as in checkpoints: its layer's number counts over all pipeline stages.

    An output layer of its own stage that is tied to the embedding is the embedding.
    """
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
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
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or ".site." in name:
            continue
        source = generator(seed, global_name(model, name), parameter.device)
        shape = list(parameter.shape)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] *= model.pg_collection.tp.size()
        whole = torch.randn(shape, generator=source, device=parameter.device) * std
        parameter.copy_(tensor_parallel_part(model, name, parameter, whole))


def tensor_parallel_part(model: HybridModel, name: str, parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of what is a whole parameter on one rank, or of anything of its shape."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    group, dim = model.pg_collection.tp, parameter.partition_dim
    # Gate and up projection are stacked: a rank has a slice of each.
    pieces = 2 if model.config.gated_linear_unit and name.endswith("linear_fc1.weight") else 1
    return torch.cat([piece.chunk(group.size(), dim)[group.rank()] for piece in whole.chunk(pieces, dim)], dim)
