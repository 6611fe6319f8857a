"""Fused chains of whole models at the edges of what they take, against the definition in float64.

Without a GPU in Triton's interpreter and at small sizes; there bf16 is not tried, see tests/bench/test_routing.py.
"""

import pytest
import torch

from megatron_mhar.bench.reads import Case, check_case, fused
from megatron_mhar.depth.residual import ResidualConfig
from megatron_mhar.depth.sites import DepthTable

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def case(method, sublayers, tokens, width, heads, dtype, **residual):
    table = DepthTable(ResidualConfig(method=method, num_heads=heads, **residual), sublayers)
    return Case(table, width, tokens, dtype)


@pytest.mark.parametrize(
    ("sublayers", "tokens", "width", "heads"),
    [
        (1, 3, 64, 1),
        (8, 1, 80, 8),  # heads of ten channels; one token
        (9, 3, 320, 2),  # halves of a block: the second has one site
        (16, 2, 192, 2),  # a block and one site more
        (40, 2, 256, 2),  # halves, three blocks
    ],
)
def test_small(sublayers, tokens, width, heads):
    check_case(case("mhar", sublayers, tokens, width, heads, torch.float32), fused, DEVICE)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [1, 4, 8, 16])
@pytest.mark.parametrize("width", [1000, 1280, 7168])
def test_widths(width, heads, dtype):
    """Heads that are no power of two, and wide ones; 37 tokens fill no tile."""
    if width % heads:
        pytest.skip("H does not divide d")
    check_case(case("mhar", 20, 37, width, heads, dtype), fused, DEVICE)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [1, 8, 32])
def test_257_sources(heads, dtype):
    check_case(case("mhar", 256, 19, 256, heads, dtype), fused, DEVICE)


@needs_gpu
@pytest.mark.parametrize("method", ["mhar", "delta"])
def test_offsets_past_32_bits(method):
    """More than 2^31 elements of sources; the last token is among those that are checked."""
    large = case(method, 64, 2**31 // (64 * 1280) + 1000, 1280, 8, torch.bfloat16)
    assert large.plan.num_rows * large.tokens * large.width > 2**31
    check_case(large, fused, DEVICE)


@needs_gpu
@pytest.mark.parametrize("method", ["mhar_block", "delta_block"])
def test_blocks_of_a_deep_model(method):
    check_case(case(method, 96, 61, 1024, 8, torch.bfloat16, block_layers=8), fused, DEVICE)
