"""The byte-level BPE gives every text back and keeps its special token to itself."""

from __future__ import annotations

import unicodedata

import pytest

from megatron_mhar.data.tokenizer import END_OF_DOCUMENT, END_OF_DOCUMENT_ID, MIN_VOCAB_SIZE, train_tokenizer
from megatron_mhar.errors import UserError

TEXTS = [f"Routing site {i} reads the sources before it; its softmax sums to one." for i in range(300)]


def test_size_is_the_final_one_and_end_of_document_is_zero() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id(END_OF_DOCUMENT) == END_OF_DOCUMENT_ID == 0


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "  indented\n\n\tcode(x) = 42\r\n",
        "Gruesse \u00e4\u00f6\u00fc \u4f60\u597d \U0001f600",
        "e\u0301 \x07",
    ],
)
def test_round_trip_is_nfc_of_the_text(text: str) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=MIN_VOCAB_SIZE + 20)
    assert tokenizer.decode(tokenizer.encode(text).ids) == unicodedata.normalize("NFC", text)


def test_merges_shorten_the_text_they_were_trained_on() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    assert len(tokenizer.encode(TEXTS[0]).ids) < len(TEXTS[0]) / 2


def test_name_of_the_special_token_in_a_text_is_ordinary_text() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    ids = tokenizer.encode(f"before {END_OF_DOCUMENT} after").ids
    assert 0 not in ids
    assert tokenizer.decode(ids) == f"before {END_OF_DOCUMENT} after"


def test_digits_are_single_tokens() -> None:
    tokenizer = train_tokenizer(["2048 2048 2048"] * 100, vocab_size=300)
    assert len(tokenizer.encode("2048").ids) == 4


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="vocab_size: 256 given.*at least 257"):
        train_tokenizer(TEXTS, vocab_size=256)
