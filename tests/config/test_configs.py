"""The shipped config files hold the papers' numbers (written here by hand) and differ only where they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mhar.config.load import flatten, load_config
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = (
    "baseline", "attnres", "mhar", "attnres_block", "mhar_block", "delta", "delta_block", "hyper_connections",
)  # fmt: skip

#         layers width heads kv  ffn   sequence batch block
SCALES = {
    "100m": (12, 512, 8, 4, 1536, 2048, 64, 2),
    "350m": (24, 1024, 16, 8, 4096, 1024, 32, 3),
    "1b": (36, 1280, 16, 8, 5120, 1024, 32, 4),
}
# method: (heads, blocks of layers, initial gate, null source)
RESIDUAL = {
    "baseline": (1, False, 0.0, False),
    "attnres": (1, False, 0.0, False),
    "mhar": (8, False, 0.0, False),
    "attnres_block": (1, True, 0.0, False),
    "mhar_block": (8, True, 0.0, False),
    "delta": (8, False, 1.0, True),
    "delta_block": (8, True, 1.0, True),
    "hyper_connections": (1, False, 0.0, False),
}


def load(name: str) -> RunConfig:
    return load_config(CONFIGS / name)


def test_every_file_is_known() -> None:
    runs = {f"{scale}/{method}" for scale in SCALES for method in METHODS}
    runs |= {"8b/plain", "8b/delta_block", "demo/baseline", "demo/mhar"}
    recipes = {f"{folder}/recipe" for folder in (*SCALES, "8b", "demo")}
    found = {str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.*")}
    assert found == runs | recipes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", SCALES)
def test_from_scratch(scale: str, method: str) -> None:
    config = load(f"{scale}/{method}.yaml")
    layers, width, heads, groups, ffn, sequence, batch, block = SCALES[scale]
    assert config.name == f"{scale}-{method}"
    model, optimizer, training, residual = config.model, config.optimizer, config.training, config.residual
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (layers, width, heads)
    assert (model.num_query_groups, model.ffn_hidden_size, model.vocab_size) == (groups, ffn, 151_936)
    assert (training.sequence_length, training.global_batch_size) == (sequence, batch)
    assert model.tie_embeddings and model.qk_layernorm
    assert (model.norm_eps, model.init_std, model.rotary_base, model.rope_scaling_factor) == (1e-6, 0.02, 10_000, None)
    assert (optimizer.lr, optimizer.min_lr, optimizer.schedule) == (5e-4, 5e-5, "cosine")
    assert (optimizer.warmup_steps, training.steps, optimizer.decay_steps) == (1000, 20_000, None)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.clip_grad) == (0.9, 0.95, 1e-8, 1.0)
    assert (optimizer.weight_decay, optimizer.no_weight_decay) == (0.1, ())
    assert (optimizer.ema_decay, optimizer.z_loss) == (None, 0.0)
    assert (training.precision, training.seed, training.recompute) == ("bf16", 42, "none")
    assert (config.evaluation.interval, config.evaluation.tail) == (500, 11)
    assert config.data.end_of_document == 151_645
    assert not config.data.document_masks

    num_heads, blocks, gate, null = RESIDUAL[method]
    assert residual.method == method
    assert residual.num_heads == num_heads
    assert residual.block_layers == (block if blocks else None)
    assert (residual.initial_gate, residual.has_null_source, residual.num_streams) == (gate, null, 4)
    assert residual.block_form == "paper"


@pytest.mark.parametrize(("scale", "blocks"), [("100m", 6), ("350m", 8), ("1b", 9)])
def test_number_of_blocks(scale: str, blocks: int) -> None:
    config = load(f"{scale}/mhar_block.yaml")
    assert config.residual.block_layers is not None
    assert config.model.num_layers / config.residual.block_layers == blocks


@pytest.mark.parametrize("name", ["plain", "delta_block"])
def test_mid_training(name: str) -> None:
    config = load(f"8b/{name}.yaml")
    model, optimizer, training = config.model, config.optimizer, config.training
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.kv_channels) == (32, 4096, 32, 128)
    assert (model.num_query_groups, model.ffn_hidden_size, model.vocab_size) == (8, 14_336, 128_256)
    assert (model.tie_embeddings, model.qk_layernorm) == (False, False)
    assert (model.rotary_base, model.rope_scaling_factor) == (500_000, 8)
    assert (training.steps, training.global_batch_size, training.sequence_length) == (9500, 256, 4096)
    assert (optimizer.lr, optimizer.min_lr) == (4e-4, 4e-6)
    assert 0 < optimizer.warmup_steps <= 500
    assert (optimizer.weight_decay, set(optimizer.no_weight_decay)) == (0.05, {"embedding", "norm", "bias", "depth"})
    assert (optimizer.ema_decay, optimizer.z_loss) == (0.999, 1e-4)
    assert (training.precision, training.recompute) == ("bf16", "selective")
    residual = config.residual
    if name == "plain":
        assert residual.method == "baseline"
    else:
        assert (residual.method, residual.num_heads, residual.block_layers) == ("delta_block", 8, 4)
        assert (residual.initial_gate, residual.has_null_source, residual.block_form) == (0.0, True, "paper")


@pytest.mark.parametrize(
    ("first", "second"),
    [("8b/plain", "8b/delta_block"), ("demo/baseline", "demo/mhar"), ("1b/baseline", "1b/delta")],
)
def test_compared_runs_share_all_but_the_method(first: str, second: str) -> None:
    one, two = flatten(load(f"{first}.yaml")), flatten(load(f"{second}.yaml"))
    different = {key for key in one if one[key] != two[key]}
    assert "residual.method" in different
    assert all(key == "name" or key.startswith("residual.") for key in different)


def test_demo() -> None:
    config = load("demo/mhar.yaml")
    assert (config.name, load("demo/baseline.yaml").name) == ("demo-mhar", "demo-baseline")
    assert (config.residual.method, config.residual.num_heads) == ("mhar", 6)
    assert (config.training.precision, config.model.vocab_size, config.model.tie_embeddings) == ("fp32", 4096, True)
    assert config.data.train == ("data/demo/train",)
    assert config.data.valid == ("data/demo/valid",)


@pytest.mark.parametrize("scale", [*SCALES, "8b", "demo"])
def test_a_recipe_alone_is_no_run(scale: str) -> None:
    with pytest.raises(UserError, match="name: missing"):
        load(f"{scale}/recipe.yaml")
