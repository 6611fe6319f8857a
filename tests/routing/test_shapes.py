"""Fused chains of whole models at the edges of what they take, against the definition in float64.

Without a GPU in Triton's interpreter and at small sizes; there bf16 is not tried, see tests/bench/test_routing.py.
"""

import pytest
import torch

from megatron_mhar.bench.reads import Case, Inputs, Record, SiteBySite, check_case, fused, reference, run, some_tokens
from megatron_mhar.depth.residual import ResidualConfig
from megatron_mhar.depth.sites import DepthTable
from megatron_mhar.routing.reference import route_reference

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
# With the sublayers' norms as in training; and without, which fp32 tells most sharply of.
FORMS = {"fp32": (torch.float32, False), "fp32-normed": (torch.float32, True), "bf16-normed": (torch.bfloat16, True)}
in_all_forms = pytest.mark.parametrize(("dtype", "normed"), FORMS.values(), ids=FORMS)


def case(method, sublayers, tokens, width, heads, dtype, normed=False, **residual):
    table = DepthTable(ResidualConfig(method=method, num_heads=heads, **residual), sublayers)
    return Case(table, width, tokens, dtype, normed=normed)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    ("sublayers", "tokens", "width", "heads"),
    [
        (1, 3, 64, 1),
        (8, 1, 80, 8),  # heads of ten channels; one token
        (9, 3, 320, 2),  # halves of a block: the second has one site
        (16, 2, 192, 2),  # a block and one site more
        (40, 2, 256, 2),  # halves, three blocks
        (18, 2, 64, 32),  # heads of two channels
        (4, 2, 8192, 8),
    ],
)
def test_small(sublayers, tokens, width, heads, normed):
    check_case(case("mhar", sublayers, tokens, width, heads, torch.float32, normed), fused, DEVICE)


@pytest.mark.parametrize("method", ["delta", "delta_block"])
@pytest.mark.parametrize(
    ("sublayers", "tokens", "width", "heads"),
    [
        (1, 3, 64, 1),
        (6, 2, 1000, 8),  # heads of 125 channels
        (18, 2, 64, 4),  # groups, where all sources are read
        (17, 1, 160, 2),  # and halves of them
        (4, 2, 64, 32),
    ],
)
def test_small_with_null_sources_and_gates(sublayers, tokens, width, heads, method):
    blocks = {"block_layers": 1} if method == "delta_block" else {}
    check_case(case(method, sublayers, tokens, width, heads, torch.float32, **blocks), fused, DEVICE)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [1, 8, 32])
@pytest.mark.parametrize("width", [1000, 1280, 8192])
@pytest.mark.parametrize("method", ["delta", "delta_block"])
def test_widths_with_null_sources_and_gates(method, width, heads, dtype):
    if width % heads:
        pytest.skip("H does not divide d")
    blocks = {"block_layers": 1} if method == "delta_block" else {}
    check_case(case(method, 20, 37, width, heads, dtype, **blocks), fused, DEVICE)


@needs_gpu
@in_all_forms
@pytest.mark.parametrize("heads", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("width", [1000, 1280, 7168, 8192])
def test_widths(width, heads, dtype, normed):
    """Heads that are no power of two, and wide ones; 37 tokens fill no tile."""
    if width % heads:
        pytest.skip("H does not divide d")
    check_case(case("mhar", 20, 37, width, heads, dtype, normed), fused, DEVICE)


@needs_gpu
@in_all_forms
@pytest.mark.parametrize("heads", [1, 8, 32])
def test_257_sources(heads, dtype, normed):
    check_case(case("mhar", 256, 19, 256, heads, dtype, normed), fused, DEVICE)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_258_sources_with_null_sources_and_gates(dtype):
    check_case(case("delta", 256, 19, 256, 8, dtype), fused, DEVICE)


@needs_gpu
@pytest.mark.parametrize("method", ["mhar", "delta"])
def test_offsets_past_32_bits(method):
    """More than 2^31 elements of sources; the last token is among those that are checked."""
    large = case(method, 64, 2**31 // (64 * 1280) + 1000, 1280, 8, torch.bfloat16, normed=method == "mhar")
    assert large.plan.num_rows * large.tokens * large.width > 2**31
    check_case(large, fused, DEVICE)


@needs_gpu
@pytest.mark.parametrize("method", ["mhar_block", "delta_block"])
def test_blocks_of_a_deep_model(method):
    blocks = case(method, 96, 61, 1024, 8, torch.bfloat16, normed=method == "mhar_block", block_layers=8)
    check_case(blocks, fused, DEVICE)


@pytest.mark.parametrize(
    ("method", "normed"), [("mhar", False), ("mhar", True), ("delta", False)], ids=["plain", "normed", "delta"]
)
@pytest.mark.parametrize(
    ("sublayers", "width", "heads"),
    [(14, 64, 4), *([(24, 512, 8), (48, 1024, 8), (72, 1280, 8), (24, 512, 1)] if GPU else [])],
)
def test_source_gradients_in_16_bits_are_closer_to_the_truth_than_the_references(
    sublayers, width, heads, method, normed
):
    """The reference's are rounded once a site that reads the source, and again where autograd adds them.

    In bf16; the interpreter, which cuts bf16 off where a GPU rounds it, has fp16.
    """
    dtype = torch.bfloat16 if GPU else torch.float16
    inputs = Inputs(case(method, sublayers, 8, width, heads, dtype, normed), DEVICE)
    tokens = some_tokens(8, DEVICE)
    truth = reference(inputs, tokens).grad_sources
    errors = []
    for algorithm in (fused, lambda inputs: SiteBySite(inputs, route_reference)):
        found = Record(tokens)
        run(algorithm, inputs, backward=True, record=found)
        errors.append([float((found.grad_sources[row].double() - true).norm()) for row, true in truth.items()])
    ours, references = torch.tensor(errors, dtype=torch.float64)
    assert len(ours) == inputs.case.plan.num_rows
    assert ours.norm() < references.norm()
    assert (ours < references)[:-4].all()  # where few sites read a source little is rounded
