"""``mhar data``: build corpora."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def data() -> None:
    """Build corpora of packed tokens."""


@data.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("data/demo"), show_default=True, help="Folder of the corpus."
)
@click.option(
    "--min-mb",
    type=click.FloatRange(min=0, min_open=True),
    default=5,
    show_default=True,
    help="Least text, in MB (10^6 bytes of UTF-8), without which nothing is built.",
)
@click.option(
    "--max-mb",
    type=click.FloatRange(min=0, min_open=True),
    default=12,
    show_default=True,
    help="Reading stops at this much text, in MB.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(min=257),
    default=4096,
    show_default=True,
    help="Tokens of the byte-level BPE, its end-of-document token included.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=42,
    show_default=True,
    help="Chooses files, document order and validation split.",
)
@click.option("--force", is_flag=True, help="Build anew and replace the corpus in --out.")
def demo(out: Path, min_mb: float, max_mb: float, vocab_size: int, seed: int, force: bool) -> None:
    """Build a small real corpus from text that this machine already has.

    Docstrings and documentation of the standard library and of installed packages are cleaned, freed of duplicates
    and split into training and validation documents; a byte-level BPE is trained on the training documents, and both
    splits are written as Megatron .bin/.idx files. The same packages and options give the same files. A corpus that
    is already there is kept.

    \b
    Examples:
      mhar data demo
      mhar data demo --out data/large --min-mb 20 --max-mb 40 --vocab-size 16384
    """
    from megatron_mhar.data.demo import MEGABYTE, build_demo_corpus

    summary = build_demo_corpus(
        out,
        vocab_size=vocab_size,
        min_bytes=round(min_mb * MEGABYTE),
        max_bytes=round(max_mb * MEGABYTE),
        seed=seed,
        force=force,
        report=lambda step: click.echo(f"{step} ...", err=True),
    )
    manifest = summary.manifest
    click.echo(f"{out}: {'built' if summary.built else 'complete, nothing to do (--force builds it anew)'}")
    for name, split in (("train", manifest.train), ("valid", manifest.valid)):
        click.echo(
            f"  {name}: {split.documents:,} documents, {split.bytes / MEGABYTE:.2f} MB, {split.tokens:,} tokens "
            f"({split.bytes / split.tokens:.2f} bytes a token)"
        )
    click.echo(
        f"  vocabulary of {manifest.vocab_size}, end of document {manifest.end_of_document}, {manifest.dtype}; "
        f"text of {len(manifest.packages)} packages"
    )
    if summary.stale:
        click.echo("  note: other packages are installed now than it was built from; --force builds it from these")
