"""Arithmetic of a training step by the usual count, and the share of a device's peak that it is (MFU, PaLM 2022)."""

from __future__ import annotations

from typing import NamedTuple

from megatron_mhar.config.schema import RunConfig
from megatron_mhar.depth.sites import DepthTable
from megatron_mhar.pipeline.estimate import COUNTED, forward_flops


class Peak(NamedTuple):
    """Dense TFLOP/s of a GPU's tensor cores by what a matrix product reads; None where it cannot."""

    bf16: float
    fp8: float | None
    fp32: float  # as TF32


# By a part of the device's name, the first that fits. From NVIDIA's data sheets of these products, which give the
# figures with sparsity: twice as many. GB200 is one GPU of the two of a superchip.
PEAKS = {
    "GB200": Peak(bf16=2500, fp8=5000, fp32=1250),
    "B200": Peak(bf16=2250, fp8=4500, fp32=1125),
    "H200 NVL": Peak(bf16=835.5, fp8=1670.5, fp32=417.5),
    "H200": Peak(bf16=989.5, fp8=1979, fp32=494.5),
    "H100 NVL": Peak(bf16=835.5, fp8=1670.5, fp32=417.5),
    "H100 PCIe": Peak(bf16=756.5, fp8=1513, fp32=378),
    "H100": Peak(bf16=989.5, fp8=1979, fp32=494.5),
    "A100": Peak(bf16=312, fp8=None, fp32=156),
}
_BACKWARD = 2  # a backward takes twice as much as its forward


def peak_flops(device: str, precision: str) -> float | None:
    """FLOP/s of a device by its name at precision bf16, fp8 or fp32; None for one that is not in :data:`PEAKS`."""
    peak = next((peak for part, peak in PEAKS.items() if part in device), None)
    tflops: float | None = None if peak is None else getattr(peak, precision)
    return None if tflops is None else tflops * 1e12


def model_flops(config: RunConfig) -> int | None:
    """Floating-point operations a token of forward and backward, without routing, recomputation and optimizer.

    Six a parameter that the token meets, the embedding not among them and the output layer among them, and those of
    causal attention; see :func:`megatron_mhar.pipeline.estimate.forward_flops`. None with sublayers not counted there.
    """
    if not set(config.model.layer_pattern) <= set(COUNTED):
        return None
    tokens = config.training.micro_batch_size * config.training.sequence_length
    forward = sum(forward_flops(config, stage) for stage in range(len(config.stages)))
    return forward // tokens * (1 + _BACKWARD)


def routing_flops(config: RunConfig) -> int:
    """Floating-point operations a token of all routed reads, forward and backward.

    Two a channel and source for each of: the key's norm, its product with the query, and the mixture.
    """
    reads = DepthTable(config.residual, len(config.model.layer_pattern)).reads
    return 6 * config.model.hidden_size * sum(map(len, reads)) * (1 + _BACKWARD)
