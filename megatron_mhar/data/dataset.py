"""Packed token sequences from Megatron .bin/.idx files: checks of the files, megatron-core's datasets, and a loader.

A sample is ``sequence_length`` consecutive tokens of the shuffled documents, joined without padding. Step k of a run
reads samples ``k * global_batch_size`` onwards, whatever the number of ranks: a run goes on with the same data under
another layout, and the resume state is the number of samples consumed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_mhar.config.schema import RunConfig
from megatron_mhar.data.demo import MANIFEST, CorpusManifest, load_manifest
from megatron_mhar.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
_ENDS = 1 << 20  # bytes at each end of a .bin file that its digest covers


@dataclass(frozen=True)
class TokenFile:
    """What the index of one .bin/.idx pair says; ``digest`` is of the whole index and of both ends of the .bin file."""

    prefix: str
    documents: int
    tokens: int
    digest: str


def check_token_file(prefix: str, *, sequence_length: int) -> TokenFile:
    """Check that ``prefix``.bin and .idx are there, whole and long enough for one sample.

    Raises:
        UserError: names the file and what is wrong with it.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        for path in (index, data):
            if not path.is_file():
                raise UserError(
                    f"{path}: no such file. Data files are named without their ending (.bin and .idx); "
                    "`mhar data demo` builds those of configs/demo"
                )
        size, data_size = index.stat().st_size, data.stat().st_size
        with index.open("rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise UserError(f"{index}: {size} bytes, too short for a Megatron index; build it again")
            magic, version, code, sequences, documents = _HEADER.unpack(header)
            if magic != _MAGIC:
                raise UserError(f"{index}: not a Megatron index (it begins with {header[:9]!r}); build it again")
            if version != 1:
                raise UserError(
                    f"{index}: a Megatron index of version {version}, but version 1 is read; build it again"
                )
            expected = _HEADER.size + sequences * (4 + 8) + documents * 8
            if size < expected:
                raise UserError(f"{index}: {size} bytes, but {sequences} sequences need {expected}; it was cut off")
            lengths = np.fromfile(file, np.int32, sequences)
            starts = np.fromfile(file, np.int64, sequences)
            ends = np.fromfile(file, np.int64, documents)
        dtype = np.dtype(DType.dtype_from_code(code))
        digest = _digest(index, data)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{prefix}: cannot be read as Megatron data ({error})") from error
    item, tokens = dtype.itemsize, int(lengths.sum(dtype=np.int64))
    if dtype.kind not in "iu":
        raise UserError(f"{index}: says that the tokens are {dtype}, but token ids are integers; build it again")
    if lengths.min(initial=0) < 0 or not np.array_equal(starts[1:], np.cumsum(lengths[:-1], dtype=np.int64) * item):
        raise UserError(f"{index}: damaged, its sequences do not follow one another; build it again")
    if not documents or ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise UserError(f"{index}: damaged, its documents do not follow one another; build it again")
    if data_size != tokens * item:
        raise UserError(f"{data}: {data_size} bytes, but {index.name} counts {tokens} tokens of {item} bytes")
    if tokens <= sequence_length:
        raise UserError(f"{data}: {tokens} tokens, too few for one sample of sequence_length {sequence_length} + 1")
    return TokenFile(prefix, documents - 1, tokens, digest)


def _digest(index: Path, data: Path) -> str:
    """Tells other contents apart without reading terabytes."""
    with index.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    with data.open("rb") as file:
        digest.update(file.read(_ENDS))
        file.seek(max(file.tell(), data.stat().st_size - _ENDS))
        digest.update(file.read(_ENDS))
    return digest.hexdigest()


def check_data(config: RunConfig, *, train: bool = True) -> dict[str, str]:
    """Check every data file of a run before anything is built, and the manifest of a corpus that has one.

    Args:
        train: those of training too.

    Returns:
        Digest of each file's contents by its name in the config.

    Raises:
        UserError: see :func:`check_token_file`; also a vocabulary or end of document that is not the corpus's.
    """
    sets = {"train": config.data.train if train else (), "valid": config.data.valid}
    digests: dict[str, str] = {}
    for key, prefixes in sets.items():
        for prefix in prefixes:
            if prefix in digests:
                continue
            try:
                digests[prefix] = check_token_file(prefix, sequence_length=config.training.sequence_length).digest
            except UserError as error:
                raise UserError(f"data.{key}: {error}") from None
    for manifest in _manifests(digests):
        manifest.check(vocab_size=config.model.vocab_size, end_of_document=config.data.end_of_document)
    return digests


def count_valid_samples(config: RunConfig) -> int:
    """Samples of the validation set, each taken once.

    Raises:
        UserError: see :func:`check_token_file`.
    """
    length = config.training.sequence_length
    files = (check_token_file(prefix, sequence_length=length) for prefix in dict.fromkeys(config.data.valid))
    return sum((file.tokens - 1) // length for file in files)


def _manifests(prefixes: Iterable[str]) -> list[CorpusManifest]:
    return [load_manifest(Path(p).parent) for p in prefixes if (Path(p).parent / MANIFEST).is_file()]


@dataclass(frozen=True)
class _PackedTokens:
    """The three things megatron-core's dataset asks of a tokenizer: data files hold token ids already."""

    eod: int
    vocab_size: int
    contents: str
    pad: int = -1  # packed sequences hold no padding, and no id may be taken for it

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What the names of cached indices depend on: also on the files' contents, for these may be built again."""
        return OrderedDict(
            tokenizer="packed", eod=str(self.eod), vocab_size=str(self.vocab_size), contents=self.contents
        )


def build_datasets(
    config: RunConfig, cache: Path, digests: Mapping[str, str] | None = None, *, train: bool = True
) -> tuple[Dataset | None, Dataset | None]:
    """Training samples (None if not asked for) and validation samples (None without validation files).

    Args:
        cache: folder for the shuffled sample indices, the same for all ranks.
        digests: of each file, as :func:`check_data` gives them.
        train: whether there will be training.

    Raises:
        UserError: the sample indices cannot be written, or read.
    """
    training, data = config.training, config.data
    weights = None if data.train_weights is None else list(data.train_weights)
    valid = (list(data.valid), None) if data.valid else None
    settings = GPTDatasetConfig(
        random_seed=training.seed,
        sequence_length=training.sequence_length,
        blend_per_split=[(list(data.train), weights) if train else None, valid, None],
        path_to_cache=str(cache),
        tokenizer=_PackedTokens(data.end_of_document, config.model.vocab_size, " ".join((digests or {}).values())),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # causal, and the attention layers know it
    )
    sizes = (
        training.steps * training.global_batch_size if train else 0,
        config.evaluation.batches * training.global_batch_size if valid else 0,
        0,
    )
    try:
        train_set, valid_set, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()
    except Exception as error:  # megatron-core puts a plain Exception around an OSError
        cause = error.__cause__ or error
        if not isinstance(cause, OSError | ValueError):
            raise
        shutil.rmtree(cache, ignore_errors=True)  # a half-written index would be taken for a whole one
        raise UserError(
            f"{cache}: the sample indices cannot be written and read ({cause}). What was there of them "
            "is removed; once this is mended, the same command makes them again"
        ) from error
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
    context_group: torch.distributed.ProcessGroup | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Micro-batches of samples ``start`` to ``stop`` that fall to data-parallel rank ``rank`` of ``ranks``.

    Args:
        context_group: context-parallel ranks that read the same samples; each gets two of 2 x cp pieces of every
            sequence, as megatron-core shares them out.

    Yields:
        "tokens", "labels", "position_ids" `[micro_batch_size, sequence_length / cp]`, int64, on ``device``.

    Raises:
        UserError: a token id is outside the vocabulary.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=_RankBatches(start, stop, micro_batch_size, rank, ranks),
        num_workers=min(num_workers, os.cpu_count() or 1),
        worker_init_fn=_leave_signals_to_trainer,
        pin_memory=device.type == "cuda",
    )
    for batch in loader:
        # On the CPU still: out of range on a GPU is an assertion far from its cause.
        for found in (*batch["tokens"].aminmax(), *batch["labels"].aminmax()):
            if not 0 <= (token := int(found)) < vocab_size:
                raise UserError(
                    f"data: token id {token} found, but model.vocab_size is {vocab_size} (ids 0 to {vocab_size - 1}): "
                    "the files were made with another tokenizer"
                )
        tensors = {key: batch[key] for key in ("tokens", "labels", "position_ids")}
        if context_group is not None:
            tensors = get_batch_on_this_cp_rank(tensors, is_hybrid_cp=False, cp_group=context_group)
        yield {key: tensor.to(device, non_blocking=True) for key, tensor in tensors.items()}


def _leave_signals_to_trainer(worker: int) -> None:
    """Ctrl-C and Slurm's SIGTERM reach loader processes too, but the step under way still needs them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
