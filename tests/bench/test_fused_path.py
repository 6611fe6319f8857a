"""The fused kernels are what runs: nothing falls back to plain reads without a word."""

import pytest
import torch

from tests.conftest import METHODS, tiny_run

pytestmark = pytest.mark.usefixtures("one_rank")
GPU = torch.cuda.is_available()


def build(tmp_path, method, backend):
    from megatron_mhar.model.build import build_models

    config = tiny_run(
        "unused", tmp_path, residual=METHODS[method] | {"backend": backend}, training={"precision": "bf16"},
        model={"num_layers": 2, "layers": "local", "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2},
    )  # fmt: skip
    (model,) = build_models(config)
    ids = torch.arange(2).view(1, 2).cuda()
    return model, lambda: model(ids, ids, None, labels=ids).mean()


@pytest.mark.parametrize("method", ["mhar", "delta", "mhar_block"])
@pytest.mark.parametrize("backend", ["auto" if GPU else "triton", "torch"])
def test_the_backend_that_is_named_is_the_one_that_reads(tmp_path, monkeypatch, method, backend):
    from megatron_mhar.model import site
    from megatron_mhar.routing.chain import Chain

    read = {"fused": 0, "plain": 0}

    def counted(kind, function):
        def call(*arguments, **keywords):
            read[kind] += 1
            return function(*arguments, **keywords)

        return call

    monkeypatch.setattr(site, "route", counted("plain", site.route))
    monkeypatch.setattr(Chain, "read", counted("fused", Chain.read))
    model, forward = build(tmp_path, method, backend)
    forward().backward()
    other = {"fused": "plain", "plain": "fused"}
    kind = "plain" if backend == "torch" else "fused"
    assert read == {kind: model.decoder.table.num_sites, other[kind]: 0}


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_kernels_ran_on_the_gpu(tmp_path):
    """By their names in torch's profile of the device, forward and backward."""
    import triton

    from megatron_mhar.routing import kernels

    names = {name for name, value in vars(kernels).items() if isinstance(value, triton.runtime.JITFunction)}
    _, forward = build(tmp_path, "mhar", "auto")
    forward().backward()  # kernels are compiled

    def launched(call):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            result = call()
            torch.cuda.synchronize()
        return result, {name for name in names if any(event.name == name for event in profile.events())}

    loss, of_forward = launched(forward)
    _, of_backward = launched(loss.backward)
    assert of_forward and of_backward and of_backward != of_forward, (of_forward, of_backward)
