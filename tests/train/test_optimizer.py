"""Decay by name, schedules and the weight average, on one rank."""

import math

import pytest
import torch

from tests.conftest import METHODS, tiny_run

pytestmark = pytest.mark.usefixtures("one_rank")

GROUPS = {
    "module.embedding.word_embeddings.weight": "embedding",
    "output_layer.weight": "weight",
    "decoder.layers.0.input_layernorm.weight": "norm",
    "decoder.layers.1.pre_mlp_layernorm.weight": "norm",
    "decoder.layers.0.self_attention.q_layernorm.weight": "norm",
    "decoder.layers.0.self_attention.k_layernorm.weight": "norm",
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "norm",
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_bias": "bias",
    "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": "norm",
    "decoder.final_norm.weight": "norm",
    "decoder.layers.0.self_attention.linear_qkv.weight": "weight",
    "decoder.layers.0.self_attention.linear_qkv.bias": "bias",
    "decoder.layers.0.self_attention.linear_proj.weight": "weight",
    "decoder.layers.1.mlp.linear_fc2.weight": "weight",
    "decoder.layers.1.mlp.router.weight": "weight",
    "decoder.layers.3.site.query": "depth",
    "decoder.layers.3.site.norm_weight": "depth",
    "decoder.layers.3.site.null_source": "depth",
    "decoder.layers.3.site.gate": "depth",
    "decoder.layers.3.site.mixing": "depth",
    "decoder.final_site.query": "depth",
    "decoder.final_site.norm_weight": "depth",
}


@pytest.mark.parametrize("name,group", GROUPS.items())
def test_parameter_groups_by_name(name, group):
    from megatron_mhar.train.optimizer import parameter_group

    assert parameter_group(name) == group


def make(tmp_path, residual="delta", **sections):
    from megatron_mhar.model.build import build_models
    from megatron_mhar.train.loop import connect, wrap
    from megatron_mhar.train.optimizer import Optimizer

    config = tiny_run("unused", tmp_path, residual=METHODS[residual], **sections)
    (model,) = wrap(config, build_models(config))
    optimizer = Optimizer(config, [model])
    connect([model], optimizer)
    return model, optimizer


def decay_by_name(model, optimizer):
    (part,) = optimizer.parts
    found = {}
    for name, parameter in model.module.named_parameters():
        group, _ = part.model_param_group_index_map[parameter]
        found[name] = part.optimizer.param_groups[group]["weight_decay"]
    return found


@pytest.mark.parametrize("method", METHODS)
def test_from_scratch_recipes_decay_everything(tmp_path, method):
    model, optimizer = make(tmp_path, method, optimizer={"weight_decay": 0.1})
    assert set(decay_by_name(model, optimizer).values()) == {0.1}


@pytest.mark.parametrize("method", METHODS)
def test_mid_training_decays_weights_alone(tmp_path, method):
    exempt = ["embedding", "norm", "bias", "depth"]
    model, optimizer = make(tmp_path, method, optimizer={"weight_decay": 0.05, "no_weight_decay": exempt})
    found = decay_by_name(model, optimizer)
    decayed = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
    expected = {name: 0.05 if name.endswith(decayed) else 0.0 for name in found}
    assert found == expected and 0.05 in expected.values()


def test_decay_is_applied(tmp_path):
    """With no gradient, a step shrinks decayed parameters by 1 - lr * decay and leaves the others."""
    model, optimizer = make(
        tmp_path, optimizer={"lr": 0.5, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.1,
                             "no_weight_decay": ["depth"]}
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    model.zero_grad_buffer()
    optimizer.step()
    for name, parameter in model.module.named_parameters():
        expected = 1.0 if ".site." in name else 0.95
        torch.testing.assert_close(parameter, torch.full_like(parameter, expected), msg=name)


def lrs(tmp_path, **optimizer):
    _, made = make(tmp_path, optimizer={"lr": 1.0, "min_lr": 0.1, **optimizer}, training={"steps": 20})
    found = []
    for _ in range(20):
        found.append(made.lr)
        made.scheduler.step(increment=1)
    return found


def test_cosine_schedule(tmp_path):
    found = lrs(tmp_path, schedule="cosine", warmup_steps=4)
    assert found[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert found[12] == pytest.approx(0.55)
    assert found[19] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 15 / 16)))


def test_warm_up_stable_decay_schedule(tmp_path):
    found = lrs(tmp_path, schedule="wsd", warmup_steps=2, wsd_decay_steps=5)
    assert found[:3] == pytest.approx([0, 0.5, 1.0]) and set(found[2:16]) == {1.0}
    assert found[16:] == pytest.approx([0.82, 0.64, 0.46, 0.28])


def fill_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weight_average_follows_its_recursion(tmp_path, precision):
    model, optimizer = make(tmp_path, optimizer={"ema_decay": 0.9}, training={"precision": precision})
    (part,) = optimizer.parts
    shards = list(part.averages)
    by_hand = [shard.detach().clone().double() for shard in shards]
    for step in range(4):
        fill_gradients(model, step)
        optimizer.step()
        by_hand = [0.9 * a + 0.1 * s.double() for a, s in zip(by_hand, shards)]
    for average, expected in zip(part.averages.values(), by_hand):
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_averaged_weights_come_and_go_without_a_trace(tmp_path, precision):
    model, optimizer = make(tmp_path, optimizer={"ema_decay": 0.5}, training={"precision": precision})
    for step in range(3):
        fill_gradients(model, step)
        optimizer.step()
    (part,) = optimizer.parts
    weights = [p.detach().clone() for p in model.parameters()]
    averages = [a.clone() for a in part.averages.values()]
    with optimizer.averaged_weights():
        inside = [p.detach().clone() for p in model.parameters()]
        assert not all(torch.equal(a, b) for a, b in zip(inside, weights))
        # Shards lie in the order of the parameter groups; compare as sums of all weights.
        total = sum(a.double().sum() for a in averages)
        tolerance = {"fp32": 1e-3, "bf16": 2.0}[precision]
        assert abs(sum(p.double().sum() for p in inside) - total) < tolerance
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))
    assert all(torch.equal(a, b) for a, b in zip(part.averages.values(), averages))


def test_without_an_average_the_context_does_nothing(tmp_path):
    model, optimizer = make(tmp_path)
    before = [p.detach().clone() for p in model.parameters()]
    with optimizer.averaged_weights():
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before))


def test_preparing_the_optimizer_moves_nothing(tmp_path):
    from megatron_mhar.model.build import build_models

    config = tiny_run("unused", tmp_path, residual=METHODS["delta"])
    (fresh,) = build_models(config)
    model, optimizer = make(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters()))
    state = [value for s in optimizer.parts[0].optimizer.state.values() for value in s.values()]
    assert state and not any(value.any() for value in state)


def test_first_step_is_adams(tmp_path):
    """One step from prepared state equals torch's AdamW from scratch: the step count starts at zero."""
    settings = {"lr": 1e-2, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.1, "clip_grad": 0.0}
    model, optimizer = make(tmp_path, optimizer=settings)
    twin = [p.detach().clone().requires_grad_() for p in model.parameters()]
    adam = torch.optim.AdamW(twin, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(3):
        fill_gradients(model, step)
        for a, b in zip(twin, model.parameters()):
            a.grad = b.main_grad.clone()
        optimizer.step()
        adam.step()
    for a, b in zip(twin, model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
