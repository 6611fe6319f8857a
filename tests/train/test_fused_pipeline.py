"""Chains of fused reads under a pipeline: micro-batches in flight, sources received, handed over and sent on."""

import pytest
import torch

from tests.launch import launch
from tests.train.fused_worker import CASES


@pytest.fixture(scope="module")
def results(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("fused")
    return launch("train/fused_worker.py", 2, folder / "results.pt", str(corpus))


@pytest.mark.parametrize("method,recompute", CASES)
def test_fused_reads_train_as_plain_ones_over_virtual_stages(results, method, recompute):
    plain, fused = (results[method, recompute, backend] for backend in ("torch", "triton"))
    for one, other in zip(plain, fused, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert other["valid"] == pytest.approx(one["valid"], abs=1e-5)
        assert other["norm"] == pytest.approx(one["norm"], rel=1e-5)
        assert one["gradients"].keys() == other["gradients"].keys()
        for name, gradient in one["gradients"].items():
            torch.testing.assert_close(other["gradients"][name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    names = {name for rank in plain for name in rank["gradients"]}
    assert sum(name.endswith(".site.query") for name in names) == 8  # of all stages; the final site is no sublayer's
