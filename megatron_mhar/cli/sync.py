"""mhar sync: send metrics that wait in a run's journal to MLflow."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--uri", help="MLflow server or store to send to; the one of the run's config by default.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=120.0, show_default=True,
    metavar="SECONDS", help="Longest time spent on one run.",
)  # fmt: skip
@click.pass_context
def sync(context: click.Context, run_dirs: tuple[Path, ...], uri: str | None, timeout_s: float) -> None:
    """Send what waits in the journals of runs to MLflow.

    For runs that ended while the server could not be reached, or that ran where there was none. Only what the server
    lacks is sent, so that a second call changes nothing. Exits with status 1 if something is left.

    \b
    Examples:
      mhar sync runs/100m-mhar
      mhar sync runs/* --uri http://mlflow.example.org:5000
    """
    from megatron_mhar.tracking.job import Files
    from megatron_mhar.tracking.sync import sync as sync_run

    left = False
    for run_dir in run_dirs:
        if len(run_dirs) > 1 and not Files.of(run_dir).job.is_file():
            click.echo(f"{run_dir}: no run of mhar train, passed over", err=True)
            continue
        report = sync_run(run_dir, timeout_s=timeout_s, uri=uri)
        if report.error is None:
            click.echo(f"{run_dir}: {report.sent} metric values in MLflow run {report.run_id}")
        else:
            left = True
            click.echo(f"{run_dir}: {report.sent} metric values sent, {report.pending} wait: {report.error}", err=True)
    if left:
        context.exit(1)
