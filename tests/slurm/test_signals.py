"""The notice that a job's time is up reaches a run wherever it is: nothing is lost, and it ends in bounded time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_mhar.run_files import RunFiles
from megatron_mhar.tracking.journal import load_metrics
from tests.conftest import tiny_run

pytestmark = pytest.mark.usefixtures("one_rank")


def send(*names: str) -> None:
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))


def train(config: Any) -> Any:
    from megatron_mhar.train.loop import train

    return train(config)


def checkpoints(config: Any) -> list[int]:
    from megatron_mhar.train.checkpoint import checkpoint_steps

    return checkpoint_steps(RunFiles(config.run_dir).checkpoints)


def interrupt(monkeypatch: pytest.MonkeyPatch, place: str, *names: str, at_call: int = 1) -> None:
    """Send signals at the ``at_call``-th call of a method, before it does its work."""
    from megatron_mhar.train.checkpoint import Checkpoints
    from megatron_mhar.train.loop import Trainer

    owner: Any = Checkpoints if place == "save" else Trainer
    method, calls = getattr(owner, place), iter(range(1, 1000))

    def signalled(self: Any, *arguments: Any, **named: Any) -> Any:
        if next(calls) == at_call:
            send(*names)
        return method(self, *arguments, **named)

    monkeypatch.setattr(owner, place, signalled)


@pytest.mark.parametrize(
    "place,call,stops_at",
    [
        ("train_step", 1, 1),  # the first step, which compiles and warms up
        ("train_step", 3, 3),
        ("evaluate", 1, 4),  # no step more is trained: the evaluation is done, and saved after
        ("save", 1, 5),  # the save under way is the one that counts
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_notice_anywhere(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    call: int,
    stops_at: int,
    asynchronous: bool,
) -> None:
    settings: dict[str, Any] = dict(checkpoint={"interval": 5, "asynchronous": asynchronous})
    whole = tiny_run(corpus, tmp_path, name="whole", **settings)
    train(whole)
    parts = tiny_run(corpus, tmp_path, name="parts", **settings)
    before = signal.getsignal(signal.SIGUSR1)
    with monkeypatch.context() as patch:
        interrupt(patch, place, "SIGUSR1", at_call=call)
        assert train(parts) is None
    assert signal.getsignal(signal.SIGUSR1) == before
    assert checkpoints(parts) == [stops_at]
    assert train(parts) is not None
    expected, found = (load_metrics(RunFiles(run.run_dir).journal) for run in (whole, parts))
    for metric in ("train/loss", "train/grad_norm", "valid/loss"):
        assert found[metric] == expected[metric], metric


def test_the_notice_may_come_again_and_beside_one_other(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler may signal the ranks itself what their launcher passes on to them."""
    run = tiny_run(corpus, tmp_path)
    interrupt(monkeypatch, "train_step", "SIGUSR1", "SIGUSR1", "SIGTERM", "SIGUSR1", at_call=2)
    assert train(run) is None
    assert checkpoints(run) == [2]


def test_who_insists_is_obeyed(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(corpus, tmp_path)
    interrupt(monkeypatch, "train_step", "SIGUSR1", "SIGTERM", "SIGTERM", at_call=2)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert checkpoints(run) == []
