"""``mhar status``: where a run is, and what happened to it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from megatron_mhar.launch.state import RunState

_SHOWN = 10  # newest starts and ends


@click.command()
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run_dir: Path, as_json: bool) -> None:
    """Show where the run in RUN_DIR is, what happened to it, and when it will end.

    Its files alone are read, so that this works from any machine that sees them, also while the run is going on.

    \b
    Examples:
      mhar status runs/1b-mhar
      mhar status runs/1b-mhar --json
    """
    from megatron_mhar.launch.state import read_state

    state = read_state(run_dir)
    if as_json:
        remaining = state.remaining()
        values = asdict(state) | {
            "attempts": [attempt._asdict() for attempt in state.attempts],
            "remaining_s": None if remaining is None else remaining.total_seconds(),
        }
        click.echo(json.dumps(_finite(values), indent=2, default=str, allow_nan=False))
        return
    for line in _lines(state, run_dir, datetime.now(UTC)):
        click.echo(line)


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(state: RunState, run_dir: Path, now: datetime) -> Iterator[str]:
    yield f"{state.name}: {state.state}, step {state.step:,} of {state.steps:,} ({state.step / state.steps:.1%})"

    def row(name: str, text: str) -> str:
        return f"  {name:<11}{text}"

    if state.heard is not None and state.state != "finished":
        yield row("last heard", f"{_local(state.heard)}, {_span(now - state.heard)} ago")
    if (left := state.remaining()) is not None:
        when = f"{_local(now + left)}, in {_span(left)}" if state.state == "running" else f"{_span(left)} of training"
        yield row("end", f"{when}, at {state.step_seconds:,.3g} s a step")
    if state.tokens_per_second is not None:
        yield row("speed", f"{state.tokens_per_second:,.0f} tokens/s")
    losses = [
        f"{name} {loss[1]:.4f} (step {loss[0]:,})"
        for name, loss in (("training", state.train_loss), ("validation", state.valid_loss))
        if loss is not None
    ]
    if losses:
        yield row("loss", ", ".join(losses))
    saved = "none yet" if state.checkpoint is None else f"newest complete one is of step {state.checkpoint:,}"
    yield row("checkpoint", saved)
    if state.attempts:
        starts = sum(attempt.event == "start" for attempt in state.attempts)
        yield row("starts", f"{starts}" + (f", the last {_SHOWN} lines:" if len(state.attempts) > _SHOWN else ""))
    if state.failure is not None:
        yield row("failed", f"{_local(state.failure[0])}, {state.failure[1]}")
    for attempt in state.attempts[-_SHOWN:]:
        what = f"start from step {attempt.step:,} {attempt.text}" if attempt.event == "start" else attempt.text
        yield f"    {_local(attempt.time)}  job {attempt.job}, {what}"
    if state.last_words:
        yield row("log", str(run_dir / "log.txt"))
    yield from (f"    {line}" for line in state.last_words)


def _local(time: datetime) -> str:
    return time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _span(span: timedelta) -> str:
    """The two largest units: ``3 d 4 h``."""
    rest = max(0, round(span.total_seconds()))
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, rest = divmod(rest, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
