"""``mhar train``."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import click

from megatron_mhar.config.load import load_config


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
      mhar train configs/100m/mhar.yaml data.train=[data/anneal/train] training.micro_batch_size=8
      torchrun --nproc-per-node 8 --no-python mhar train configs/1b/mhar.yaml parallel.tensor=2 parallel.sequence=true
    """
    settings = load_config(config, overrides)  # before torch is imported: a misspelt key is told at once
    # Importing megatron-core warns of each optional library; `mhar doctor` and the run's first line say it better.
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_mhar.train.loop import train as run
    logging.disable(logging.NOTSET)

    run(settings)
