"""Token files are checked before use; samples come in one order whatever the number of ranks."""

import shutil

import pytest
import torch

from megatron_mhar.errors import UserError
from tests.conftest import tiny_run

LENGTH = 32


@pytest.fixture
def files(tmp_path, corpus):
    """A copy of the corpus to damage; the path of its training files without ending."""
    for path in corpus.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    return tmp_path / "train"


def check(prefix, length=LENGTH):
    from megatron_mhar.data.dataset import check_token_file

    return check_token_file(str(prefix), sequence_length=length)


def test_a_whole_file_is_counted(files):
    found = check(files)
    assert found.documents == 120
    assert found.tokens * 2 == files.with_suffix(".bin").stat().st_size


def damage_missing(files):
    files.with_suffix(".idx").unlink()


def damage_empty(files):
    files.with_suffix(".idx").write_bytes(b"")


def damage_foreign(files):
    files.with_suffix(".idx").write_bytes(b"PK" + bytes(100))


def damage_version(files):
    content = bytearray(files.with_suffix(".idx").read_bytes())
    content[9] = 2
    files.with_suffix(".idx").write_bytes(content)


def damage_cut_index(files):
    content = files.with_suffix(".idx").read_bytes()
    files.with_suffix(".idx").write_bytes(content[: len(content) // 2])


def damage_cut_data(files):
    content = files.with_suffix(".bin").read_bytes()
    files.with_suffix(".bin").write_bytes(content[:-2])


def damage_type(files):
    content = bytearray(files.with_suffix(".idx").read_bytes())
    content[17] = 99
    files.with_suffix(".idx").write_bytes(content)


@pytest.mark.parametrize(
    "damage,message",
    [
        (damage_missing, r"train\.idx: no such file"),
        (damage_empty, r"train\.idx: 0 bytes, too short for a Megatron index"),
        (damage_foreign, r"train\.idx: not a Megatron index"),
        (damage_version, r"train\.idx: a Megatron index of version 2, but version 1 is read"),
        (damage_cut_index, r"train\.idx: \d+ bytes, but 120 sequences need \d+; it was cut off"),
        (damage_cut_data, r"train\.bin: \d+ bytes, but train\.idx counts \d+ tokens of 2 bytes"),
        (damage_type, r"train.*: cannot be read as Megatron data \(99 is not a valid DType\)"),
    ],
)
def test_damaged_files_are_named(files, damage, message):
    damage(files)
    with pytest.raises(UserError, match=message):
        check(files)


def test_too_few_tokens_for_one_sample(files):
    tokens = check(files).tokens
    assert check(files, tokens - 1).tokens == tokens
    with pytest.raises(UserError, match=f"too few for one sample of sequence_length {tokens}"):
        check(files, tokens)


def batches(config, cache, *, start=0, stop=24, rank=0, ranks=1, micro=2, vocab_size=128, split=0):
    from megatron_mhar.data.dataset import build_datasets, micro_batches

    return list(
        micro_batches(
            build_datasets(config, cache)[split], start=start, stop=stop, micro_batch_size=micro, rank=rank,
            ranks=ranks, device=torch.device("cpu"), num_workers=0, vocab_size=vocab_size,
        )
    )  # fmt: skip


@pytest.fixture
def config(corpus, tmp_path):
    return tiny_run(corpus, tmp_path, training={"sequence_length": LENGTH})


def rows(found):
    return torch.cat([batch["tokens"] for batch in found])


def test_labels_are_the_next_tokens(config, tmp_path):
    for batch in batches(config, tmp_path):
        assert batch["tokens"].shape == batch["labels"].shape == (2, LENGTH)
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        assert torch.equal(batch["position_ids"], torch.arange(LENGTH).expand(2, LENGTH))


def test_samples_are_packed_from_the_files(config, corpus, tmp_path):
    """Every sample is a run of consecutive tokens of the documents, joined by the end of document, without padding."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(f"{corpus}/train")  # its arrays are gone with it
    documents = {tuple(map(int, d)) for d in data[:]}
    for row in rows(batches(config, tmp_path)).tolist():
        inner = [i for i, token in enumerate(row) if token == 0]
        for a, b in zip(inner, inner[1:]):
            assert tuple(row[a + 1 : b + 1]) in documents
        head = tuple(row[: inner[0] + 1]) if inner else tuple(row)
        assert any(head == d[len(d) - len(head) :] or (not inner and str(head)[1:-1] in str(d)) for d in documents)


@pytest.mark.parametrize("ranks,micro", [(2, 2), (4, 2), (2, 1), (1, 4), (3, 4)])
def test_a_global_batch_holds_the_same_samples_on_any_number_of_ranks(config, tmp_path, ranks, micro):
    whole = rows(batches(config, tmp_path))
    parts = [batches(config, tmp_path, rank=rank, ranks=ranks, micro=micro) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    merged = torch.cat([torch.cat([batch["tokens"] for batch in column]) for column in zip(*parts)])
    assert torch.equal(merged, whole)


def test_resuming_goes_on_where_it_stopped(config, tmp_path):
    whole = rows(batches(config, tmp_path))
    assert torch.equal(rows(batches(config, tmp_path, start=8)), whole[8:])


def test_the_order_depends_on_the_seed(config, corpus, tmp_path):
    other = tiny_run(corpus, tmp_path, training={"sequence_length": LENGTH, "seed": 7})
    assert not torch.equal(rows(batches(config, tmp_path / "a")), rows(batches(other, tmp_path / "b")))


def test_validation_reads_the_validation_file(config, corpus, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    text = {}
    for split in ("train", "valid"):
        data = IndexedDataset(f"{corpus}/{split}")
        text[split] = str([int(token) for document in data[:] for token in document])[1:-1]
    found = rows(batches(config, tmp_path, stop=4, split=1)).tolist()
    inside = [str(part)[1:-1] in text["valid"] and str(part)[1:-1] not in text["train"]
              for row in found for part in [row[:12]] if 0 not in part]  # fmt: skip
    assert inside and all(inside)


def test_a_token_outside_the_vocabulary_is_refused(config, tmp_path):
    with pytest.raises(UserError, match=r"token id 1\d\d found, but model\.vocab_size is 100"):
        batches(config, tmp_path, vocab_size=100)


def test_the_manifest_of_a_corpus_is_asked(files, tmp_path):
    """A corpus with a manifest knows its vocabulary and its end of document."""
    from megatron_mhar.data.dataset import check_data
    from megatron_mhar.data.demo import CorpusManifest, CorpusSettings, SplitCounts

    counts = SplitCounts(documents=1, bytes=1, tokens=1)
    settings = CorpusSettings(vocab_size=300, min_bytes=1, max_bytes=2, seed=0)
    manifest = CorpusManifest(
        settings=settings, vocab_size=300, end_of_document=0, dtype="uint16", train=counts, valid=counts, packages={},
        sha256={"train.bin": "aa", "valid.bin": "bb"},
    )  # fmt: skip
    (tmp_path / "corpus.json").write_text(manifest.model_dump_json())
    with pytest.raises(UserError, match=r"model\.vocab_size: 128 given.*allowed: 300 or more"):
        check_data(tiny_run(tmp_path, tmp_path))
    fits = tiny_run(tmp_path, tmp_path, model={"vocab_size": 300})
    digests = check_data(fits)
    assert set(digests) == {f"{tmp_path}/train", f"{tmp_path}/valid"} and len(set(digests.values())) == 2
