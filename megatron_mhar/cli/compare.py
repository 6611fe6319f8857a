"""``mhar compare``: finished runs side by side."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from megatron_mhar.study.compare import Run


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path),
    help="Folder of the pictures; 'compare' beside the first run by default.",
)  # fmt: skip
def compare(run_dirs: tuple[Path, ...], out: Path | None) -> None:
    """Compare finished runs: a table, their loss curves and the routing they learned.

    Losses and speeds are set against the first run, so give the baseline first. Whatever differs between the runs
    beside the residual method is named above the table.

    Pictures: loss.png, and for each routed run routing-NAME.png (site by source, a panel a head) and
    routing-deviation-NAME.png (each head minus the mean over heads).

    \b
    Examples:
      mhar compare runs/demo-baseline runs/demo-mhar --out runs/demo
      mhar compare runs/100m-baseline runs/100m-mhar runs/100m-attnres
    """
    from rich.console import Console

    from megatron_mhar.study.compare import compare as table
    from megatron_mhar.study.compare import differences, load_runs
    from megatron_mhar.study.figures import loss_curves, routing_deviation, routing_map

    runs = load_runs(run_dirs)
    folder = out or run_dirs[0].resolve().parent / "compare"
    pictures = [(folder / "loss.png", "loss curves")]
    loss_curves(runs, pictures[0][0])
    for run in runs:
        if run.routing is None:
            continue
        if not run.routing.finite:
            click.secho(
                f"{run.label}: no picture of its routing, whose weights are not finite: it diverged", fg="yellow"
            )
            continue
        stem = re.sub(r"[^\w.-]+", "-", run.label).strip("-")
        pictures.append((folder / f"routing-{stem}.png", f"routing of {run.label}"))
        routing_map(run, pictures[-1][0])
        if run.routing.weights.shape[1] > 1:
            pictures.append((folder / f"routing-deviation-{stem}.png", "what each head has of its own"))
            routing_deviation(run, pictures[-1][0])

    unfair = differences(runs)
    if unfair:
        click.secho("These runs differ in more than the residual method:", fg="yellow", bold=True)
        for line in unfair:
            click.echo(f"  {line}")
        click.echo()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a log file has no width to keep to
    console.print(table(runs))
    _list("Pictures", [(_short(path), what) for path, what in pictures])
    _list("Where to look next", _next(runs))


def _next(runs: list[Run]) -> list[tuple[str, str]]:
    last = runs[-1]
    lines = []
    tracked = [run for run in runs if run.config.tracking.enabled]
    if tracked:
        config = tracked[-1].config
        store = config.tracking.uri or f"sqlite:///{_short(config.output_dir)}/mlflow.db"
        if store.startswith(("http://", "https://")):
            lines.append((store, f"all metrics, experiment {config.tracking.experiment}"))
        else:
            lines.append((f"{_mlflow()} ui --backend-store-uri {store}", "all metrics in the browser"))
    lines.append((_short(last.directory / "config.yaml"), "every setting of the run, ready for mhar train"))
    lines.append(("configs/", "the published recipes; README.md says how to run and change them"))
    return lines


def _list(title: str, lines: list[tuple[str, str]]) -> None:
    width = max(len(left) for left, _ in lines)
    click.echo(f"\n{title}")
    for left, right in lines:
        click.echo(f"  {left:<{width}}  {right}")


def _mlflow() -> str:
    """How to call mlflow here: ``.venv/bin`` need not be on the search path."""
    if shutil.which("mlflow"):
        return "mlflow"
    return _short(Path(sys.executable).with_name("mlflow"))


def _short(path: Path) -> str:
    """``path`` relative to the working directory where it lies below it."""
    absolute = path.absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)
