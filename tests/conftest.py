"""Shared fixtures: one rank of megatron-core, a tiny corpus, and run configs of tiny models."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import numpy as np

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, kernels run in Triton's interpreter. It is read when they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

METHODS = {  # one setting of every method, with its features on
    "baseline": {"method": "baseline"},
    "attnres": {"method": "attnres"},
    "mhar": {"method": "mhar", "num_heads": 4},
    "attnres_block": {"method": "attnres_block", "block_layers": 1},
    "mhar_block": {"method": "mhar_block", "num_heads": 4, "block_layers": 2},
    "delta": {"method": "delta", "num_heads": 4, "gate_init": 1.0},
    "delta_block": {"method": "delta_block", "num_heads": 4, "block_layers": 1},
    "delta_block_released": {"method": "delta_block", "block_layers": 1, "block_form": "released"},
    "hyper_connections": {"method": "hyper_connections"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """--tier all: every method under every parallel layout (make test-all)."""
    parser.addoption("--tier", choices=("fast", "all"), default="fast", help="which parallel layouts are run")


def tiny_run(corpus: Path | str, output_dir: Path, **sections):
    """Config of a four-layer model of width 64; ``sections`` are merged over it, section by section."""
    from megatron_mhar.config.schema import RunConfig

    values = {
        "name": "run",
        "output_dir": output_dir,
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 96,
            "vocab_size": 128,
        },
        "data": {"train": [f"{corpus}/train"], "valid": [f"{corpus}/valid"], "end_of_document": 0, "num_workers": 0},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "training": {
            "steps": 8,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "sequence_length": 32,
            "precision": "fp32",
            "log_interval": 1,
        },
        "evaluation": {"interval": 4, "batches": 2},
        "checkpoint": {"interval": 100},
        "tracking": {"enabled": False},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return RunConfig.model_validate(values)


def write_corpus(folder: Path, *, vocab_size: int = 128, documents: tuple[tuple[str, int], ...]) -> None:
    """Token files of so many documents each: a learnable random walk over the vocabulary but id 0, which joins them."""
    import numpy as np

    random = np.random.default_rng(0)
    stride = vocab_size // 128  # a short walk comes to all parts of a large vocabulary
    for name, count in documents:
        lengths = (int(random.integers(40, 200)) for _ in range(count))
        walks = (np.cumsum(random.integers(0, 3, length)) * stride % (vocab_size - 1) + 1 for length in lengths)
        _write_documents(folder, name, walks, vocab_size)


def write_texts(folder: Path, *, vocab_size: int, documents: tuple[tuple[str, int], ...], length: int) -> None:
    """Like :func:`write_corpus`, with frequencies as in a language: a few tokens make up most of it (Zipf's law).

    Seven times in ten a token is one of four that may follow the one before, so that there is more to learn for long.
    """
    import numpy as np

    random = np.random.default_rng(0)
    share = np.cumsum(1 / (np.arange(1, vocab_size) + 2.7))  # Mandelbrot's form of the law

    def draw(*shape: int) -> np.ndarray:
        return np.searchsorted(share, random.random(shape) * share[-1]) + 1

    successors = draw(vocab_size, 4)
    for name, count in documents:
        texts = [draw(count)]
        while len(texts) < length:
            follows = successors[texts[-1], random.integers(0, 4, count)]
            texts.append(np.where(random.random(count) < 0.7, follows, draw(count)))
        _write_documents(folder, name, np.stack(texts, 1), vocab_size)


def _write_documents(folder: Path, name: str, documents: Iterable[np.ndarray], vocab_size: int) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_item(torch.tensor([*document, 0]))
        builder.end_document()
    builder.finalize(str(folder / f"{name}.idx"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Folder with train and valid token files, see :func:`write_corpus`."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, documents=(("train", 120), ("valid", 40)))
    return folder


@pytest.fixture(scope="session")
def groups():
    """Process groups of a single rank, once for the session: gloo keeps the threads of groups that were left."""
    import torch

    from megatron_mhar import platform

    platform.setup(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

        from megatron_mhar.train.distributed import shut_down

    torch.distributed.init_process_group(platform.BACKEND, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    shut_down()


@pytest.fixture
def one_rank(groups):
    """Process groups of a single rank; every test starts from the same seed."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
