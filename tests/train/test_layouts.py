"""Tensor, sequence and data parallelism train as one process does: one launch for each world size serves all tests."""

import numpy as np
import pytest
import torch

from tests.launch import launch
from tests.train.layout_worker import CASES, LAYOUTS, STEPS


@pytest.fixture(scope="module")
def results(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("layouts")
    found = {}
    for world in LAYOUTS:
        found |= launch("train/layout_worker.py", world, folder / f"world{world}.pt", str(corpus))
    return found


LAYOUT_CASES = [(layout, *case) for layout in LAYOUTS[2] for case in CASES]


@pytest.mark.parametrize("layout,method,qk_layernorm", LAYOUT_CASES)
def test_losses_equal_one_process(results, layout, method, qk_layernorm):
    one, other = results["one", method, qk_layernorm], results[layout, method, qk_layernorm]
    assert len(one["losses"]) == STEPS and min(map(abs, np.diff(one["losses"]))) > 1e-3
    assert other["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert other["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert other["valid"] == pytest.approx(one["valid"], abs=1e-5)


@pytest.mark.parametrize("layout,method,qk_layernorm", [c for c in LAYOUT_CASES if c[1] != "baseline"])
def test_depth_gradients_equal_one_process(results, layout, method, qk_layernorm):
    one, other = results["one", method, qk_layernorm], results[layout, method, qk_layernorm]
    for step, (expected, found) in enumerate(zip(one["gradients"], other["gradients"], strict=True)):
        assert expected.keys() == found.keys() and expected
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=f"step {step}: {name}")


@pytest.mark.parametrize("layout", [layout for layouts in LAYOUTS.values() for layout in layouts])
def test_stopped_and_resumed_equals_uninterrupted(results, layout):
    """bf16, bit for bit; with overlap the weights of other ranks arrive no sooner than the next forward."""
    (whole, _), (parts, _) = results["resumed", layout].values()
    for metric in ("train/loss", "train/grad_norm", "valid/loss"):
        assert parts[metric] == whole[metric], metric
    assert len(whole["train/loss"]) == 8


def test_the_number_of_parameters_does_not_depend_on_the_layout(results):
    counts = {
        layout: results["resumed", layout]["whole"][1].parameters for layouts in LAYOUTS.values() for layout in layouts
    }
    assert len(set(counts.values())) == 1, counts


def test_the_gradients_compared_are_not_zero(results):
    """Of all depth parameters, only those of a site with a single source (and released null ones) stay without."""
    for (layout, method, _), result in ((key, value) for key, value in results.items() if len(key) == 3):
        if layout == "one":
            quiet = {n for n, g in result["gradients"][-1].items() if g.abs().max() < 1e-7}
            assert all(n.startswith("decoder.layers.0.site.") for n in quiet), (method, quiet)
