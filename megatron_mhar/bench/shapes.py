"""Models and micro-batches whose reads ``mhar bench routing`` knows by name."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_mhar.depth.residual import Method


@dataclass(frozen=True)
class Shape:
    """A model's depth and width, and a micro-batch.

    Attributes:
        sublayers: of the model.
        width: d.
        batch, sequence: tokens of a micro-batch are their product.
        method: residual method that is measured unless another is asked for.
        block_layers: layers in a block, for the methods with blocks.
        num_heads: H unless another is asked for.
        about: a line for the list of shapes.
    """

    sublayers: int
    width: int
    batch: int
    sequence: int
    about: str
    method: Method = "mhar"
    block_layers: int = 4
    num_heads: int = 8


SHAPES = {
    "100m": Shape(24, 512, 8, 2048, "100M model, the paper's micro-batch", block_layers=2),
    "350m": Shape(48, 1024, 4, 1024, "350M model, the paper's micro-batch", block_layers=3),
    "1b": Shape(72, 1280, 2, 1024, "1B model, the paper's micro-batch"),
    "1b-32k": Shape(72, 1280, 32, 1024, "1B model, 32k tokens"),
    "delta-8b": Shape(9, 4096, 2, 4096, "nine sites of width 4096 that read one to nine sources", method="delta"),
    "8b": Shape(64, 4096, 2, 4096, "all sites of the 8B model, eight blocks of four layers", method="delta_block"),
    "tiny": Shape(3, 32, 1, 2, "to try the command in Triton's interpreter", num_heads=4, block_layers=1),
}
