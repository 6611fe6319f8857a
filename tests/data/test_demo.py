"""The demo corpus: what is in it, that it is the same every time, and that nothing half-written appears."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from megatron_mhar.cli.data import data
from megatron_mhar.data import demo
from megatron_mhar.data.demo import MANIFEST, MEGABYTE, CorpusSummary, build_demo_corpus, load_manifest
from megatron_mhar.data.sources import TextFile, installed_text_files, read_documents
from megatron_mhar.errors import UserError

FILES = {"train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.json", MANIFEST}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusSummary:
    """What this machine gives with the demo's own vocabulary and least size."""
    return build_demo_corpus(tmp_path_factory.mktemp("corpus") / "demo", max_bytes=5 * MEGABYTE)


@pytest.fixture(scope="module")
def some_files() -> list[TextFile]:
    return [file for file in installed_text_files() if file.package == "python"][:300]


@pytest.fixture(scope="module")
def some_documents(some_files: list[TextFile]) -> dict[TextFile, list[str]]:
    return {file: read_documents(file) for file in some_files}


@pytest.fixture
def build(some_documents: dict[TextFile, list[str]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., CorpusSummary]:
    """A small build from a part of the standard library, parsed once for all tests."""
    monkeypatch.setattr(demo, "installed_text_files", lambda: list(some_documents))
    monkeypatch.setattr(demo, "_read", lambda files: (some_documents[file] for file in files))

    def build(out: Path, **settings: object) -> CorpusSummary:
        given: dict[str, object] = {"vocab_size": 400, "min_bytes": 1, "max_bytes": 200_000, **settings}
        return build_demo_corpus(out, **given)  # type: ignore[arg-type]

    return build


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(folder: Path, split: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(folder / split))
    assert len(dataset.document_indices) == len(dataset) + 1
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_this_machine_gives_five_megabytes(corpus: CorpusSummary) -> None:
    manifest = corpus.manifest
    assert corpus.built and not corpus.stale
    assert {path.name for path in corpus.folder.iterdir()} == FILES
    assert list(corpus.folder.parent.iterdir()) == [corpus.folder]
    assert manifest.train.bytes + manifest.valid.bytes >= 5 * MEGABYTE
    assert manifest.vocab_size == 4096 and manifest.end_of_document == 0 and manifest.dtype == "uint16"
    assert 0.015 < manifest.valid.documents / (manifest.train.documents + manifest.valid.documents) < 0.045
    assert 2.5 < manifest.train.bytes / manifest.train.tokens < 6  # bytes a token of a BPE that learnt something
    assert manifest.packages["megatron-core"] and manifest.packages["python"]
    assert manifest == load_manifest(corpus.folder)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_files_hold_the_documents_each_ended_once(corpus: CorpusSummary, split: str) -> None:
    counts = getattr(corpus.manifest, split)
    tokenizer = Tokenizer.from_file(str(corpus.folder / "tokenizer.json"))
    found = documents(corpus.folder, split)
    assert len(found) == counts.documents
    assert sum(map(len, found)) == counts.tokens
    assert all(ids[-1] == 0 and 0 not in ids[:-1] and max(ids) < 4096 for ids in found)
    texts = [tokenizer.decode(ids[:-1]) for ids in found]
    # NFC may change the length of a few.
    assert sum(len(text.encode()) for text in texts) == pytest.approx(counts.bytes, rel=1e-3)
    assert all(len(text) > 500 for text in texts)
    assert len(set(texts)) == len(texts)
    assert np.fromfile(corpus.folder / f"{split}.bin", dtype=np.uint16).size == counts.tokens


def test_validation_documents_are_not_trained_on(corpus: CorpusSummary) -> None:
    train, valid = (set(map(tuple, documents(corpus.folder, split))) for split in ("train", "valid"))
    assert not train & valid


def test_second_call_finds_it_complete_and_is_quick(corpus: CorpusSummary) -> None:
    before = {path: path.stat().st_mtime_ns for path in corpus.folder.iterdir()}
    start = time.perf_counter()
    again = build_demo_corpus(corpus.folder, max_bytes=5 * MEGABYTE)
    assert time.perf_counter() - start < 5  # about 0.3 s on an idle machine; a build takes ten
    assert not again.built and not again.stale and again.manifest == corpus.manifest
    assert {path: path.stat().st_mtime_ns for path in corpus.folder.iterdir()} == before


def test_same_bytes_whatever_the_order_of_files(
    build: Callable[..., CorpusSummary], tmp_path: Path, some_files: list[TextFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "one")
    monkeypatch.setattr(demo, "installed_text_files", lambda: some_files[::-1])
    build(tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    build(tmp_path / "three", seed=7)
    assert contents(tmp_path / "one")["train.bin"] != contents(tmp_path / "three")["train.bin"]


def test_processes_read_what_one_process_reads(some_files: list[TextFile]) -> None:
    assert list(demo._read(some_files[:60])) == [read_documents(file) for file in some_files[:60]]


def test_wide_vocabulary_is_written_as_int32(
    build: Callable[..., CorpusSummary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "get_vocab_size", lambda self: 70_000)
    assert build(tmp_path / "demo").manifest.dtype == "int32"
    assert all(ids[-1] == 0 for ids in documents(tmp_path / "demo", "valid"))


def test_fewer_tokens_than_asked_for_are_told(build: Callable[..., CorpusSummary], tmp_path: Path) -> None:
    said: list[str] = []
    found = build(tmp_path / "demo", vocab_size=1_000_000, report=said.append).manifest.vocab_size
    assert found < 1_000_000
    assert any(line.startswith(f"the text gave no more than {found} tokens: that is what model.vocab") for line in said)


def test_too_little_text_is_refused_and_nothing_is_left(build: Callable[..., CorpusSummary], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"only \d+\.\d+ MB .* but 50 MB are asked for"):
        build(tmp_path / "demo", min_bytes=50 * MEGABYTE, max_bytes=60 * MEGABYTE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 100}, "vocab_size: 100 given; allowed: 257 or more"),
        ({"min_bytes": 10, "max_bytes": 9}, "min_bytes: 10 given with max_bytes 9"),
        ({"min_bytes": 0}, "min_bytes: 0 given"),
        ({"seed": -1}, "seed: -1 given"),
    ],
)
def test_wrong_settings(
    build: Callable[..., CorpusSummary], tmp_path: Path, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(tmp_path / "demo", **settings)
    assert list(tmp_path.iterdir()) == []


def test_other_settings_are_refused_and_force_replaces(build: Callable[..., CorpusSummary], tmp_path: Path) -> None:
    build(tmp_path / "demo")
    before = contents(tmp_path / "demo")
    with pytest.raises(UserError, match=r"other settings \(vocab_size 400 there, 500 given\); --force"):
        build(tmp_path / "demo", vocab_size=500)
    assert contents(tmp_path / "demo") == before
    summary = build(tmp_path / "demo", vocab_size=500, force=True)
    assert summary.built and load_manifest(tmp_path / "demo").vocab_size == 500
    assert list(tmp_path.iterdir()) == [tmp_path / "demo"]


def test_a_corpus_of_other_packages_is_kept_and_told(
    build: Callable[..., CorpusSummary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "demo")
    packages = {**demo.installed_packages(), "new-package": "1.0"}
    monkeypatch.setattr(demo, "installed_packages", lambda: packages)
    summary = build(tmp_path / "demo")
    assert summary.stale and not summary.built


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_corpus_is_not_taken_for_complete(
    build: Callable[..., CorpusSummary], tmp_path: Path, damage: str
) -> None:
    build(tmp_path / "demo")
    victim = tmp_path / "demo" / "train.bin"
    if damage == "missing":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size - 2)
    with pytest.raises(UserError, match=r"train\.bin .*corpus\.json; --force builds the corpus anew"):
        build(tmp_path / "demo")
    assert build(tmp_path / "demo", force=True).built
    assert not build(tmp_path / "demo").built


@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_ours_is_never_deleted(build: Callable[..., CorpusSummary], tmp_path: Path, force: bool) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds other files \(chapter\.tex\) and no corpus\.json"):
        build(folder, force=force)
    (folder / MANIFEST).write_text('{"name": "another program"}')
    with pytest.raises(UserError, match=r"corpus\.json: not the manifest of a demo corpus"):
        build(folder, force=force)
    assert (folder / "chapter.tex").read_text() == "years of work"
    with pytest.raises(UserError, match="is a file, but the corpus is a folder"):
        build(folder / "chapter.tex", force=force)
    assert {path.name for path in tmp_path.rglob("*")} == {"thesis", "chapter.tex", MANIFEST}


def test_notes_put_into_a_corpus_are_not_deleted_with_it(build: Callable[..., CorpusSummary], tmp_path: Path) -> None:
    build(tmp_path / "demo")
    (tmp_path / "demo" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not the corpus's \(notes\.txt\)"):
        build(tmp_path / "demo", force=True)
    assert (tmp_path / "demo" / "notes.txt").read_text() == "mine"


def test_an_empty_folder_is_taken(build: Callable[..., CorpusSummary], tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    assert build(tmp_path / "demo").built
    assert {path.name for path in (tmp_path / "demo").iterdir()} == FILES


def test_full_disk_leaves_what_was_there(build: Callable[..., CorpusSummary], tmp_path: Path) -> None:
    build(tmp_path / "demo")
    before = contents(tmp_path / "demo")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (1_000, 60_000):  # in the tokenizer, in the .bin file
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(UserError, match=r"demo: the corpus cannot be written: "):
                build(tmp_path / "demo", force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert contents(tmp_path / "demo") == before
    assert list(tmp_path.iterdir()) == [tmp_path / "demo"]


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    """A folder nobody may write to; root acts as an ordinary user meanwhile."""
    folder = tmp_path / "unwritable"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        return
    for parent in (tmp_path, *tmp_path.parents):
        if parent.name.startswith("pytest-") or parent == tmp_path:
            parent.chmod(0o755)
    os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(0)


def test_unwritable_place_is_told_before_anything_is_read(unwritable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_build", lambda *_: pytest.fail("read first"))
    with pytest.raises(UserError, match=r"the corpus cannot be written: Permission denied"):
        build_demo_corpus(unwritable / "below" / "demo")


def test_read_only_mount_through_the_command_line(tmp_path: Path) -> None:
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
    mount = 'mount -t tmpfs -o ro none "$1"'
    if not shutil.which("unshare") or subprocess.run([*namespace, mount, "sh", tmp_path], check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    command = f'{mount}; exec "$2" -m megatron_mhar.cli.main data demo --out "$1/demo"'
    result = subprocess.run(
        [*namespace, command, "sh", tmp_path, sys.executable], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("mhar: error: ") and len(result.stderr.splitlines()) == 1
    assert "demo: the corpus cannot be written: Read-only file system" in result.stderr


def test_a_path_below_a_file_is_told(build: Callable[..., CorpusSummary], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file, so no folder can be made below it"):
        build(tmp_path / "file" / "demo")


def test_interrupted_build_leaves_nothing(
    build: Callable[..., CorpusSummary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_build_are_cleared(build: Callable[..., CorpusSummary], tmp_path: Path) -> None:
    for name in (".demo.partial", ".demo.previous"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.bin").write_bytes(b"half")
    assert build(tmp_path / "demo").built
    assert list(tmp_path.iterdir()) == [tmp_path / "demo"]
    assert {path.name for path in (tmp_path / "demo").iterdir()} == FILES


def test_two_builds_at_once_do_not_mix(build: Callable[..., CorpusSummary], tmp_path: Path) -> None:
    staging = tmp_path / ".demo.partial"
    staging.mkdir()
    (staging / "train.bin").write_bytes(b"of the other process")
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is building"):
            build(tmp_path / "demo")
        assert (staging / "train.bin").read_bytes() == b"of the other process"
    finally:
        os.close(descriptor)


def test_manifest_checks_the_model(corpus: CorpusSummary) -> None:
    corpus.manifest.check(vocab_size=4096, end_of_document=0)
    corpus.manifest.check(vocab_size=9000, end_of_document=0)
    with pytest.raises(UserError, match=r"model\.vocab_size: 4095 given.*allowed: 4096 or more"):
        corpus.manifest.check(vocab_size=4095, end_of_document=0)
    with pytest.raises(UserError, match=r"data\.end_of_document: 5 given.* 0"):
        corpus.manifest.check(vocab_size=4096, end_of_document=5)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "not found"), ("{", "not the manifest"), ('{"format": "x"}', "not the manifest of a demo corpus: format")],
)
def test_bad_manifest(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=message):
        load_manifest(tmp_path)


def test_command(corpus: CorpusSummary, tmp_path: Path) -> None:
    shutil.copytree(corpus.folder, tmp_path / "demo")
    result = CliRunner().invoke(data, ["demo", "--out", str(tmp_path / "demo"), "--max-mb", "5"])
    assert result.exit_code == 0, result.output
    counts = json.loads((tmp_path / "demo" / MANIFEST).read_text())["train"]
    assert "complete, nothing to do" in result.output
    assert f"{counts['documents']:,} documents" in result.output and f"{counts['tokens']:,} tokens" in result.output
    help_text = CliRunner().invoke(data, ["demo", "--help"]).output
    for option in ("--out", "--min-mb", "--max-mb", "--vocab-size", "--seed", "--force"):
        assert option in help_text
