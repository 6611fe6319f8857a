"""Initial weights that depend on the seed and a parameter's global name alone.

Not on the parallel layout, so that a run starts the same on one GPU and on a thousand; not on the residual method, so
that two methods are compared from the same weights.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
# One expert's weights: a module each, or, grouped, numbered weights of one module.
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.(linear_fc\d)\.weight|(linear_fc\d)\.weight(\d+))$")


def global_name(model: HybridModel, name: str) -> str:
    """A parameter's name in the whole model, as in checkpoints: its layer's number counts over all pipeline stages.

    So does an expert's number over expert-parallel ranks, and its name is the same in both layer families. An output
    layer of its own stage that is tied to the embedding is the embedding.
    """
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    name = _LAYER.sub(lambda m: f"decoder.layers.{model.decoder.layers[int(m[1])].layer_number - 1}.", name)
    return _EXPERT.sub(lambda m: f".experts.{_expert(model, int(m[1] or m[4]))}.{m[2] or m[3]}.weight", name)


def _expert(model: HybridModel, local: int) -> int:
    """Number of this rank's expert ``local`` over expert-parallel ranks, of which each has the next few."""
    group = model.pg_collection.ep
    return group.rank() * (model.config.num_moe_experts // group.size()) + local


def generator(seed: int, name: str, device: torch.device | str) -> torch.Generator:
    """Generator of the random numbers of one parameter."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


@torch.no_grad()
def initialize_weights(model: HybridModel, *, seed: int, std: float) -> None:
    """Fill every matrix of ``model`` with N(0, std): this rank's part of what one rank alone would hold.

    Vectors (norms) keep what their modules gave them, and so do all parameters of residual sites. Recurrent sublayers
    have megatron-core's distributions: convolutions, decays and time steps are no matrices.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        source = generator(seed, global_name(model, name), parameter.device)
        recurrent = _recurrent_value(name, parameters, source)
        if recurrent is not None:
            parameter.copy_(recurrent)
        if recurrent is not None or parameter.dim() < 2 or ".site." in name:
            continue
        shape = list(parameter.shape)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] *= model.pg_collection.tp.size()
        whole = torch.randn(shape, generator=source, device=parameter.device) * std
        parameter.copy_(tensor_parallel_part(model, name, parameter, whole))


def _recurrent_value(name: str, parameters: Mapping[str, Tensor], source: torch.Generator) -> Tensor | None:
    """Value of what only Mamba and gated delta net layers have, as these draw it; None for all other parameters."""
    parameter = parameters[name]

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(parameter.shape, device=parameter.device).uniform_(low, high, generator=source)

    if "conv1d" in name:
        width = parameters[re.sub("bias$", "weight", name)].shape[-1]
        return uniform(-(width**-0.5), width**-0.5)
    if name.endswith(".A_log"):
        return uniform(1, 16).log()
    if name.endswith(".mixer.dt_bias"):  # softplus of it is a time step between 0.001 and 0.1
        step = uniform(math.log(0.001), math.log(0.1)).exp()
        return step + (-torch.expm1(-step)).log()
    if name.endswith(".dt_bias"):
        return torch.ones_like(parameter)
    return None


def tensor_parallel_part(model: HybridModel, name: str, parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of what is a whole parameter on one rank, or of anything of its shape."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    # The tensor-parallel ranks of experts are those of all other layers.
    group, dim = model.pg_collection.tp, parameter.partition_dim  # type: ignore[attr-defined]
    # Gate and up projection are stacked: a rank has a slice of each.
    pieces = 2 if model.config.gated_linear_unit and "linear_fc1.weight" in name else 1
    return torch.cat([piece.chunk(group.size(), dim)[group.rank()] for piece in whole.chunk(pieces, dim)], dim)
