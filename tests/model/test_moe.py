"""Mixtures of experts and other sublayers of a pattern: what a config may ask for, and how their weights begin."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from megatron_mhar.config.layout import check_layout
from megatron_mhar.errors import UserError
from tests.conftest import METHODS, tiny_run

EXPERTS = {"pattern": "*E*-*E*-", "num_experts": 4}


def config(tmp_path, model=EXPERTS, **sections):
    return tiny_run("data", tmp_path, model=model, **sections)


REFUSED = [
    ({"pattern": "*E*-*E*-"}, {}, "num_experts: missing"),
    (EXPERTS | {"moe_router_topk": 5}, {}, "moe_router_topk: 5 given, but num_experts is 4"),
    ({"num_experts": 4}, {}, "num_experts: 4 given, but the pattern has no E"),
    ({"moe_aux_loss_coeff": 0.5}, {}, "moe_aux_loss_coeff: 0.5 given, but the pattern has no E"),
    ({"moe_router_load_balancing_type": "seq_aux_loss"}, {}, "moe_router_load_balancing_type: seq_aux_loss given"),
    (EXPERTS, {"expert": 3}, "parallel.expert: 3 given, but it must divide model.num_experts 4"),
    ({}, {"expert": 2}, "parallel.expert: 2 given, but the model has no experts"),
    (EXPERTS, {"tensor": 2}, "parallel.sequence: false given with tensor 2"),
    (EXPERTS | {"moe_ffn_hidden_size": 33}, {"tensor": 2, "sequence": True}, "model.moe_ffn_hidden_size 33"),
    ({}, {"context": 3}, "parallel.context: 3 given, but 6 must divide training.sequence_length 32"),
    ({}, {"context": 8, "tensor": 4, "sequence": True}, "parallel.tensor: 4 given, but it must divide model.num_query"),
    ({"num_query_groups": 4}, {"context": 8, "tensor": 4, "sequence": True}, "64 must divide training.sequence_length"),
    ({"pattern": "*-*-*-*-/*-"}, {}, "multi-token prediction is not supported"),
    ({"pattern": "*-*-|*-*-"}, {}, "set by parallel.stage_sublayers"),
    ({"pattern": "*-*-*-*X"}, {}, "symbol 'X' given"),
    ({"pattern": "*-M-*-*-"}, {"tensor": 2}, "parallel.tensor: 2 given, but Mamba sublayers are not cut over ranks"),
    ({"pattern": "*-G-*-*-"}, {"context": 2}, "parallel.context: 2 given, but gated delta net sublayers"),
]


@pytest.mark.parametrize("model,parallel,message", REFUSED)
def test_what_does_not_fit_is_refused_by_its_key(tmp_path, model, parallel, message):
    with pytest.raises(ValidationError) as refused:
        config(tmp_path, model, parallel=parallel)
    assert message in str(refused.value)


def test_experts_are_shared_out_over_data_and_context_parallel_ranks(tmp_path):
    batch = {"micro_batch_size": 1}
    run = config(tmp_path, parallel={"expert": 4, "tensor": 2, "sequence": True}, training=batch)
    with pytest.raises(
        UserError, match=r"parallel\.expert: 4 given, but on 4 ranks it must divide 2 \(2 data-parallel"
    ):
        check_layout(run, 4)
    assert check_layout(run, 8) == 4
    both = config(tmp_path, parallel={"expert": 4, "context": 2}, training=batch)
    assert check_layout(both, 4) == 2
    with pytest.raises(UserError, match=r"must divide 2 \(1 data-parallel x 2 context-parallel"):
        check_layout(both, 2)


@pytest.mark.parametrize(
    "model,parallel,message",
    [
        ({}, {"context": 2}, r"^parallel\.context: 2 given, but it needs Transformer Engine's layers.*local"),
        ({"pattern": "*-M-*-*-"}, {}, r"^model\.pattern: M \(Mamba\) given, but it needs Transformer Engine's layers"),
        ({"pattern": "*-G-*-*-"}, {}, r"^model\.pattern: G \(gated delta net\) given, but it needs Transformer Engine"),
    ],
)
def test_what_local_layers_cannot_do_is_refused_before_anything_is_built(
    tmp_path, monkeypatch, model, parallel, message
):
    from megatron_mhar.train.loop import train

    monkeypatch.setenv("WORLD_SIZE", str(math.prod(parallel.values())))
    with pytest.raises(UserError, match=message):
        train(config(tmp_path, {"layers": "local", **model}, parallel=parallel))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "symbol,flag,library",
    [
        ("M", "HAVE_MAMBA_SSM", "mamba-ssm and einops"),
        ("M", "HAVE_EINOPS", "mamba-ssm"),
        ("G", "HAVE_FLA", "flash-linear-attention"),
    ],
)
def test_a_recurrent_sublayer_without_its_library_names_it(tmp_path, monkeypatch, symbol, flag, library):
    from megatron_mhar.model import build

    monkeypatch.setattr(build, "resolve_layers", lambda asked: "transformer_engine")
    for installed in ("HAVE_MAMBA_SSM", "HAVE_EINOPS", "HAVE_FLA"):
        monkeypatch.setattr(build, installed, True)
    run = config(tmp_path, {"pattern": f"*-{symbol}-*-*-"})
    assert build.check_layers(run) == "transformer_engine"
    monkeypatch.setattr(build, flag, False)
    with pytest.raises(UserError, match=rf"model\.pattern: {symbol} .* needs {library}"):
        build.check_layers(run)


@pytest.fixture(scope="module")
def mixed(groups, tmp_path_factory):
    """A model of one rank with experts in its second and sixth sublayer."""
    from megatron_mhar.model.build import build_models

    run = config(tmp_path_factory.mktemp("mixed"), EXPERTS | {"layers": "local"}, residual=METHODS["mhar"])
    return build_models(run)[0]


def test_a_pattern_with_experts_is_built_with_a_site_before_each_sublayer(mixed):
    layers = mixed.decoder.layers
    holds_experts = [any(name.endswith("mlp.experts") for name, _ in layer.named_modules()) for layer in layers]
    assert holds_experts == [symbol == "E" for symbol in EXPERTS["pattern"]]
    assert all(hasattr(layer, "site") for layer in layers)


class Group:
    """A process group as far as names and slices ask."""

    def __init__(self, rank, size):
        self.of = rank, size

    def rank(self):
        return self.of[0]

    def size(self):
        return self.of[1]


def part_of(model, *, expert=(0, 1), layers=slice(None)):
    """A rank's part of ``model`` as a stand-in: some of its layers, and its share of the experts."""
    part = torch.nn.Module()
    part.decoder = torch.nn.Module()
    part.decoder.layers = torch.nn.ModuleList(model.decoder.layers[layers])
    part.share_embeddings_and_output_weights = True
    part.pg_collection = SimpleNamespace(ep=Group(*expert), tp=Group(0, 1))
    part.config = SimpleNamespace(num_moe_experts=4, gated_linear_unit=True)
    return part


def test_names_of_experts_are_global_and_the_same_in_both_layer_families(mixed):
    from megatron_mhar.model.initialize import global_name

    part = part_of(mixed, expert=(1, 2), layers=slice(5, 8))  # the second half of the experts, from sublayer 5 on
    name = "decoder.layers.5.mlp.experts.3.linear_fc1.weight"
    assert global_name(part, "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight") == name
    assert global_name(part, "decoder.layers.0.mlp.experts.linear_fc1.weight1") == name
    router = "decoder.layers.0.mlp.router.weight"
    assert global_name(part, router) == "decoder.layers.5.mlp.router.weight"
    names = [global_name(mixed, n) for n, _ in mixed.named_parameters()]
    assert len(set(names)) == len(names)
    assert sum(".mlp.experts." in n for n in names) == 2 * 4 * 2


def test_each_expert_begins_with_weights_of_its_own(mixed):
    weights = [p.detach() for n, p in mixed.named_parameters() if "local_experts" in n and "linear_fc1" in n]
    assert len(weights) == 8 and weights[0].shape == (2 * 96, 64)
    for number, weight in enumerate(weights):
        assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
        assert all(not torch.equal(weight, other) for other in weights[:number])


def test_recurrent_sublayers_begin_with_megatron_cores_distributions():
    """Names and shapes are those of its Mamba and gated delta net modules, which cannot be built here."""
    from megatron_mhar.model.initialize import initialize_weights

    def layer(number, **modules):
        made = torch.nn.Module()
        made.layer_number = number + 1
        for name, parameters in modules.items():
            module = torch.nn.Module()
            for parameter, shape in parameters.items():
                module.register_parameter(parameter, torch.nn.Parameter(torch.full(shape, math.nan)))
            made.add_module(name, module)
        return made

    mamba = {"conv1d_weight": (512, 1, 4), "conv1d_bias": (512,), "A_log": (512,), "dt_bias": (512,)}
    delta = layer(1, self_attention={"A_log": (512,), "dt_bias": (512,)})
    delta.self_attention.conv1d = torch.nn.Conv1d(512, 512, 4, groups=512, bias=False)
    model = part_of(
        SimpleNamespace(decoder=SimpleNamespace(layers=torch.nn.ModuleList([layer(0, mixer=mamba), delta])))
    )

    initialize_weights(model, seed=1, std=0.02)
    mixer, attention = model.decoder.layers[0].mixer, model.decoder.layers[1].self_attention
    for tensor in (mixer.conv1d_weight.detach(), mixer.conv1d_bias.detach(), attention.conv1d.weight.detach()):
        assert tensor.abs().max() <= 0.5 and float(tensor.std()) == pytest.approx(0.5 / math.sqrt(3), rel=0.1)
    for decay in (mixer.A_log.detach().exp(), attention.A_log.detach().exp()):
        assert decay.min() >= 1 and decay.max() <= 16 and float(decay.mean()) == pytest.approx(8.5, rel=0.1)
    steps = torch.nn.functional.softplus(mixer.dt_bias.detach())
    assert steps.min() >= 0.00099 and steps.max() <= 0.1001
    assert float(steps.log().mean()) == pytest.approx(math.log(0.01), rel=0.05)
    assert torch.equal(attention.dt_bias, torch.ones(512))
    assert not torch.equal(mixer.A_log, attention.A_log)

    first = {n: p.clone() for n, p in model.named_parameters()}
    initialize_weights(model, seed=1, std=0.02)
    assert all(torch.equal(p, first[n]) for n, p in model.named_parameters())
