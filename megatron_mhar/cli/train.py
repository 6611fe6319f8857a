"""``mhar train``."""

from __future__ import annotations

from pathlib import Path

import click

from megatron_mhar.config.load import load_config
from megatron_mhar.quiet import quiet_imports


@click.command(short_help="Train a model from a config file; continue where the run stopped.")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def train(config: Path, overrides: tuple[str, ...]) -> None:
    """Train the run that CONFIG describes, with keys replaced by KEY=VALUE (dotted paths, values in YAML).

    The run's folder is output_dir/name. If it holds a checkpoint of the same run, training goes on from there; if the
    run is finished, nothing is done. SIGTERM or Ctrl-C saves a checkpoint after the step under way and stops.

    \b
    Examples:
      mhar train configs/demo/mhar.yaml
      mhar train configs/100m/mhar.yaml 'data.train=[/corpus/train]' 'data.valid=[/corpus/valid]'
      torchrun --nproc-per-node 8 --no-python mhar train configs/1b/mhar.yaml parallel.tensor=2 parallel.sequence=true \
        'data.train=[/corpus/train]' 'data.valid=[/corpus/valid]'

    /corpus/train stands for the files /corpus/train.bin and .idx. Every key with its default and meaning:
    megatron_mhar/config/schema.py; those of a run: its config.yaml.
    """
    settings = load_config(config, overrides)  # before torch is imported: a misspelt key is told at once
    with quiet_imports():
        from megatron_mhar.train.loop import train as run

    run(settings)
