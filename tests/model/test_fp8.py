"""FP8 of Transformer Engine's layers: what is refused, which sublayers are in it and when, what stays out of it."""

from __future__ import annotations

import io
import os
import pickle
import sys
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from megatron_mhar.errors import UserError
from tests.conftest import METHODS, tiny_run
from tests.model.test_stack import build, disturb, loss_of, tokens, transformer_engine_runs

FP8 = {"precision": "fp8"}


def run_config(tmp_path, training=None, **sections):
    return tiny_run("unused", tmp_path, training=FP8 | (training or {}), **sections)


REFUSED = {
    "hidden size": ({"model": {"hidden_size": 72, "num_attention_heads": 4, "num_query_groups": 4}}, {},
                    "model.hidden_size is 72; recipe tensorwise needs multiples of 16"),
    "inner width of a rank": ({"model": {"ffn_hidden_size": 112}, "parallel": {"tensor": 2}}, {},
                              "model.ffn_hidden_size / parallel.tensor is 56;"),
    "tokens": ({}, {"sequence_length": 12}, "the number of a rank's tokens in a micro-batch is 24;"),
    "tokens of mxfp8": ({}, {"sequence_length": 24, "micro_batch_size": 2, "fp8": {"recipe": "mxfp8"}},
                        "the number of a rank's tokens in a micro-batch is 48; recipe mxfp8 needs multiples of 32"),
    "heads": ({"model": {"head_dim": 8, "num_query_groups": 1}}, {},
              "the width of a rank's query, key and value heads is 48; recipe mxfp8"),
    "recurrence": ({"model": {"pattern": "M-*-*-*-"}}, {}, "fp8 given, but Mamba sublayers have none"),
    "too many bf16 ends": ({}, {"fp8": {"bf16_sublayers": 9}}, "9 given, but it must not exceed the 8 sublayers"),
    "bf16 ends of delayed": ({}, {"fp8": {"recipe": "delayed", "bf16_sublayers": 1}}, "scales all sublayers together"),
    "history of another recipe": ({}, {"fp8": {"amax_history": 16}}, "it exists for recipe: delayed"),
    "no fp8": ({}, {"precision": "bf16", "fp8": {"recipe": "delayed"}}, "it exists for precision: fp8"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_built(tmp_path, case):
    sections, training, message = REFUSED[case]
    if case == "heads":
        training = {"fp8": {"recipe": "mxfp8"}}
    with pytest.raises(ValidationError) as error:
        run_config(tmp_path, training, **sections)
    assert message in str(error.value)


def test_every_recipe_of_the_configs_fits():
    """What the repository's recipes are, in all FP8 recipes: 1B has widths of 1280 and 5120."""
    from pathlib import Path

    from megatron_mhar.config.load import load_config

    for scale in ("100m", "350m", "1b"):
        path = Path(__file__).parents[2] / f"configs/{scale}/mhar.yaml"
        for recipe in ("tensorwise", "delayed", "mxfp8", "blockwise"):
            overrides = ["training.precision=fp8", f"training.fp8.recipe={recipe}", "data.train=[x]", "data.valid=[x]"]
            assert load_config(path, overrides).training.fp8.recipe == recipe


@pytest.fixture
def engine(monkeypatch):
    """Transformer Engine's answers of a machine with one, by the name of the question."""
    from megatron_mhar import platform
    from megatron_mhar.model import build as module

    answers = {"is_fp8_available": (True, ""), "is_fp8_block_scaling_available": (True, ""),
               "is_mxfp8_available": (False, "Device compute capability 10.0 or higher required.")}  # fmt: skip
    stand_in = ModuleType("transformer_engine.pytorch.fp8")
    stand_in.FP8GlobalStateManager = SimpleNamespace(**{name: lambda name=name: answers[name] for name in answers})
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(module, "HAVE_TE", True)
    monkeypatch.setattr(platform, "HAS_GPU", True)
    return answers


def test_layers_and_card_must_have_it(tmp_path, monkeypatch, engine):
    from megatron_mhar.model import build as module

    assert module.check_layers(run_config(tmp_path)) == "transformer_engine"
    with pytest.raises(UserError) as error:
        module.check_layers(run_config(tmp_path, {"fp8": {"recipe": "mxfp8"}}))
    assert str(error.value) == (
        "training.fp8.recipe: mxfp8 given, but it does not run on this GPU (Device compute capability 10.0 or higher "
        "required); allowed here: tensorwise, delayed, blockwise"
    )
    engine["is_fp8_available"] = engine["is_fp8_block_scaling_available"] = (False, "8.9 or higher.")
    with pytest.raises(UserError, match=r"tensorwise given.*\(8.9 or higher\).*none, training.precision: bf16"):
        module.check_layers(run_config(tmp_path))
    with pytest.raises(UserError, match=r"training.precision: fp8 given, but it needs Transformer Engine's layers"):
        module.check_layers(run_config(tmp_path, model={"layers": "local"}))
    monkeypatch.setattr(module, "HAVE_TE", False)
    with pytest.raises(UserError, match=r"fp8 given.*local \(model.layers: auto, a GPU, .* not installed\)"):
        module.check_layers(run_config(tmp_path))


@pytest.mark.usefixtures("one_rank")
def test_megatrons_settings(tmp_path):
    from megatron_mhar.model.build import transformer_config

    made = transformer_config(run_config(tmp_path, {"fp8": {"recipe": "delayed", "amax_history": 16}}))
    assert (made.fp8, made.fp8_recipe, made.fp8_amax_history_len, made.fp8_amax_compute_algo, made.fp8_param) == (
        "hybrid", "delayed", 16, "max", False,
    )  # fmt: skip
    assert made.bf16 and made.params_dtype == torch.bfloat16 and not made.first_last_layers_bf16
    made = transformer_config(run_config(tmp_path, {"fp8": {"format": "e4m3", "bf16_sublayers": 2}}))
    assert (made.fp8, made.fp8_recipe, made.first_last_layers_bf16) == ("e4m3", "tensorwise", True)
    for recipe, format in (("tensorwise", "hybrid"), ("blockwise", "e4m3"), ("mxfp8", "e4m3")):
        assert transformer_config(run_config(tmp_path, {"fp8": {"recipe": recipe}})).fp8 == format
    assert made.num_layers_at_start_in_bf16 == made.num_layers_at_end_in_bf16 == 2
    assert transformer_config(tiny_run("unused", tmp_path)).fp8 is None


@pytest.fixture
def contexts(monkeypatch):
    """What is entered and left while a stack runs, in order, with stand-ins for Transformer Engine's contexts."""
    from megatron.core.tensor_parallel.random import checkpoint

    from megatron_mhar.model import stack

    seen: list[str] = []

    @contextmanager
    def fp8_context(config, layer=-1):
        seen.append(f"+{layer}")
        yield
        seen.append(f"-{layer}")

    def te_checkpoint(run, distribute, tracker, group, *inputs):
        seen.append("checkpoint")
        return checkpoint(run, distribute, *inputs)

    monkeypatch.setattr(stack, "get_fp8_context", fp8_context)
    monkeypatch.setattr(stack, "te_checkpoint", te_checkpoint)
    return seen


@pytest.mark.usefixtures("one_rank")
def test_contexts_of_each_recipe(tmp_path, contexts):
    """One around the pass for delayed, one a sublayer for the others, the same when it is run again; none to evaluate.

    The gradients of the recomputed pass are those of the plain one (on a GPU, through chains of fused reads).
    """
    each = [f"{sign}{layer}" for layer in range(8) for sign in "+-"]
    wants = {
        ("delayed", "none"): ["+-1", "--1"],
        ("tensorwise", "none"): each,
        ("delayed", "full"): ["+-1", *["checkpoint"] * 2, "--1"],
        ("tensorwise", "full"): ["checkpoint", *each[:8], "checkpoint", *each[8:], *each[8:], *each[:8]],
    }
    gradients = {}
    for (recipe, recompute), expected in wants.items():
        training = {"recompute": recompute} | ({"recompute_sublayers": 4} if recompute == "full" else {})
        model = disturb(build(tmp_path, METHODS["mhar"], training=training))
        model.config.fp8, model.config.fp8_recipe = "hybrid", recipe
        contexts.clear()
        loss_of(model, tokens()).backward()
        assert contexts == expected, (recipe, recompute)
        gradients[recipe, recompute] = {name: p.grad for name, p in model.named_parameters()}
        contexts.clear()
        with torch.no_grad():
            loss_of(model.eval(), tokens())
        assert contexts == []
    plain = gradients["delayed", "none"]
    for case, found in gradients.items():
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-7, msg=f"{case} {name}")


def test_an_evaluation_leaves_layers_as_they_were():
    from megatron_mhar.model.fp8 import without_fp8

    layer = torch.nn.Linear(2, 2)
    layer.fp8, layer.fp8_initialized, layer.fp8_meta = True, True, {"fp8_checkpoint": True, "scale": 3}
    fresh = torch.nn.Linear(2, 2)
    fresh.fp8, fresh.fp8_initialized, fresh.fp8_meta = False, False, {}
    with without_fp8(torch.nn.Sequential(layer, torch.nn.Sequential(fresh))):
        for each in (layer, fresh):  # what a forward without FP8 does
            each.fp8, each.fp8_initialized, each.fp8_meta["fp8_checkpoint"] = False, False, False
    assert (layer.fp8, layer.fp8_initialized, layer.fp8_meta) == (True, True, {"fp8_checkpoint": True, "scale": 3})
    assert (fresh.fp8, fresh.fp8_initialized) == (False, False)


def test_scales_are_lacking_where_no_layer_has_any():
    """One that never runs in FP8 has none either, and a part of a pipeline may have no layer of the kind."""
    from megatron_mhar.model.fp8 import lacks_scales

    linear, attention = torch.nn.Linear(2, 2), torch.nn.Identity()
    model = torch.nn.Sequential(linear, torch.nn.Sequential(attention))
    assert not lacks_scales(model)
    linear.fp8_meta, attention.fp8_meta = {"fp8_checkpoint": False}, {}
    assert lacks_scales(model)
    linear.fp8_meta["scaling_bwd"] = SimpleNamespace(scale=1)
    assert not lacks_scales(model)


class Command:
    """Runs something when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def as_engine_saves(state):
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def test_scales_are_unpickled_where_they_are_scales(tmp_path, monkeypatch):
    """Transformer Engine refuses to load those of delayed scaling unless it is told that it may."""
    from megatron_mhar.model.fp8 import check_scales, checked_scales

    variable = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
    scales = {"scale_fwd": torch.ones(3), "extra_fp8_variables": {"num_gemms": 1, "name": "fc1"}}
    empty = torch.empty(0, dtype=torch.uint8)
    weights = {"fc1._extra_state": as_engine_saves(scales), "fc2._extra_state": empty, "fc1.weight": torch.ones(2)}
    weights["norm._extra_state"] = None
    check_scales(weights)
    buffer = io.BytesIO(pickle.dumps(Command(tmp_path / "buffer")))  # Transformer Engine would load it as well
    for value, kind in ((buffer, "BytesIO"), (b"", "bytes"), ({}, "dict"), (torch.ones(2), "torch.float32")):
        with pytest.raises(ValueError, match=f"fc3._extra_state is not FP8 scales: {kind} given"):
            check_scales(weights | {"fc3._extra_state": value})
    hidden = io.BytesIO()
    torch.save({"scale": Command(tmp_path / "saved")}, hidden)

    class Hidden:
        """Within what a tensor is made of."""

        def __reduce__(self):
            return torch.storage._load_from_bytes, (hidden.getvalue(),)

    for command in (Command(tmp_path / "pickled"), Hidden()):
        bad = weights | {"fc3._extra_state0": as_engine_saves(scales | {"scale_bwd": command})}
        with pytest.raises(ValueError, match="fc3._extra_state0 is not FP8 scales"):
            check_scales(bad)
    assert not list(tmp_path.iterdir())
    for before in (None, "0"):
        monkeypatch.setenv(variable, before) if before else monkeypatch.delenv(variable, raising=False)
        with pytest.raises(KeyError), checked_scales():
            assert os.environ[variable] == "1"
            raise KeyError
        assert os.environ.get(variable) == before


def stays_out_of_fp8(model):
    """Depth parameters are plain bf16 and trainable; a site reads and gives bf16."""
    seen = []

    def note(name, module, inputs, output):
        if inputs:  # a call without them is for hooks alone
            seen.append((name, output.dtype, {t.dtype for t in inputs[0]._sources.values()}))

    for name, module in model.named_modules():
        if name.endswith("site"):
            module.register_forward_hook(partial(note, name))
    loss_of(model, tokens()).backward()
    assert len(seen) == 9 and all(dtypes <= {torch.bfloat16} for _, _, dtypes in seen)
    assert all(dtype == torch.bfloat16 for _, dtype, _ in seen)
    parameters = {name: p for name, p in model.named_parameters() if "site." in name}
    assert len(parameters) == 18
    for name, parameter in parameters.items():
        assert type(parameter) is torch.nn.Parameter and parameter.dtype == torch.bfloat16, name
        assert parameter.requires_grad and parameter.grad is not None, name
        # A read of one source has nothing to choose.
        assert parameter.grad.float().norm() > 0 or ".layers.0." in name, name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("layers", ["local", "transformer_engine"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_depth_stays_out_of_fp8(tmp_path, layers, recipe):
    """With megatron-core's config of each recipe; Transformer Engine's layers really compute in FP8."""
    if layers == "transformer_engine":
        if not transformer_engine_runs():
            pytest.skip("needs a GPU and Transformer Engine")
        from megatron_mhar.model.fp8 import recipes_here

        if recipes_here()[recipe]:
            pytest.skip(recipes_here()[recipe])
    model = disturb(build(tmp_path, METHODS["mhar"], layers=layers, training=FP8 | {"fp8": {"recipe": recipe}}))
    assert model.config.fp8_recipe == recipe
    stays_out_of_fp8(model)
    if layers == "transformer_engine":
        engine = [module for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation")]
        assert len(engine) == 16 and all(module.fp8 and module.fp8_initialized for module in engine)


@pytest.mark.skipif(not transformer_engine_runs(), reason="needs a GPU and Transformer Engine")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_recomputation_in_fp8_gives_the_same_gradients(tmp_path, recipe):
    """To the bit for scales of the tensor at hand; delayed scales are what they were before the forward."""
    found = []
    for recompute in ("none", "full"):
        training = FP8 | {"fp8": {"recipe": recipe}, "recompute": recompute}
        model = disturb(build(tmp_path, METHODS["mhar"], layers="transformer_engine", training=training))
        loss_of(model, tokens()).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=2e-2, atol=2e-4, msg=name)
