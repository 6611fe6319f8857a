"""FP8 of Transformer Engine's layers: megatron-core's settings, what this machine can do, and forwards without it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_mhar.config.schema import Fp8Config, TrainingConfig
from megatron_mhar.errors import UserError

_MAY_UNPICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"  # a variable of Transformer Engine's


def fp8_settings(training: TrainingConfig) -> dict[str, Any]:
    """Settings of TransformerConfig; none where a run has no FP8. Weights stay bf16 and are cast anew each step."""
    fp8 = training.fp8
    if training.precision != "fp8":
        return {}
    return {
        "fp8": fp8.resolved_format,
        "fp8_recipe": fp8.recipe,
        "fp8_amax_history_len": fp8.amax_history,
        "fp8_amax_compute_algo": "max",
        "first_last_layers_bf16": fp8.bf16_sublayers > 0,
        "num_layers_at_start_in_bf16": fp8.bf16_sublayers,
        "num_layers_at_end_in_bf16": fp8.bf16_sublayers,
    }


def recipes_here() -> dict[str, str]:
    """Each recipe, and why it does not run on this process's GPU, "" if it does: what Transformer Engine says."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as Manager

    scaling = Manager.is_fp8_available()
    answers = {
        "tensorwise": scaling,
        "delayed": scaling,
        "blockwise": Manager.is_fp8_block_scaling_available(),
        "mxfp8": Manager.is_mxfp8_available(),
    }
    return {recipe: "" if runs else reason.rstrip(".") for recipe, (runs, reason) in answers.items()}


def check_recipe(fp8: Fp8Config) -> None:
    """Refuse a recipe that does not run here. Transformer Engine must be installed.

    Raises:
        UserError: with the reason, and what runs.
    """
    reasons = recipes_here()
    if reasons[fp8.recipe]:
        able = ", ".join(recipe for recipe, reason in reasons.items() if not reason)
        raise UserError(
            f"training.fp8.recipe: {fp8.recipe} given, but it does not run on this GPU ({reasons[fp8.recipe]}); "
            f"allowed here: {able or 'none, training.precision: bf16'}"
        )


@contextmanager
def without_fp8(module: nn.Module) -> Iterator[None]:
    """Within the context, forwards of Transformer Engine's layers are bf16 and leave nothing behind.

    Evaluations in FP8 would count in the scales that training finds (delayed), and release the transposed weights that
    a captured graph writes to. A forward without FP8 also makes a layer forget that it has scales to save.
    """
    layers = _engine_layers(module)
    kept = [(layer.fp8, layer.fp8_initialized, layer.fp8_meta.get("fp8_checkpoint")) for layer in layers]
    try:
        yield
    finally:
        for layer, (fp8, initialized, saves) in zip(layers, kept, strict=True):
            layer.fp8, layer.fp8_initialized = fp8, initialized
            if saves is not None:
                layer.fp8_meta["fp8_checkpoint"] = saves


def _engine_layers(module: nn.Module) -> list[Any]:
    """Transformer Engine's layers that may run in FP8."""
    return [layer for layer in module.modules() if hasattr(layer, "fp8_meta")]


def lacks_scales(module: nn.Module) -> bool:
    """Whether Transformer Engine's layers have neither run in FP8 nor loaded scales: their first ones would be 1."""
    layers = _engine_layers(module)
    return bool(layers) and not any("scaling_bwd" in layer.fp8_meta for layer in layers)  # some never run in FP8


def check_scales(weights: Mapping[str, Any]) -> None:
    """Refuse scales of delayed FP8, which Transformer Engine pickles, where unpickling them could run code.

    Args:
        weights: a module's state dict.

    Raises:
        ValueError: an entry of scales is neither None nor a uint8 tensor, or holds anything but tensors, numbers,
            containers of them and a recipe; names the entry.
    """
    from megatron.core.safe_globals import SafeUnpickler

    for name, value in weights.items():
        if not is_scales(name) or value is None:
            continue
        if not isinstance(value, Tensor) or value.dtype != torch.uint8:
            given = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} is not FP8 scales: {given} given; allowed: a uint8 tensor, or None")
        if value.numel():
            try:
                SafeUnpickler(io.BytesIO(value.cpu().numpy().tobytes())).load()
            except Exception as error:  # there is no end to what a foreign file can raise
                raise ValueError(f"{name} is not FP8 scales: {error}") from error


@contextmanager
def checked_scales() -> Iterator[None]:
    """Within the context, Transformer Engine unpickles scales: only for what :func:`check_scales` has accepted."""
    before = os.environ.get(_MAY_UNPICKLE)
    os.environ[_MAY_UNPICKLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MAY_UNPICKLE]
        else:
            os.environ[_MAY_UNPICKLE] = before


def is_scales(name: str) -> bool:
    """Whether an entry of a state dict is Transformer Engine's own state: FP8 scales, which other layers have not."""
    return "_extra_state" in name


def forget_scales() -> None:
    """Drop what Transformer Engine keeps of all layers of this process that have run in FP8: they are gone."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as Manager

    Manager.reset()
