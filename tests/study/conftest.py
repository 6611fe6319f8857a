"""Run folders as the trainer writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_mhar.config.load import dump_config
from megatron_mhar.config.schema import RunConfig

STEPS = 100


def full_attention_residuals(layers: int, heads: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Routing of method mhar: site t reads the embedding and the outputs before it; weights vary over heads."""
    rng = np.random.default_rng(seed)
    sites = sources = 2 * layers + 1
    reads = np.tri(sites, sources, dtype=bool)
    age = np.arange(sites)[:, None] - np.arange(sources)[None, :]
    logits = rng.normal(0, 0.8, (sites, heads, sources)) - age[:, None, :] * rng.uniform(0, 0.25, (1, heads, 1))
    logits[:, :, 0] += rng.uniform(0, 2.5, heads)
    weights = np.exp(logits) * reads[:, None, :]
    weights /= weights.sum(-1, keepdims=True)
    kinds = ("attention", "MLP")
    return {
        "weights": weights.astype(np.float32),
        "reads": reads,
        "site_names": np.array([f"{t} {kinds[t % 2]}" for t in range(sites - 1)] + ["final"]),
        "source_names": np.array(["embedding", *(f"output {t}" for t in range(sources - 1))]),
    }


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write the folder of a run and return it."""

    def make(
        folder: str,
        *,
        name: str | None = None,
        method: str = "baseline",
        num_heads: int = 1,
        loss: float = 3.0,
        tokens_per_second: float = 1000.0,
        layers: int = 4,
        routing: dict[str, np.ndarray] | None = None,
        without: Sequence[str] = (),
        summary: dict[str, object] | None = None,
        **sections: dict[str, object],
    ) -> Path:
        values: dict[str, dict[str, object]] = {
            "model": {
                "num_layers": layers, "hidden_size": 48, "num_attention_heads": 6, "num_query_groups": 3,
                "ffn_hidden_size": 96, "vocab_size": 512,
            },
            "data": {"train": ["data/demo/train"], "valid": ["data/demo/valid"], "end_of_document": 0},
            "optimizer": {"lr": 1e-3},
            "training": {
                "steps": STEPS, "global_batch_size": 4, "micro_batch_size": 4, "sequence_length": 32,
                "precision": "fp32",
            },
            "residual": {"method": method, "num_heads": num_heads},
        }  # fmt: skip
        for section, changes in sections.items():
            values.setdefault(section, {}).update(changes)
        config = RunConfig.model_validate({"name": name or folder, "output_dir": str(tmp_path), **values})

        directory = tmp_path / folder
        directory.mkdir()
        (directory / "config.yaml").write_text(dump_config(config))
        rng = np.random.default_rng(1)
        with (directory / "metrics.jsonl").open("w") as journal:
            for step in range(5, config.training.steps + 1, 5):
                metrics = {
                    "train/loss": loss + 5 * np.exp(-step / 20) + rng.normal(0, 0.03),
                    "train/tokens_per_second": tokens_per_second,
                }
                if step % 20 == 0:
                    metrics["valid/loss"] = loss + 5 * np.exp(-step / 20)
                journal.write(json.dumps({"step": step, "time_ms": 0, "metrics": metrics}) + "\n")
        (directory / "summary.json").write_text(
            json.dumps(
                {
                    "name": config.name, "method": method, "num_heads": num_heads, "parameters": 1_234_567,
                    "steps": config.training.steps, "valid_loss": loss, "valid_loss_last": loss,
                    "tokens_per_second": tokens_per_second, "peak_memory_bytes": 3 * 2**29, "device": "cpu",
                    "routing_backend": "torch", **(summary or {}),
                }
            )
        )  # fmt: skip
        if routing is not None:
            np.savez(directory / "routing.npz", **routing)
        for file in without:
            (directory / file).unlink()
        return directory

    return make
