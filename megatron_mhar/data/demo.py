"""The demo corpus: real text of this machine, a BPE trained on it, and Megatron ``.bin``/``.idx`` files.

A corpus folder holds ``train.bin``, ``train.idx``, ``valid.bin``, ``valid.idx``, ``tokenizer.json`` and the manifest
``corpus.json``. It appears under its name only when it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_mhar.data.sources import TextFile, installed_packages, installed_text_files, read_documents
from megatron_mhar.errors import UserError
from megatron_mhar.quiet import quiet_imports

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MANIFEST = "corpus.json"
MEGABYTE = 1_000_000
VALID_FRACTION = 0.03
_FILES = ("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.json")
_MAX_WORKERS = 16  # more take longer to start than to read
_ENCODE_BATCH = 1024  # documents encoded at a time: bounds memory, fills the tokenizer's threads


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CorpusSettings(_Record):
    """What was asked for; the same settings and packages give the same bytes."""

    vocab_size: int
    min_bytes: int
    max_bytes: int
    seed: int


class SplitCounts(_Record):
    """Size of one split. ``bytes`` is UTF-8 text; ``tokens`` includes one end of document a document."""

    documents: int
    bytes: int
    tokens: int


class CorpusManifest(_Record):
    """Contents of ``corpus.json``."""

    format: Literal["megatron_mhar demo corpus 1"] = "megatron_mhar demo corpus 1"
    settings: CorpusSettings
    vocab_size: int
    end_of_document: int
    dtype: str
    train: SplitCounts
    valid: SplitCounts
    packages: dict[str, str]
    sha256: dict[str, str]

    def check(self, *, vocab_size: int, end_of_document: int) -> None:
        """Refuse a model whose embedding is too small for the corpus, or whose end of document is another token.

        Raises:
            UserError: names the key of the run config, what was given and what the corpus has.
        """
        if vocab_size < self.vocab_size:
            raise UserError(
                f"model.vocab_size: {vocab_size} given, but the corpus has token ids up to {self.vocab_size - 1}; "
                f"allowed: {self.vocab_size} or more"
            )
        if end_of_document != self.end_of_document:
            raise UserError(
                f"data.end_of_document: {end_of_document} given, but the corpus ends its documents with "
                f"{self.end_of_document}"
            )


@dataclass(frozen=True)
class CorpusSummary:
    """A complete corpus.

    Attributes:
        folder: where it lies.
        manifest: what it holds.
        built: whether this call built it, rather than found it.
        stale: whether a found one was built from other packages than those installed now.
    """

    folder: Path
    manifest: CorpusManifest
    built: bool
    stale: bool


def load_manifest(folder: Path) -> CorpusManifest:
    """The manifest of the corpus in ``folder``.

    Raises:
        UserError: there is none, it cannot be read, or it is no manifest of a demo corpus.
    """
    path = folder / MANIFEST
    try:
        return CorpusManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: not found: {folder} is no demo corpus; 'mhar data demo' builds one") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"])) or "content"
        raise UserError(f"{path}: not the manifest of a demo corpus: {at}: {first['msg']}") from None


def build_demo_corpus(
    out: Path,
    *,
    vocab_size: int = 4096,
    min_bytes: int = 5 * MEGABYTE,
    max_bytes: int = 12 * MEGABYTE,
    seed: int = 42,
    force: bool = False,
    report: Callable[[str], None] = lambda step: None,
) -> CorpusSummary:
    """Build the demo corpus in ``out``, or find it complete there.

    Args:
        out: folder of the corpus; its parents are made. It is written beside its place and renamed at the end.
        vocab_size: size of the tokenizer, the end-of-document token included.
        min_bytes: UTF-8 bytes of text without which the corpus is refused.
        max_bytes: reading stops where this many bytes are found.
        seed: chooses which files are read, the order of documents and the validation split.
        force: build anew and replace the corpus in ``out``.
        report: called with a few words before each slow step.

    Raises:
        UserError: wrong settings, too little text, ``out`` holds something else or a corpus of other settings,
            another process builds it, or ``out`` cannot be written. Nothing is left behind then.
    """
    from megatron_mhar.data.tokenizer import MIN_VOCAB_SIZE

    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"vocab_size: {vocab_size} given; allowed: {MIN_VOCAB_SIZE} or more")
    if not 0 < min_bytes <= max_bytes:
        raise UserError(
            f"min_bytes: {min_bytes} given with max_bytes {max_bytes}; allowed: above 0 and at most max_bytes"
        )
    if not 0 <= seed < 2**63:
        raise UserError(f"seed: {seed} given; allowed: 0 to 2^63 - 1")
    settings = CorpusSettings(vocab_size=vocab_size, min_bytes=min_bytes, max_bytes=max_bytes, seed=seed)
    target = out.resolve()
    packages = installed_packages()
    try:
        present = _is_corpus(target, out)
        if present and not force:
            return _found(target, out, settings, packages)
        with _staging(target) as folder:
            manifest = _build(folder, settings, packages, report)
            _is_corpus(target, out)  # it took a while: still nothing there that is not ours?
            _publish(folder, target)
        return CorpusSummary(out, manifest, built=True, stale=False)
    except OSError as error:
        # Not every error of a full disk carries its number (numpy's do not).
        raise UserError(
            f"{out}: the corpus cannot be written: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}; give another folder or make room"
        ) from error


def _is_corpus(target: Path, out: Path) -> bool:
    """Whether a corpus of ours is at ``target``, and nothing else; refuse what is not ours."""
    if not target.exists():
        nearest = next(parent for parent in target.parents if parent.exists())
        if not nearest.is_dir():
            raise UserError(f"{out}: {nearest} is a file, so no folder can be made below it; give another place")
        return False
    if not target.is_dir():
        raise UserError(f"{out}: is a file, but the corpus is a folder; give another place")
    names = {entry.name for entry in target.iterdir()}
    if not names:
        return False
    if MANIFEST not in names:
        raise UserError(f"{out}: holds other files ({_some(names)}) and no {MANIFEST}; give another folder")
    load_manifest(target)
    foreign = names - {*_FILES, MANIFEST}
    if foreign:
        raise UserError(f"{out}: holds files that are not the corpus's ({_some(foreign)}); move them elsewhere first")
    return True


def _some(names: set[str]) -> str:
    listed = sorted(names)[:3]
    return ", ".join(listed) + (", ..." if len(names) > len(listed) else "")


def _found(target: Path, out: Path, settings: CorpusSettings, packages: dict[str, str]) -> CorpusSummary:
    manifest = load_manifest(target)
    given, there = settings.model_dump(), manifest.settings.model_dump()
    differing = [f"{key} {there[key]} there, {given[key]} given" for key in given if given[key] != there[key]]
    if differing:
        raise UserError(
            f"{out}: holds a corpus of other settings ({'; '.join(differing)}); --force replaces it, "
            "or give another folder"
        )
    for name, digest in manifest.sha256.items():
        path = target / name
        if not path.is_file() or _sha256(path) != digest:
            state = "does not agree with" if path.is_file() else "is missing, but named in"
            raise UserError(f"{out}: {name} {state} {MANIFEST}; --force builds the corpus anew")
    # Other packages would give another text. The one that runs were trained on is kept.
    return CorpusSummary(out, manifest, built=False, stale=manifest.packages != packages)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that this process alone fills; gone afterwards unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.partial")
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # The lock goes with the folder: a killed build frees it, and its leftovers are cleared here.
        busy = UserError(f"{target}: another process is building this corpus; wait until it has ended")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError:
            pass  # some network file systems have no locks
        if not _is_at(descriptor, folder):  # the other build renamed it in the meantime
            raise busy
        try:
            for entry in folder.iterdir():
                entry.unlink()
            yield folder
        finally:
            if _is_at(descriptor, folder):
                shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _publish(folder: Path, target: Path) -> None:
    """Rename the complete ``folder`` to ``target``; a corpus that is there goes away."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    previous = target.with_name(f".{target.name}.previous")
    if previous.exists():  # left by a kill between the two renames below
        shutil.rmtree(previous)
    if target.exists():
        target.rename(previous)
    folder.rename(target)
    if previous.exists():
        shutil.rmtree(previous)


def _build(
    folder: Path, settings: CorpusSettings, packages: dict[str, str], report: Callable[[str], None]
) -> CorpusManifest:
    report("reading docstrings and documentation of the standard library and of installed packages")
    documents = _collect(settings)
    size = sum(len(text.encode()) for _, text in documents)
    if size < settings.min_bytes:
        raise UserError(
            f"only {size / MEGABYTE:.2f} MB of documentation found in the standard library and in "
            f"{len(packages) - 1} installed packages, but {settings.min_bytes / MEGABYTE:g} MB are asked for: "
            "install packages that carry documentation (scipy, scikit-learn, sympy) or ask for less (--min-mb)"
        )
    # The digest is uniform: sorting by it shuffles the documents, and its first 3 % are the validation split.
    documents.sort()
    limit = int(VALID_FRACTION * 2**64).to_bytes(8, "big")
    splits = {
        "train": [text for digest, text in documents if digest[:8] >= limit],
        "valid": [text for digest, text in documents if digest[:8] < limit],
    }
    if not splits["train"] or not splits["valid"]:
        raise UserError(f"{len(documents)} documents are too few for a training and a validation split: ask for more")

    report(f"training a byte-level BPE of {settings.vocab_size} tokens on {size / MEGABYTE:.1f} MB")
    from megatron_mhar.data.tokenizer import END_OF_DOCUMENT_ID, train_tokenizer

    tokenizer = train_tokenizer(splits["train"], vocab_size=settings.vocab_size)
    if (found := tokenizer.get_vocab_size()) < settings.vocab_size:
        report(f"the text gave no more than {found} tokens: that is what model.vocab_size must be at least")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")

    report("writing Megatron .bin and .idx files")
    tokens, dtype = {}, ""
    for split, texts in splits.items():
        tokens[split], dtype = _write(folder / split, texts, tokenizer)
    counts = {
        split: SplitCounts(documents=len(texts), bytes=sum(len(t.encode()) for t in texts), tokens=tokens[split])
        for split, texts in splits.items()
    }
    manifest = CorpusManifest(
        settings=settings,
        vocab_size=tokenizer.get_vocab_size(),
        end_of_document=END_OF_DOCUMENT_ID,
        dtype=dtype,
        train=counts["train"],
        valid=counts["valid"],
        packages=packages,
        sha256={name: _sha256(folder / name) for name in _FILES},
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return manifest


def _collect(settings: CorpusSettings) -> list[tuple[bytes, str]]:
    """Documents with their digests, each text once, from a seeded sample of files; up to ``max_bytes`` of text."""
    salt = settings.seed.to_bytes(8, "big")

    def digest(text: str) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=16, salt=salt).digest()

    # By name and not by place: the same packages give the same order on every machine.
    files = sorted(installed_text_files(), key=lambda file: (digest(f"{file.package}/{file.name}"), file.name))
    found: dict[bytes, str] = {}
    size = 0
    for documents in _read(files):
        for text in documents:
            key = digest(text)
            if key not in found:
                found[key] = text
                size += len(text.encode())
                if size >= settings.max_bytes:
                    return list(found.items())
    return list(found.items())


def _read(files: Sequence[TextFile]) -> Iterator[list[str]]:
    """``read_documents`` of each file, in order, on all cores."""
    # Spawned and not forked: the caller may have threads (torch, tokenizers).
    workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C is for the parent, which ends them
    )
    try:
        yield from pool.map(read_documents, files, chunksize=max(1, min(32, math.ceil(len(files) / 64))))
    finally:
        pool.shutdown(cancel_futures=True)


def _write(prefix: Path, texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, str]:
    """Write ``prefix``.bin and .idx, one document a text; the number of tokens and their dtype."""
    import numpy as np

    from megatron_mhar.data.tokenizer import END_OF_DOCUMENT_ID

    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import (
            DType,
            IndexedDatasetBuilder,
            get_bin_path,
            get_idx_path,
        )

    dtype = DType.optimal_dtype(tokenizer.get_vocab_size())
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=dtype)
    tokens = 0
    for start in range(0, len(texts), _ENCODE_BATCH):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + _ENCODE_BATCH]):
            document = np.array([*encoding.ids, END_OF_DOCUMENT_ID], dtype=dtype)
            builder.add_document(document, [document.size])
            tokens += document.size
    builder.finalize(get_idx_path(str(prefix)))
    return tokens, np.dtype(dtype).name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
