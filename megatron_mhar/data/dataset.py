"""Packed token sequences from Megatron .bin/.idx files: checks of the files, megatron-core's datasets, and a loader.

A sample is ``sequence_length`` consecutive tokens of the shuffled documents, joined without padding. Step k of a run
reads samples ``k * global_batch_size`` onwards, whatever the number of ranks: a run goes on with the same data under
another layout, and the resume state is the number of samples consumed.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_mhar.config.schema import RunConfig
from megatron_mhar.data.demo import MANIFEST, CorpusManifest, load_manifest
from megatron_mhar.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1


@dataclass(frozen=True)
class TokenFile:
    """What the index of one .bin/.idx pair says."""

    prefix: str
    documents: int
    tokens: int


def check_token_file(prefix: str, *, sequence_length: int) -> TokenFile:
    """Check that ``prefix``.bin and .idx are there, whole and long enough for one sample.

    Raises:
        UserError: names the file and what is wrong with it.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise UserError(
                f"{path}: no such file. Data files are named without their ending (.bin and .idx); "
                "`mhar data demo` builds a small set"
            )
    try:
        size = index.stat().st_size
        with index.open("rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise UserError(f"{index}: {size} bytes, too short for a Megatron index; build it again")
            magic, version, code, sequences, documents = _HEADER.unpack(header)
            if magic != _MAGIC or version != 1:
                raise UserError(f"{index}: not a Megatron index (it begins with {header[:9]!r}); build it again")
            expected = _HEADER.size + sequences * (4 + 8) + documents * 8
            if size < expected:
                raise UserError(f"{index}: {size} bytes, but {sequences} sequences need {expected}; it was cut off")
            lengths = np.fromfile(file, np.int32, sequences)
        item = DType.size(code)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{index}: cannot be read as a Megatron index ({error})") from error
    tokens = int(lengths.sum(dtype=np.int64))
    if data.stat().st_size != tokens * item:
        raise UserError(f"{data}: {data.stat().st_size} bytes, but {index.name} counts {tokens} tokens of {item} bytes")
    if tokens <= sequence_length:
        raise UserError(f"{data}: {tokens} tokens, too few for one sample of sequence_length {sequence_length} + 1")
    return TokenFile(prefix, documents - 1, tokens)


def check_data(config: RunConfig) -> None:
    """Check every data file of a run before anything is built, and the manifest of a corpus that has one.

    Raises:
        UserError: see :func:`check_token_file`; also a vocabulary or end of document that is not the corpus's.
    """
    for prefix in (*config.data.train, *config.data.valid):
        check_token_file(prefix, sequence_length=config.training.sequence_length)
    for manifest in _manifests(config).values():
        manifest.check(vocab_size=config.model.vocab_size, end_of_document=config.data.end_of_document)


def data_identity(config: RunConfig) -> dict[str, str]:
    """SHA-256 of each .bin file of a run, where its corpus has a manifest."""
    return {prefix: m.sha256[Path(prefix).name + ".bin"] for prefix, m in _manifests(config).items()}


def _manifests(config: RunConfig) -> dict[str, CorpusManifest]:
    prefixes = (*config.data.train, *config.data.valid)
    return {p: load_manifest(Path(p).parent) for p in prefixes if (Path(p).parent / MANIFEST).is_file()}


@dataclass(frozen=True)
class _PackedTokens:
    """The three things megatron-core's dataset asks of a tokenizer: data files hold token ids already."""

    eod: int
    vocab_size: int
    pad: int = -1  # packed sequences hold no padding, and no id may be taken for it

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What the names of cached indices depend on."""
        return OrderedDict(tokenizer="packed", eod=str(self.eod), vocab_size=str(self.vocab_size))


def build_datasets(config: RunConfig, cache: Path) -> tuple[Dataset, Dataset | None]:
    """Training and validation samples (None without validation files).

    Args:
        cache: folder for the shuffled sample indices, the same for all ranks.
    """
    training, data = config.training, config.data
    train = (list(data.train), None if data.train_weights is None else list(data.train_weights))
    valid = (list(data.valid), None) if data.valid else None
    settings = GPTDatasetConfig(
        random_seed=training.seed,
        sequence_length=training.sequence_length,
        blend_per_split=[train, valid, None],
        path_to_cache=str(cache),
        tokenizer=_PackedTokens(data.end_of_document, config.model.vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # causal, and the attention layers know it
    )
    sizes = (
        training.steps * training.global_batch_size,
        config.evaluation.batches * training.global_batch_size if valid else 0,
        0,
    )
    train_set, valid_set, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()
    return train_set, valid_set


class _RankBatches:
    """Sample numbers of each micro-batch of one data-parallel rank, in order."""

    def __init__(self, start: int, stop: int, micro_batch_size: int, rank: int, ranks: int) -> None:
        self.start, self.stop, self.size, self.rank, self.ranks = start, stop, micro_batch_size, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.size * self.ranks
        for first in range(self.start + self.rank * self.size, self.stop, stride):
            yield list(range(first, first + self.size))

    def __len__(self) -> int:
        return (self.stop - self.start) // (self.size * self.ranks)


def micro_batches(
    dataset: Dataset,
    *,
    start: int,
    stop: int,
    micro_batch_size: int,
    rank: int,
    ranks: int,
    device: torch.device,
    num_workers: int,
    vocab_size: int,
) -> Iterator[dict[str, Tensor]]:
    """Micro-batches of samples ``start`` to ``stop`` that fall to data-parallel rank ``rank`` of ``ranks``.

    Yields:
        "tokens", "labels", "position_ids" `[micro_batch_size, sequence_length]`, int64, on ``device``.

    Raises:
        UserError: a token id is outside the vocabulary.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=_RankBatches(start, stop, micro_batch_size, rank, ranks),
        num_workers=min(num_workers, os.cpu_count() or 1),
        pin_memory=device.type == "cuda",
    )
    for batch in loader:
        # On the CPU still: out of range on a GPU is an assertion far from its cause.
        if (largest := int(torch.maximum(batch["tokens"].max(), batch["labels"].max()))) >= vocab_size:
            raise UserError(
                f"data: token id {largest} found, but model.vocab_size is {vocab_size}: "
                "the files were made with another tokenizer"
            )
        yield {key: batch[key].to(device, non_blocking=True) for key in ("tokens", "labels", "position_ids")}
