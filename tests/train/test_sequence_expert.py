"""Sequence slices and shared-out experts train as one process does: one launch for each world size serves all tests.

Without Transformer Engine context parallelism has the attention of tests/gathering_attention.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_mhar.run_files import RoutingMap, RunFiles, RunSummary
from megatron_mhar.tracking.journal import load_metrics
from tests.launch import launch
from tests.train.sequence_expert_worker import LAYOUTS, MIXED, cases, whole_run
from tests.train.test_layouts import assert_equals_one_process

# The first test waits for all launches.
pytestmark = pytest.mark.timeout(1200)
PARALLEL = {layout: model for world, layouts in LAYOUTS.items() if world > 1 for layout, (model, _) in layouts.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sequence_expert")


@pytest.fixture(scope="module")
def results(folder, corpus, request):
    tier = request.config.getoption("--tier")
    reference, found = folder / "world1.pt", {}
    for world in LAYOUTS:
        out = folder / f"world{world}.pt"
        found |= launch("train/sequence_expert_worker.py", world, out, str(corpus), str(reference), tier, timeout_s=900)
    return found


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        tier = metafunc.config.getoption("--tier")
        runs = [(layout, method) for layout in PARALLEL for method in cases(layout, tier)]
        metafunc.parametrize("layout,method", runs)


def test_training_equals_one_process(results, layout, method):
    assert_equals_one_process(results[f"one_{PARALLEL[layout]}", method], results[layout, method])


def test_every_expert_and_router_has_a_gradient(results):
    for model in ("mixed", "ends", "top1"):
        gradients = results[f"one_{model}", "mhar_block"]["gradients"]
        experts = {name for name in gradients[0] if ".experts." in name or ".router." in name}
        assert len(experts) == 2 * (4 * 2 + 1)  # two sublayers of four experts of two matrices, and a router
        assert all(max(step[name].abs().max() for step in gradients) > 1e-4 for name in experts)


def journal(folder, name):
    return load_metrics(RunFiles(folder / name).journal)


def tensors(folder, name):
    """Weights, moments and average in a run's last checkpoint, by name."""
    from megatron.core import dist_checkpointing

    from megatron_mhar.train.checkpoint import checkpoint_path

    loaded = dist_checkpointing.load_plain_tensors(str(checkpoint_path(RunFiles(folder / name).checkpoints, 8)))
    return {key: value for key, value in loaded.items() if torch.is_tensor(value)}


def test_stopped_and_resumed_with_experts_shared_out_is_exact(results, folder, one_rank):
    whole, parts = journal(folder, "ep2"), journal(folder, "ep2_then_ep2")
    for metric in ("train/loss", "train/grad_norm", "valid/loss", "train/load_balancing_loss"):
        assert len(whole[metric]) == (2 if metric == "valid/loss" else 8)
        assert parts[metric] == whole[metric], metric
    expected, found = tensors(folder, "ep2"), tensors(folder, "ep2_then_ep2")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name,one", [("one_then_ep2", "one"), ("ep2_then_one", "one"), ("pp2_ep2_parts", "one_ends")])
def test_a_run_goes_on_under_another_expert_parallel_size(results, folder, corpus, one_rank, name, one):
    if name == "ep2_then_one":
        from megatron_mhar.train.loop import train

        assert train(whole_run(corpus, folder, name, MIXED, {}, None)) is not None
    expected, found = journal(folder, one), journal(folder, name)
    for metric in ("train/loss", "train/grad_norm", "valid/loss", "train/load_balancing_loss"):
        steps = [step for step, _ in expected[metric]]
        assert [step for step, _ in found[metric]] == steps and steps[-1] == 8
        assert [value for _, value in found[metric]] == pytest.approx([v for _, v in expected[metric]], rel=1e-5)
    weights, others = tensors(folder, one), tensors(folder, name)
    assert others.keys() == weights.keys()
    assert sum("average" in key and "experts" in key for key in weights) > 0
    for key, tensor in weights.items():
        torch.testing.assert_close(others[key], tensor, rtol=1e-4, atol=1e-6, msg=key)


def test_experts_are_balanced_by_their_auxiliary_loss(results, folder):
    """It is 1 for equal shares, and the least that a share of all tokens for two of four experts gives is more."""
    values = [value for _, value in journal(folder, "one")["train/load_balancing_loss"]]
    assert all(1 <= value < 2 for value in values)
    assert "train/load_balancing_loss" not in journal(folder, "one_dense")


def test_a_whole_run_of_sequence_slices_is_that_of_one_process(results, folder):
    """From the data to the summary: log, evaluation, number of parameters and mean routing weights."""
    expected, found = journal(folder, "one_dense"), journal(folder, "cp2")
    for metric in ("train/loss", "train/grad_norm", "valid/loss"):
        assert [v for _, v in found[metric]] == pytest.approx([v for _, v in expected[metric]], rel=1e-5)
    maps = [RoutingMap.read(RunFiles(folder / name).routing).weights for name in ("one_dense", "cp2")]
    np.testing.assert_allclose(*maps, atol=1e-6)
    assert maps[0].sum() > 0


def test_the_number_of_parameters_does_not_depend_on_the_layout(results, folder):
    def count(name):
        return RunSummary.read(RunFiles(folder / name).summary).parameters

    assert count("cp2") == count("one_dense")
    assert count("ep2") == count("one") == count("one_then_ep2") == count("pp2_ep2_parts")
    # Two dense MLPs of 96 are two sublayers of four experts of 32, with their routers.
    assert count("one") - count("one_dense") == 2 * (4 * 3 * 64 * 32 + 4 * 64 - 3 * 64 * 96)
