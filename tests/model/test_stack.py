"""Routed stacks in megatron-core's HybridModel, on one rank; on a GPU where there is one.

``.cuda()`` stands for "this run's device": without a GPU it does nothing, see megatron_mhar.platform.
"""

import copy
import gc
import importlib.util
import math
import shutil
import threading
import warnings
import weakref

import pytest
import torch

from tests.conftest import METHODS, tiny_run

pytestmark = pytest.mark.usefixtures("one_rank")
DATA = "unused"


def build(tmp_path, residual, *, layers="local", **sections):
    from megatron_mhar.model.build import build_models

    sections["model"] = {"layers": layers, **sections.get("model", {})}
    (model,) = build_models(tiny_run(DATA, tmp_path, residual=residual, **sections))
    return model


def transformer_engine_runs():
    """Whether this machine has Transformer Engine and a GPU for it."""
    try:
        return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    except (ImportError, ValueError):
        return False


GPU = torch.cuda.is_available()
LAYERS = [
    "local",
    pytest.param(
        "transformer_engine",
        marks=pytest.mark.skipif(not transformer_engine_runs(), reason="needs a GPU and Transformer Engine"),
    ),
]


def tokens(seed=1, batch=2, length=32):
    ids = torch.randint(1, 128, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).expand(batch, length)
    return ids[:, :-1].contiguous().cuda(), positions.contiguous().cuda(), ids[:, 1:].contiguous().cuda()


def loss_of(model, batch):
    ids, positions, labels = batch
    return model(ids, positions, None, labels=labels).mean()


def logits_of(model, batch):
    ids, positions, _ = batch
    return model(ids, positions, None)


def disturb(model):
    """Move depth parameters off their initial values, so that every path has a gradient."""
    from megatron_mhar.model.initialize import generator

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "site." in name:
                noise = torch.randn(parameter.shape, generator=generator(7, name, "cpu"))
                parameter.add_(0.3 * noise.to(parameter))
    return model


@pytest.mark.parametrize("layers", LAYERS)
def test_a_checkpoint_has_one_set_of_names_whichever_layers_wrote_it(tmp_path, layers):
    """Those of Transformer Engine's layers, whose norms are parts of products; shapes too."""
    model = build(tmp_path, METHODS["mhar"], layers=layers)
    stored = {
        tensor.key: getattr(tensor, "global_shape", None)  # fc1 is a factory of its two halves
        for tensor in model.sharded_state_dict().values()
        if not tensor.key.endswith("_extra_state")
    }
    width, head, ffn = 64, 16, 96
    of_layer = [
        {"self_attention.linear_qkv.weight": ((4 + 2 * 2) * head, width),
         "self_attention.linear_qkv.layer_norm_weight": (width,), "self_attention.linear_proj.weight": (width, width),
         "self_attention.q_layernorm.weight": (head,), "self_attention.k_layernorm.weight": (head,)},
        {"mlp.linear_fc1.layer_norm_weight": (width,), "mlp.linear_fc1.weight": None,
         "mlp.linear_fc2.weight": (width, ffn)},
    ]  # fmt: skip
    expected = {"embedding.word_embeddings.weight": (128, width), "decoder.final_norm.weight": (width,)}
    for number in range(8):
        site = {"site.query": (width,), "site.norm_weight": (width,)}
        expected |= {f"decoder.layers.{number}.{key}": shape for key, shape in (of_layer[number % 2] | site).items()}
    expected |= {f"decoder.final_site.{key}": (width,) for key in ("query", "norm_weight")}
    assert stored.keys() == expected.keys()
    for name, shape in expected.items():
        assert shape is None or stored[name] == shape, name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["delta", "delta_block", "delta_block_released"])
@pytest.mark.parametrize("layers", LAYERS)
def test_zero_gate_gives_the_baselines_bits(tmp_path, method, precision, layers):
    training = {"precision": precision}
    residual = METHODS[method] | {"gate_init": 0.0}
    base = build(tmp_path, METHODS["baseline"], training=training, layers=layers)
    delta = build(tmp_path, residual, training=training, layers=layers)
    state = dict(delta.named_parameters())
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, state[name])  # the same initial weights, whatever the method
    batch = tokens()
    logits = logits_of(delta, batch)
    assert torch.equal(logits_of(base, batch), logits) and logits.float().std() > 0.01


def test_gate_learns_at_step_0_and_queries_by_step_2(tmp_path):
    model = build(tmp_path, METHODS["delta_block"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first_gradient = {}
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, tokens(step)).backward()
        for name, parameter in model.named_parameters():
            if ".site." in name and parameter.grad is not None and parameter.grad.abs().max() > 0:
                first_gradient.setdefault(name.split(".")[-1], {}).setdefault(name, step)
        optimizer.step()
    assert set(first_gradient["gate"].values()) == {0} and len(first_gradient["gate"]) == 8
    assert all(0 < step <= 2 for step in first_gradient["query"].values()) and len(first_gradient["query"]) == 8
    assert min(first_gradient["null_source"].values()) > 0


@pytest.mark.parametrize("method", ["mhar", "delta_block"])
def test_parameters_of_sites_are_together_and_their_gradients_come_last(tmp_path, method):
    """Nothing else of the decoder waits for them in data parallelism's buckets, which are cut in that order."""
    model = build(tmp_path, METHODS[method] | {"backend": "triton"}, model={"num_layers": 2})
    names = [name for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    of_sites = {name for name in names if ".site." in name or ".final_site." in name}
    assert len(of_sites) == sum(len(list(site.parameters())) for site in model.decoder.modules() if is_site(site)) >= 8
    decoder = [name for name in names if name.startswith("decoder.")]
    assert set(decoder[: len(of_sites)]) == of_sites and names[0].startswith("embedding.")
    ready = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    loss_of(model, tokens()).backward()
    others = [name for name in decoder if name not in of_sites]
    assert max(map(ready.index, others)) < min(map(ready.index, of_sites))


def is_site(module):
    from megatron_mhar.model.site import RoutingSite

    return isinstance(module, RoutingSite)


def test_parameters_have_arrived_when_the_first_site_reads(tmp_path):
    """Sites of one block read together: hooks of all of them have waited, as under parameter-gather overlap."""
    model = build(tmp_path, METHODS["mhar"] | {"backend": "triton"}, model={"num_layers": 2})
    batch = tokens()
    expected = logits_of(model, batch)
    sites = [module for module in model.decoder.modules() if is_site(module)]
    arriving = {}
    for site in sites:
        arriving[site] = site.query.detach().clone().uniform_(-1, 1)
        site.register_forward_pre_hook(lambda site, _: setattr(site.query, "data", arriving[site]))
    first = logits_of(model, batch)
    assert not torch.equal(first, expected) and torch.equal(logits_of(model, batch), first)


def test_baseline_is_megatron_cores_own_stack(tmp_path):
    """The same weights in HybridStack with stock residual adds inside the layers give the same logits and gradients."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_mhar.model.build import transformer_config
    from megatron_mhar.model.norm import RMSNorm
    from megatron_mhar.model.specs import _local_submodules

    config = tiny_run(DATA, tmp_path, model={"layers": "local"})  # as `build` has it: fusions depend on it
    ours = build(tmp_path, METHODS["baseline"])
    submodules = _local_submodules(True, None)
    submodules.attention_layer.submodules.self_attn_bda = get_bias_dropout_add
    submodules.mlp_layer.submodules.mlp_bda = get_bias_dropout_add

    class StockStack(HybridStack):
        """Its final norm needs Transformer Engine; ours stands in."""

        def __init__(self, config, *args, **kwargs):
            super().__init__(config, *args, post_layer_norm=False, **kwargs)
            self.final_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

        def forward(self, *args, **kwargs):
            return self.final_norm(super().forward(*args, **kwargs))

    stock = HybridModel(
        transformer_config(config),
        ModuleSpec(module=StockStack, submodules=submodules),
        vocab_size=128,
        max_sequence_length=32,
        hybrid_layer_pattern="*-" * 4,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    stock.load_state_dict(ours.state_dict())
    batch = tokens()
    logits = [logits_of(model, batch) for model in (stock, ours)]
    assert torch.equal(*logits)
    for each in logits:
        torch.nn.functional.cross_entropy(each.flatten(0, 1), batch[2].flatten()).backward()
    for (name, a), b in zip(stock.named_parameters(), ours.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_equals_the_definition_in_plain_torch(tmp_path, method):
    """The whole model against its sublayers called one by one, state kept by hand: no table, no history."""
    from megatron_mhar.model.norm import SiteNorm

    residual = METHODS[method]
    model = disturb(build(tmp_path, residual))
    ids, positions, _ = batch = tokens()
    decoder = model.decoder
    rope = model.rotary_pos_emb(32)
    e = model.embedding(input_ids=ids, position_ids=positions)
    heads = residual.get("num_heads", 1)

    def mix(sources, site):
        stacked = torch.stack([s.expand_as(e) for s in sources])
        keys = torch.nn.functional.rms_norm(stacked, (64,), site.norm_weight, 1e-6)
        split = (heads, 64 // heads)
        weights = (keys.unflatten(-1, split) * site.query.view(split)).sum(-1).softmax(0)
        return (weights.unsqueeze(-1) * stacked.unflatten(-1, split)).sum(0).flatten(-2)

    def sublayer(layer, h):
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            if isinstance(norm, SiteNorm):  # else the layer norms its input itself
                h = torch.nn.functional.rms_norm(h, (64,), norm.weight, norm.eps)
        out = layer(hidden_states=h, attention_mask=None, rotary_pos_emb=rope)
        return out[0] if isinstance(out, tuple) else out

    name = residual["method"]
    block = 2 * residual.get("block_layers", 1)
    x, outputs, entries, streams = e, [], [], [e] * 4
    for t, layer in enumerate(decoder.layers):
        site = layer.site
        closed = [sum(outputs[b : b + block]) for b in range(0, t - t % block, block)]
        if method == "baseline":
            h = x
        elif name in ("attnres", "mhar"):
            h = mix([e, *outputs], site)
        elif name in ("attnres_block", "mhar_block"):
            h = mix([e, *closed, *([sum(outputs[t - t % block :])] if t % block else [])], site)
        elif name == "delta":
            h = x + site.gate * mix([site.null_source, e, *outputs], site)
        elif method == "delta_block":
            h = x + site.gate * mix([site.null_source, e, *closed], site)
        elif method == "delta_block_released":
            readable = list(entries)
            if t % block == 0:
                entries.append(x - entries[-1] if entries else x)
            h = x + site.gate * mix([site.null_source, *readable], site)
        else:
            h = sum(w * s for w, s in zip(site.alpha.softmax(0), streams))
        o = sublayer(layer, h)
        outputs.append(o)
        x = x + o
        if name == "hyper_connections":
            streams = [sum(site.mixing[i, j] * streams[j] for j in range(4)) + site.beta[i] * o for i in range(4)]
    if name in ("attnres", "mhar"):
        x = mix([e, *outputs], decoder.final_site)
    elif name in ("attnres_block", "mhar_block"):
        x = mix([e, *(sum(outputs[b : b + block]) for b in range(0, 8, block))], decoder.final_site)
    elif name == "hyper_connections":
        x = sum(streams) / 4
    hidden = decoder.final_norm(x)
    expected = (hidden @ model.embedding.word_embeddings.weight.t()).transpose(0, 1)
    torch.testing.assert_close(logits_of(model, batch), expected, rtol=1e-5, atol=1e-6)


SITE = {"query": (64,), "norm_weight": (64,)}
DELTA_SITE = SITE | {"gate": (1,), "null_source": (64,)}
SHAPES = {
    "baseline": {},
    "attnres": SITE,
    "mhar": SITE,
    "attnres_block": SITE,
    "mhar_block": SITE,
    "delta": DELTA_SITE,
    "delta_block": DELTA_SITE,
    "delta_block_released": DELTA_SITE,
    "hyper_connections": {"alpha": (4,), "mixing": (4, 4), "beta": (4,)},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_depth_parameters_by_name(tmp_path, method, precision):
    """Names, shapes, dtypes and initial values of everything a method adds, and nothing but that."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = build(tmp_path, METHODS[method], training={"precision": precision})
    sites = [f"decoder.layers.{t}.site" for t in range(8)]
    sites += ["decoder.final_site"] if method in ("attnres", "mhar", "attnres_block", "mhar_block") else []
    expected = {f"{site}.{name}": shape for site in sites for name, shape in SHAPES[method].items()}
    found = {n: p for n, p in model.named_parameters() if "site." in n}
    assert {n: tuple(p.shape) for n, p in found.items()} == expected
    base = {n for n, _ in build(tmp_path, METHODS["baseline"]).named_parameters()}
    assert {n for n, _ in model.named_parameters()} - set(found) == base
    gate = METHODS[method].get("gate_init", 0.0)
    start = {"query": 0.0, "norm_weight": 1.0, "null_source": 0.0, "gate": gate}
    for name, parameter in found.items():
        assert parameter.dtype == dtype and parameter.requires_grad, name
        if (value := start.get(name.split(".")[-1])) is not None:
            assert torch.equal(parameter, torch.full_like(parameter, value)), name
    for name, parameter in found.items():
        if name.endswith("mixing") and precision == "fp32":
            assert 0.005 < (parameter.cpu() - torch.eye(4)).std() < 0.04, name


def test_hyper_connection_noise_differs_by_layer_and_seed(tmp_path):
    first = build(tmp_path, METHODS["hyper_connections"])
    again = build(tmp_path, METHODS["hyper_connections"])
    torch.manual_seed(5)
    other = build(tmp_path, METHODS["hyper_connections"])
    alphas = [m.decoder.layers[i].site.alpha for m, i in ((first, 0), (again, 0), (first, 1), (other, 0))]
    assert torch.equal(alphas[0], alphas[1])
    assert not torch.equal(alphas[0], alphas[2]) and not torch.equal(alphas[0], alphas[3])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layers", LAYERS)
def test_two_forwards_before_either_backward(tmp_path, method, layers):
    """Gradients do not depend on whether another micro-batch's forward lies between, nor on the order of backwards."""
    model = disturb(build(tmp_path, METHODS[method], layers=layers))
    first, second = tokens(1), tokens(2)

    def gradients():
        result = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        return result

    expected = []
    for batch in (first, second):
        loss_of(model, batch).backward()
        expected.append(gradients())
    losses = loss_of(model, first), loss_of(model, second)
    losses[0].backward()
    in_order = gradients()
    losses[1].backward()
    assert all(torch.equal(in_order[n], g) for n, g in expected[0].items())
    assert all(torch.equal(g, expected[1][n]) for n, g in gradients().items())
    losses = loss_of(model, first), loss_of(model, second)
    losses[1].backward()
    assert all(torch.equal(g, expected[1][n]) for n, g in gradients().items())


@pytest.mark.parametrize("method", METHODS)
def test_four_micro_batches_are_one_big_batch(tmp_path, method):
    model = disturb(build(tmp_path, METHODS[method]))
    ids, positions, labels = tokens(batch=8)
    loss_of(model, (ids, positions, labels)).backward()
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for part in range(4):
        rows = slice(2 * part, 2 * part + 2)
        (loss_of(model, (ids[rows], positions[rows], labels[rows])) / 4).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-4, atol=2e-7, msg=name)


@pytest.mark.parametrize("method", ["mhar", "mhar_block", "delta_block"])
@pytest.mark.parametrize(
    "frozen", [("query",), ("norm_weight",), ("query", "norm_weight"), ("layers",), ("embedding",)]
)
def test_frozen_parts_do_not_change_the_other_gradients(tmp_path, method, frozen):
    model = disturb(build(tmp_path, METHODS[method]))
    loss_of(model, tokens()).backward()
    free = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for name, parameter in model.named_parameters():
        site = "site." in name
        hit = name.split(".")[-1] in frozen if site else any(f in name.split(".") for f in frozen)
        parameter.requires_grad_(not hit)
    loss_of(model, tokens()).backward()
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    assert 0 < len(trainable) < len(free)
    for name, parameter in trainable:
        torch.testing.assert_close(parameter.grad, free[name], rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_forward_without_gradients_keeps_no_graph(tmp_path, method):
    model = build(tmp_path, METHODS[method]).eval()
    with torch.no_grad():
        assert loss_of(model, tokens()).grad_fn is None


@pytest.mark.parametrize("method", ["mhar", "mhar_block", "delta_block"])
def test_no_module_keeps_a_history(tmp_path, monkeypatch, method):
    from megatron_mhar.model import stack

    alive = []

    class Watched(stack.DepthHistory):
        @classmethod
        def after(cls, *args):
            history = super().after(*args)
            alive.append(weakref.ref(history))
            return history

    monkeypatch.setattr(stack, "DepthHistory", Watched)
    model = build(tmp_path, METHODS[method])
    loss = loss_of(model, tokens())
    gc.collect()
    assert alive and all(history() is None for history in alive)
    loss.backward()


RECOMPUTATIONS = {
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "full, three at a time": {"recompute": "full", "recompute_sublayers": 3},
    "full, the first five": {"recompute": "full", "recompute_method": "block", "recompute_sublayers": 5},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recompute", RECOMPUTATIONS)
@pytest.mark.parametrize("layers", LAYERS)
def test_recomputation_gives_the_same_gradients(tmp_path, method, recompute, layers):
    """Also with two micro-batches in flight, and with nothing below the first site to be trained."""
    results = []
    for training in ({}, RECOMPUTATIONS[recompute]):
        model = disturb(build(tmp_path, METHODS[method], training=training, layers=layers))
        losses = loss_of(model, tokens(1)), loss_of(model, tokens(2))
        losses[0].backward()
        losses[1].backward()
        model.embedding.requires_grad_(False)
        loss_of(model, tokens(3)).backward()
        results.append({n: p.grad for n, p in model.named_parameters()})
    for name, gradient in results[0].items():
        # Bits may differ where gradients meet in another order.
        torch.testing.assert_close(
            results[1][name], gradient, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def kept_bytes(model):
    """Bytes that a forward keeps for its backward, parameters not counted; shared storage counts once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, tokens())
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("method", ["mhar", "mhar_block", "delta_block"])
def test_memory_of_full_recomputation_is_linear_in_depth(tmp_path, method):
    """Each further sublayer keeps its output and little more: the sources are neither doubled nor kept twice."""
    sizes = {}
    for recompute in ("none", "full"):
        sizes[recompute] = [
            kept_bytes(build(tmp_path, METHODS[method] | ({"block_layers": 2} if "block" in method else {}),
                             model={"num_layers": depth}, training={"recompute": recompute}))
            for depth in (4, 8, 12)
        ]  # fmt: skip
    first, second = (b - a for a, b in zip(sizes["full"], sizes["full"][1:]))
    activation = 2 * 32 * 64 * 4  # bytes of one [s, b, d] tensor
    assert second == pytest.approx(first, rel=0.1)
    # Eight sublayers: an output each, for blocks and streams a running sum each, and a few statistics.
    assert 8 * activation <= second <= (8 if method == "mhar" else 17) * activation * 1.1
    assert second < 0.3 * (sizes["none"][2] - sizes["none"][1])


def test_llama3_rope_scaling_reaches_the_model(tmp_path):
    plain = build(tmp_path, METHODS["baseline"])
    scaled = build(tmp_path, METHODS["baseline"], model={"rope_scaling_factor": 8.0})
    low = scaled.rotary_pos_emb.inv_freq[-1] / plain.rotary_pos_emb.inv_freq[-1]
    assert scaled.rotary_pos_emb.inv_freq[0] == plain.rotary_pos_emb.inv_freq[0]
    wavelength = 2 * math.pi / plain.rotary_pos_emb.inv_freq[-1]
    assert low == (1 / 8 if wavelength > 8192 else 1)
    assert not torch.equal(logits_of(scaled, tokens()), logits_of(plain, tokens())) or wavelength < 2048


class TestSpecs:
    """What the library's users import."""

    def config(self, **changes):
        from megatron.core.transformer import TransformerConfig

        settings = dict(
            num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96, normalization="RMSNorm",
            gated_linear_unit=True, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
            is_hybrid_model=True, bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
            gradient_accumulation_fusion=False, apply_rope_fusion=False,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TransformerConfig(**settings | changes)

    def model(self, spec, pattern="*-*-", **changes):
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        return HybridModel(
            self.config(**changes), spec, vocab_size=128, max_sequence_length=32, hybrid_layer_pattern=pattern,
            position_embedding_type="rope",
        )  # fmt: skip

    def test_in_a_megatron_script_of_ones_own(self):
        from megatron_mhar import ResidualConfig, routed_stack_spec

        spec = routed_stack_spec(ResidualConfig(method="mhar", num_heads=8))
        loss = loss_of(self.model(spec), tokens())
        loss.backward()
        assert abs(loss.item() - math.log(128)) < 1.5

    def test_mixture_of_experts_is_routed_like_any_sublayer(self):
        from megatron_mhar import ResidualConfig, routed_stack_spec

        spec = routed_stack_spec(ResidualConfig(method="mhar", num_heads=4), num_experts=4)
        model = disturb(
            self.model(
                spec,
                "*E*-",
                num_moe_experts=4,
                moe_router_topk=2,
                moe_token_dispatcher_type="alltoall",
                moe_ffn_hidden_size=32,
            )  # fmt: skip
        )
        loss_of(model, tokens()).backward()
        assert "mlp.router.weight" in "".join(n for n, _ in model.decoder.layers[1].named_parameters())
        for layer in model.decoder.layers[1:]:
            assert layer.site.query.grad.abs().max() > 0
        assert model.decoder.layers[1].mlp.router.weight.grad.abs().max() > 0

    def test_the_users_own_submodules_stay_as_they_are(self):
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

        from megatron_mhar import ResidualConfig, routed_stack_spec
        from megatron_mhar.model.specs import _local_submodules
        from megatron_mhar.model.stack import sublayer_output

        own = _local_submodules(False, None)
        own.attention_layer.submodules.self_attn_bda = get_bias_dropout_add
        spec = routed_stack_spec(ResidualConfig(method="mhar"), layers=own)
        assert own.attention_layer.submodules.self_attn_bda is get_bias_dropout_add
        assert spec.submodules.attention_layer.submodules.self_attn_bda is sublayer_output
        assert spec.submodules.attention_layer.submodules.mlp_bda is own.attention_layer.submodules.mlp_bda

    def test_every_layer_family_of_megatron_cores_hybrid_spec_loses_its_residual_add(self):
        """Checked on the spec alone: building these layers needs Transformer Engine, Mamba and FLA."""
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        from megatron_mhar.model.specs import BIAS_DROPOUT_ADD_FIELDS, _without_residual_add
        from megatron_mhar.model.stack import sublayer_output

        routed = _without_residual_add(hybrid_stack_spec.submodules)
        families = ("mamba_layer", "gdn_layer", "attention_layer", "dsa_layer", "mla_layer", "mlp_layer", "moe_layer")
        for family in families:
            fields = [getattr(getattr(routed, family).submodules, f, None) for f in BIAS_DROPOUT_ADD_FIELDS]
            assert sublayer_output in fields and get_bias_dropout_add not in fields, family
        assert hybrid_stack_spec.submodules.mlp_layer.submodules.mlp_bda is get_bias_dropout_add

    def test_bias_and_dropout_stay_in_the_sublayer(self):
        from megatron_mhar.model.stack import sublayer_output

        x, bias = torch.ones(2, 3, 4), torch.full((4,), 0.5)
        residual = torch.full((2, 3, 4), 100.0)
        assert torch.equal(sublayer_output(True, False)((x, bias), residual, 0.0), x + 0.5)
        dropped = sublayer_output(True, False)((x, None), residual, 0.5)
        assert set(dropped.unique().tolist()) <= {0.0, 2.0} and (dropped == 0).any()
        assert torch.equal(sublayer_output(False, False)((x, None), residual, 0.5), x)

    @pytest.mark.parametrize(
        "changes,word",
        [
            (dict(mtp_num_layers=1), "multi-token prediction"),
            (dict(fp32_residual_connection=True), "fp32_residual_connection"),
            (dict(hidden_size=60, num_attention_heads=6), "num_heads"),
        ],
    )
    def test_what_is_not_supported_is_refused(self, changes, word):
        from megatron_mhar import ResidualConfig, routed_stack_spec

        with pytest.raises(ValueError, match=word):
            self.model(routed_stack_spec(ResidualConfig(method="mhar", num_heads=8)), **changes)

    @pytest.mark.parametrize(
        "pattern,changes,message",
        [
            (
                "*-*-",
                dict(num_layers=2),
                "num_layers is 2, but the pattern has 4 sublayers; num_layers counts sublayers",
            ),
            ("*-*-", dict(num_layers=6), "num_layers is 6, but the pattern has 4 sublayers"),
            ("*-*E", {}, "the pattern has 'E', for which the spec's layers have no module; experts need num_experts"),
            ("M-*-", {}, "the pattern has 'M', for which the spec's layers have no module"),
        ],
    )
    def test_a_pattern_that_does_not_fit_is_refused(self, pattern, changes, message):
        from megatron_mhar import ResidualConfig, routed_stack_spec

        with pytest.raises(ValueError, match=message):
            self.model(routed_stack_spec(ResidualConfig(method="mhar", num_heads=4)), pattern, **changes)

    def test_another_word_for_the_layers_is_refused(self):
        from megatron_mhar import ResidualConfig, routed_stack_spec

        with pytest.raises(ValueError, match="layers: 'te' given; allowed: 'local', 'transformer_engine', or sub"):
            routed_stack_spec(ResidualConfig(method="mhar", num_heads=4), layers="te")

    @pytest.mark.parametrize("method", ["baseline", "mhar", "mhar_block", "delta"])
    @pytest.mark.parametrize("site_norms", [False, True])
    def test_sites_compute_norms_where_no_stream_is_kept(self, monkeypatch, method, site_norms):
        """Then Transformer Engine's products come without one; its own spec stays as it is."""
        from megatron.core.extensions import transformer_engine as engine
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.transformer.identity_op import IdentityOp

        from megatron_mhar import ResidualConfig, routed_stack_spec
        from megatron_mhar.model.norm import RMSNorm, SiteNorm

        monkeypatch.setattr(engine, "HAVE_TE", True)
        residual = ResidualConfig(**METHODS[method])
        normed = site_norms and method in ("mhar", "mhar_block")

        def found(spec):
            attention, mlp = spec.submodules.attention_layer.submodules, spec.submodules.mlp_layer.submodules
            product = mlp.mlp.keywords["submodules"].linear_fc1
            return (
                attention.input_layernorm,
                attention.self_attention.submodules.linear_qkv,
                mlp.pre_mlp_layernorm,
                product,
            )

        own = (IdentityOp, engine.TELayerNormColumnParallelLinear, IdentityOp, engine.TELayerNormColumnParallelLinear)
        plain = (SiteNorm, engine.TEColumnParallelLinear, SiteNorm, engine.TEColumnParallelLinear)
        spec = routed_stack_spec(residual, layers="transformer_engine", site_norms=site_norms, qk_layernorm=True)
        assert found(spec) == (plain if normed else own) and found(hybrid_stack_spec) == own
        local = found(routed_stack_spec(residual, site_norms=site_norms))
        assert local[0] is local[2] is (SiteNorm if normed else RMSNorm)

    def test_a_norm_that_no_site_computes_is_refused(self):
        from megatron_mhar import ResidualConfig, routed_stack_spec

        own = routed_stack_spec(ResidualConfig(method="mhar")).submodules
        for method in ("baseline", "delta"):
            with pytest.raises(ValueError, match=f"sites of the method {method} compute no norms"):
                self.model(routed_stack_spec(ResidualConfig(method=method), layers=own))
        with pytest.raises(ValueError, match="recompute_modules has layernorm"):
            self.model(
                routed_stack_spec(ResidualConfig(method="mhar")),
                recompute_granularity="selective", recompute_modules=["layernorm"],
            )  # fmt: skip

    def test_a_config_for_another_norm_is_refused(self):
        """What was trained with a LayerNorm, or a weight around zero, would be another model without a word."""
        from megatron_mhar import ResidualConfig, routed_stack_spec

        for changes in ({"normalization": "LayerNorm"}, {"layernorm_zero_centered_gamma": True}):
            ((key, value),) = changes.items()
            for site_norms in (True, False):
                with pytest.raises(ValueError, match=f"{key}='?{value}'?.* given, but local layers, and sites that"):
                    self.model(routed_stack_spec(ResidualConfig(method="mhar"), site_norms=site_norms), **changes)

    @pytest.mark.parametrize("module", ["attn_norm", "mlp_norm"])
    def test_offloading_of_what_a_site_norms_is_refused(self, module):
        from types import SimpleNamespace

        from megatron_mhar import ResidualConfig, routed_stack_spec
        from megatron_mhar.model.stack import _site_norm

        decoder = self.model(routed_stack_spec(ResidualConfig(method="mhar"))).decoder
        config = SimpleNamespace(
            recompute_granularity=None, fine_grained_activation_offloading=True, offload_modules=["core_attn", module]
        )
        with pytest.raises(ValueError, match="offload_modules has attn_norm or mlp_norm, but norms are computed by si"):
            _site_norm(decoder.layers[0], "mhar", config)
        config.offload_modules.remove(module)
        assert _site_norm(decoder.layers[0], "mhar", config) is not None

    def test_transformer_engine_that_is_not_there_is_named(self):
        from megatron.core.extensions.transformer_engine import HAVE_TE

        from megatron_mhar import ResidualConfig, routed_stack_spec

        if HAVE_TE:
            assert routed_stack_spec(ResidualConfig(), layers="transformer_engine").submodules.attention_layer
        else:
            with pytest.raises(ImportError, match="Transformer Engine"):
                routed_stack_spec(ResidualConfig(), layers="transformer_engine")


@pytest.mark.parametrize("method", ["mhar", "delta"])
def test_layers_may_be_compiled(tmp_path, method, monkeypatch):
    """torch.compile around a sublayer, between fused reads: loss and gradients as without."""
    # In torch 2.11 a compilation that begins within a change of the random state waits for itself (pytorch#182948).
    monkeypatch.setattr(torch.cuda, "_initialization_lock", threading.RLock())
    model = disturb(build(tmp_path, METHODS[method] | {"backend": "triton"}, model={"num_layers": 1}))
    counts = torch._dynamo.utils.counters["stats"]
    found = []
    for compiled in (False, True):
        model.zero_grad()
        if compiled:
            counts.clear()
            for layer in model.decoder.layers:
                layer.forward = torch.compile(layer.forward, backend="inductor" if GPU else "aot_eager")
        with torch.compiler.set_stance("default"):  # without a GPU it is to compile nothing, see platform.py
            loss = loss_of(model, tokens())
            loss.backward()
        found.append((loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert counts["unique_graphs"] >= 2
    for one, other in zip(*(results[1].values() for results in found), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not GPU and shutil.which("g++") is None, reason="torch's inductor needs a compiler")
def test_a_compiled_sublayer_may_end_in_a_view():
    """As Transformer Engine's do, of which megatron-core's layers make tensors that are none."""
    from megatron.core.utils import make_viewless_tensor

    from megatron_mhar.model.stack import sublayer_output

    weight = torch.randn(64, 64, device="cuda" if GPU else "cpu", requires_grad=True)

    @torch.compiler.disable
    def product(x):
        return (x.flatten(0, 1) @ weight).unflatten(0, x.shape[:2])

    def sublayer(x):
        out = sublayer_output(True, False)((product(x), None), x, 0.0)
        return make_viewless_tensor(inp=out, requires_grad=out.requires_grad, keep_graph=True)

    x = torch.randn(8, 2, 64, device="cuda" if GPU else "cpu", requires_grad=True)
    with torch.compiler.set_stance("default"):
        out = torch.compile(sublayer, backend="inductor")(x)
        assert torch.equal(out, product(x))
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * (x @ weight) @ weight.T, rtol=1e-4, atol=1e-3)


def test_recorded_routing_is_the_mean_over_tokens(tmp_path):
    from megatron_mhar.model.observe import record_routing
    from megatron_mhar.routing import depth_weights

    model = disturb(build(tmp_path, METHODS["mhar_block"])).eval()
    seen = []
    with torch.no_grad(), record_routing([model]) as recorder:
        original = copy.copy(recorder)

        def spy(site, sources, query, norm_weight):
            seen.append(depth_weights(sources, query, norm_weight, num_heads=4).mean((1, 2)).cpu())
            original(site, sources, query, norm_weight)

        model.decoder.observer = spy
        logits_of(model, tokens(1))
        logits_of(model, tokens(2))
    result = recorder.result()
    assert model.decoder.observer is None
    assert result.weights.shape == (9, 4, 4)
    assert result.source_names == ("embedding", "open block", "block 0", "block 1")
    assert result.site_names[0] == "0 attention" and result.site_names[-1] == "final"
    assert result.weights.sum(-1) == pytest.approx(1.0, abs=1e-6)
    expected = (seen[5] + seen[14]) / 2  # site 5 reads the embedding, block 0 and the open block
    got = torch.tensor(result.weights[5])[:, [0, 2, 1]].t()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert result.reads[5].tolist() == [True, True, True, False]


def run_with(tmp_path, method, backend, **training):
    """Losses and gradients of two micro-batches in flight, of 18 sublayers: more than a group of fused reads."""
    residual = METHODS[method] | {"backend": backend}
    shape = {"num_layers": 9, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16}
    residual |= {"allow_partial_block": True} if "block_layers" in residual else {}
    model = disturb(build(tmp_path, residual, model=shape, training={"sequence_length": 2, **training}, layers="local"))
    ids = [torch.randint(0, 128, (1, 2), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    device, positions = next(model.parameters()).device, torch.arange(2).view(1, 2)
    losses = [loss_of(model, [x.to(device) for x in (i, positions, i.roll(1))]) for i in ids]
    for loss in losses:
        loss.backward()
    return torch.stack(losses).detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("method", ["mhar", "mhar_block", "delta", "delta_block", "delta_block_released"])
def test_fused_reads_give_the_same_training(tmp_path, method):
    """Compiled where there is a GPU, else in Triton's interpreter; with recomputation where its pieces are many."""
    expected = run_with(tmp_path, method, "torch")
    for training in ({}, {"recompute": "full", "recompute_sublayers": 3}):
        losses, grads = run_with(tmp_path, method, "triton", **training)
        torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-5)
        for name, grad in expected[1].items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
