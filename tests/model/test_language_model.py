"""Loss and log-partition of the tokens, and what a LanguageModel makes of labels."""

from __future__ import annotations

import pytest
import torch

from megatron_mhar import platform
from megatron_mhar.model.build import build_models
from megatron_mhar.model.language_model import cross_entropy
from tests.conftest import tiny_run
from tests.launch import launch

pytestmark = pytest.mark.usefixtures("one_rank")


def case(*shape, dtype=torch.float32, scale=8.0):
    """Logits, which are not a leaf as no model's are, and labels."""
    generator = torch.Generator().manual_seed(0)
    leaf = (torch.randn(shape, generator=generator) * scale).to(dtype).cuda().requires_grad_()
    labels = torch.randint(0, shape[-1], shape[:-1], generator=generator).cuda()
    return leaf, leaf * 1, labels


def test_cross_entropy_and_partition_equal_torchs():
    leaf, logits, labels = case(2, 5, 40)
    twin = leaf.detach().double().requires_grad_()
    loss, squared = cross_entropy(logits, labels)
    expected = torch.nn.functional.cross_entropy(twin.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    partition = twin.logsumexp(-1).square()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squared.double(), partition, rtol=1e-5, atol=1e-5)
    weights = torch.rand(2, 5, generator=torch.Generator().manual_seed(1)).cuda()
    ((loss + 0.1 * squared) * weights).sum().backward()
    ((expected + 0.1 * partition) * weights.double()).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), twin.grad, rtol=1e-4, atol=1e-5)


def test_bf16_logits_get_bf16_gradients_from_an_fp32_loss():
    leaf, logits, labels = case(1, 300, 16, dtype=torch.bfloat16, scale=2.0)
    loss, _ = cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert leaf.grad.dtype == torch.bfloat16
    expected = leaf.detach().float().softmax(-1) - torch.nn.functional.one_hot(labels, 16)
    torch.testing.assert_close(leaf.grad.float(), expected, rtol=2**-8, atol=1e-6)  # one rounding


def test_the_gradient_takes_the_place_of_the_logits():
    leaf, logits, labels = case(3, 7, 50)
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    cross_entropy(logits, labels)[0].sum().backward()
    assert seen == [logits.data_ptr()]


def test_who_else_needs_the_logits_hears_that_they_are_gone():
    _, logits, labels = case(3, 50)
    (cross_entropy(logits, labels)[0].sum() + logits.square().sum()).backward()  # this one's backward came before
    _, logits, labels = case(3, 50)
    other = logits.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (other + cross_entropy(logits, labels)[0].sum()).backward()


def test_large_logits_and_unlikely_labels_stay_finite():
    leaf, logits, labels = case(4, 30, scale=1e4)
    loss, squared = cross_entropy(logits, labels)
    (loss.sum() + 1e-4 * squared.sum()).backward()
    assert loss.isfinite().all() and squared.isfinite().all() and leaf.grad.isfinite().all()


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_gradients_of_sure_tokens_do_not_depend_on_where_the_logits_lie(offset):
    """Where a label is likely its gradient is a small difference; without z-loss nothing keeps logits near zero."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(256, 500, generator=generator) + offset
    labels = torch.randint(0, 500, (256,), generator=generator)
    values.scatter_(1, labels.unsqueeze(1), offset + 13.0)
    leaf, twin = values.cuda().requires_grad_(), values.double().detach().requires_grad_()
    cross_entropy(leaf * 1, labels.cuda())[0].sum().backward()
    torch.nn.functional.cross_entropy(twin, labels, reduction="sum").backward()
    found, expected = leaf.grad.double().cpu(), twin.grad
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.skipif(platform.HAS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs, or none")
def test_two_tensor_parallel_ranks(tmp_path):
    for rank, found in launch("model/loss_worker.py", 2, tmp_path / "out.pt").items():
        for name, errors in found.items():
            assert max(errors) < 1e-6, f"rank {rank}: {name}: loss, squared log-partition, gradient {errors}"


def test_labels_make_losses_of_what_logits_say(tmp_path):
    (model,) = build_models(tiny_run("data", tmp_path))
    model = model.cuda()
    vocabulary = model.vocab_size
    tokens = torch.randint(0, vocabulary, (2, 33), generator=torch.Generator().manual_seed(0)).cuda()
    positions = torch.arange(32).expand(2, -1).cuda()
    tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with torch.no_grad():
        logits = model(tokens, positions, None)
        loss, squared = model(tokens, positions, None, labels=labels, tell_partition=True)
        alone = model(tokens, positions, None, labels=labels)
    assert logits.shape == (2, 32, vocabulary)
    expected = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    assert torch.equal(alone, loss)  # and not what was told before
    torch.testing.assert_close(loss, expected.view(2, 32), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squared, logits.float().logsumexp(-1).square(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not platform.HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("deterministic", [False, True])
def test_more_logits_than_32_bits_count_need_no_second_copy(monkeypatch, deterministic):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        check_many_logits()
    finally:
        torch.use_deterministic_algorithms(before)


def check_many_logits():
    rows, vocabulary = 17_000, 128_256
    logits = torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), device="cuda")
    some = torch.tensor([0, rows // 2, rows - 1], device="cuda")
    twin = logits.detach()[some].double().requires_grad_()
    torch.nn.functional.cross_entropy(twin, labels[some], reduction="sum").backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (grad,) = torch.autograd.grad(cross_entropy(logits, labels)[0].sum(), logits)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 10
    torch.testing.assert_close(grad[some].double(), twin.grad, rtol=2**-8, atol=1e-9)
