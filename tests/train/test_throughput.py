"""Floating-point operations of a step, and peaks of devices."""

import pytest
import torch

from megatron_mhar.train.throughput import PEAKS, model_flops, peak_flops, routing_flops
from tests.conftest import METHODS, tiny_run


@pytest.mark.parametrize(
    "device, precision, tflops",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("NVIDIA GB200", "fp8", 5000),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A100-SXM4-80GB", "fp32", 156),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("CPU (2 threads)", "fp32", None),
    ],
)
def test_the_peak_goes_by_the_device_and_the_precision(device, precision, tflops):
    assert peak_flops(device, precision) == (None if tflops is None else tflops * 1e12)


def test_no_name_of_the_table_hides_another():
    names = list(PEAKS)
    assert all(not later.count(name) for i, name in enumerate(names) for later in names[i + 1 :])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_s_operations_are_those_that_torch_counts(tmp_path, tied):
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_mhar.model.build import build_models

    config = tiny_run("corpus", tmp_path, model={"tie_embeddings": tied, "layers": "local", "head_dim": 24})
    (model,) = build_models(config)
    tokens = torch.randint(0, 128, (2, 32), device=torch.cuda.current_device())
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(32, device=tokens.device).expand(2, -1), None).float().sum().backward()
    # Plain attention multiplies the whole square, of which causal attention needs a half.
    other_half = 3 * 4 * 2 * 32 * 24 * 4
    assert counter.get_total_flops() == 2 * 32 * (model_flops(config) + other_half)


def test_routing_is_counted_apart(tmp_path):
    flops = {name: routing_flops(tiny_run("corpus", tmp_path, residual=METHODS[name])) for name in METHODS}
    assert flops["baseline"] == flops["hyper_connections"] == 0
    # Sites 0 to 7 and the final one read 1 to 9 sources; blocks of two layers make 1, 2, 2, 2, 2, 3, 3, 3 and 3.
    assert flops["mhar"] == flops["attnres"] == 18 * 64 * sum(range(1, 10))
    assert flops["mhar_block"] == 18 * 64 * (1 + 4 * 2 + 4 * 3)
    counts = {model_flops(tiny_run("corpus", tmp_path, residual=METHODS[name])) for name in METHODS}
    assert len(counts) == 1


def test_sublayers_that_are_not_counted_have_no_mfu(tmp_path):
    config = tiny_run("corpus", tmp_path, model={"pattern": "M-*-M-*-"})
    assert model_flops(config) is None
