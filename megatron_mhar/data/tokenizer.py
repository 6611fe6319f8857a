"""Byte-level BPE: trained here for the demo, in the layout of Qwen's and GPT-2's tokenizers."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_mhar.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
END_OF_DOCUMENT_ID = 0  # special tokens come first, whatever the size of the vocabulary
MIN_VOCAB_SIZE = 256 + 1  # every byte and the end of a document

# Qwen's pattern: contractions, words with the blank before them, single digits, punctuation, line ends.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` tokens, among them the 256 bytes and ``END_OF_DOCUMENT``.

    It encodes any text without unknown tokens and gives it back (normalised to NFC). The name of the special token
    inside a text is encoded as ordinary characters.

    Raises:
        UserError: ``vocab_size`` is below ``MIN_VOCAB_SIZE``.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size: {vocab_size} given, but a byte-level vocabulary needs at least {MIN_VOCAB_SIZE} "
            f"(256 bytes and {END_OF_DOCUMENT})"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer
