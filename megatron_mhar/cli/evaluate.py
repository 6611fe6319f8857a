"""``mhar evaluate``: validation loss of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import click

from megatron_mhar.quiet import quiet_imports


class Batches(click.ParamType):
    """A positive whole number, or all."""

    name = "batches"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["all"]:
        """``"16"`` -> 16, ``"all"`` -> "all"."""
        text = str(value)
        if text == "all":
            return "all"
        if not (text.isdecimal() and int(text)):
            self.fail(f"{text!r} given; allowed: a positive whole number, or all")
        return int(text)


@click.command()
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--checkpoint", type=click.IntRange(min=1), metavar="STEP", help="Step of a checkpoint; the newest by default."
)
@click.option(
    "--batches", type=Batches(), metavar="N|all",
    help="Global batches to evaluate, evaluation.batches of the config by default; all takes each sample once.",
)  # fmt: skip
def evaluate(
    run_dir: Path, overrides: tuple[str, ...], checkpoint: int | None, batches: int | Literal["all"] | None
) -> None:
    """Compute the validation loss of a checkpoint of the run in RUN_DIR.

    And that of the average of its weights, if it keeps one (optimizer.ema_decay). The run may be finished, stopped or
    training. Its config holds, with keys replaced by KEY=VALUE: another layout, micro-batch or validation set.
    --batches all leaves out samples at the end that fill no global batch. What was found is written to
    evaluation/step_<STEP>.json in RUN_DIR, over what was found earlier.

    \b
    Examples:
      mhar evaluate runs/demo-mhar
      mhar evaluate runs/100m-mhar --checkpoint 20000 --batches all 'data.valid=[/corpus/other]'
      torchrun --nproc-per-node 8 --no-python mhar evaluate runs/1b-mhar parallel.tensor=2 parallel.sequence=true
    """
    from megatron_mhar.config.load import load_config
    from megatron_mhar.errors import UserError
    from megatron_mhar.run_files import RunFiles

    run_dir = run_dir.absolute()
    for override in overrides:
        if (key := override.partition("=")[0].strip()).startswith("optimizer."):
            raise UserError(
                f"command line: {override}: an evaluation takes the run's optimizer as it is; whether it keeps an "
                "average of the weights is settled before its first step"
            )
        if key in ("name", "output_dir"):
            raise UserError(
                f"command line: {override}: {key} is that of the run in RUN_DIR, {run_dir}, where the results go; "
                "give another RUN_DIR instead"
            )
    files = RunFiles(run_dir)
    if not files.config.is_file():
        raise UserError(f"{run_dir}: holds no run of mhar train (it has no config.yaml)")
    config = load_config(files.config, overrides)
    if not config.data.valid:
        raise UserError(f"{files.config}: data.valid: no validation files; give them as 'data.valid=[/corpus/valid]'")
    with quiet_imports():
        from megatron_mhar.train.evaluate import evaluate as run

    found = run(run_dir, config, step=checkpoint, batches=batches)
    if os.environ.get("RANK", "0") != "0":
        return
    click.echo(
        f"{found.name}, step {found.step:,}: {found.sequences:,} sequences, {found.tokens:,} tokens of "
        f"{', '.join(found.data)}"
    )
    click.echo(f"{'':10}{'loss':>10}{'perplexity':>14}")
    click.echo(f"{'weights':10}{found.loss:>10.4f}{found.perplexity:>14,.2f}")
    if found.average_loss is not None and found.average_perplexity is not None:
        click.echo(f"{'average':10}{found.average_loss:>10.4f}{found.average_perplexity:>14,.2f}")
    click.echo(files.evaluation_of(found.step))
