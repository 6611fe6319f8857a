from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_mhar.errors import UserError
from megatron_mhar.tracking.journal import Entry, Journal, Tail, load_metrics, read_journal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def test_lines_come_back_as_written(path: Path) -> None:
    journal = Journal(path)
    journal.write(0, {"train/loss": 0.1 + 0.2, "tokens": 7}, time_ms=1234)
    numpy = {"train/loss": np.float64(1.5), "n": np.int64(3), "x": np.float32(0.5)}
    journal.write(1, numpy, time_ms=1235)  # type: ignore[arg-type]
    journal.close()
    journal.close()
    assert list(read_journal(path)) == [
        Entry(0, 1234, {"train/loss": 0.1 + 0.2, "tokens": 7.0}),
        Entry(1, 1235, {"train/loss": 1.5, "n": 3.0, "x": 0.5}),
    ]


def test_time_is_now_in_milliseconds(path: Path) -> None:
    Journal(path).write(0, {"a": 1.0})
    assert abs(next(read_journal(path)).time_ms / 1000 - os.stat(path).st_mtime) < 5


def test_non_finite_values_survive_in_plain_json(path: Path) -> None:
    Journal(path).write(3, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def no_constants(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    json.loads(path.read_text(), parse_constant=no_constants)
    metrics = next(read_journal(path)).metrics
    assert math.isnan(metrics["a"]) and metrics["b"] == math.inf and metrics["c"] == -math.inf


def test_last_value_of_a_step_counts_and_steps_rise(path: Path) -> None:
    journal = Journal(path)
    for step, value in [(10, 1.0), (20, 2.0), (30, 3.0), (20, 2.5), (25, 2.7), (30, 3.5)]:
        journal.write(step, {"loss": value})
    journal.write(20, {"other": 9.0})
    assert load_metrics(path) == {"loss": [(10, 1.0), (20, 2.5), (25, 2.7), (30, 3.5)], "other": [(20, 9.0)]}


def test_killed_writer_loses_nothing(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from megatron_mhar.tracking.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1])); step = 0\n"
        "while True: journal.write(step, {'a': 1.0}); print(step, flush=True); step += 1"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) == 200:
            break
    writer.send_signal(signal.SIGKILL)
    written = [200, *(int(line) for line in writer.stdout)]
    writer.wait()
    steps = [entry.step for entry in read_journal(path)]
    assert steps[: written[-1] + 1] == list(range(written[-1] + 1))


@pytest.mark.parametrize(
    "torn", [b'{"step":2,"time_', b"\0" * 5000, b"x" * 200_000], ids=["half line", "zeros", "longer than a block"]
)
@pytest.mark.parametrize("whole", [0, 2])
def test_torn_last_line_is_left_out_and_cut_off(path: Path, torn: bytes, whole: int) -> None:
    journal = Journal(path)
    for step in range(whole):
        journal.write(step, {"a": float(step)})
    journal.close()
    path.write_bytes(path.read_bytes() + torn)
    assert [entry.step for entry in read_journal(path)] == list(range(whole))

    Journal(path).write(whole, {"a": 5.0})
    assert [entry.step for entry in read_journal(path)] == list(range(whole + 1))
    assert len(path.read_bytes().splitlines()) == whole + 1


def test_damaged_line_is_skipped_with_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(path)
    journal.write(0, {"a": 0.0})
    with path.open("ab") as file:
        file.write(b'not json\n[1]\n{"step":1}\n\n{"step":1,"time_ms":0,"metrics":{"a":"x"}}\n')
        for numbers in (b'"step":1e999,"time_ms":0', b'"step":1,"time_ms":1e30', b'"step":-1,"time_ms":0'):
            file.write(b"{" + numbers + b',"metrics":{"a":1}}\n')
    journal.write(2, {"a": 2.0})
    with caplog.at_level(logging.WARNING):
        assert [entry.step for entry in read_journal(path)] == [0, 2]
    assert sum(str(path) in message for message in caplog.messages) == 7


def test_full_disk_costs_only_the_lines_that_did_not_fit(path: Path) -> None:
    journal = Journal(path)
    journal.write(0, {"a": 0.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        for step in (1, 2):
            with pytest.raises(OSError):
                journal.write(step, {"a": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.write(3, {"a": 3.0})
    assert [entry.step for entry in read_journal(path)] == [0, 3]


@pytest.mark.parametrize(
    ("step", "metrics", "error", "told"),
    [
        (1.0, {"a": 1.0}, TypeError, "step: float given"),
        (True, {"a": 1.0}, TypeError, "step: bool given"),
        (-1, {"a": 1.0}, ValueError, "step: -1 given"),
        (2**63, {"a": 1.0}, ValueError, "64 bits"),
        (1, {"a": "1.0"}, TypeError, "metric a: str given"),
        (1, {"a": None}, TypeError, "metric a: NoneType given"),
        (1, {"a": np.zeros(2)}, TypeError, "metric a: ndarray given"),
        (1, {3: 1.0}, TypeError, "metric name 3"),
        (1, {"": 1.0}, ValueError, "metric name ''"),
        (1, {"a//b": 1.0}, ValueError, "a//b"),
        (1, {"a/../b": 1.0}, ValueError, "a/../b"),
        (1, {"./a": 1.0}, ValueError, "./a"),
        (1, {"/a": 1.0}, ValueError, "/a"),
        (1, {"..a": 1.0}, ValueError, "..a"),
        (1, {".": 1.0}, ValueError, "'.'"),
        (1, {"a?": 1.0}, ValueError, "a?"),
        (1, {"a" * 251: 1.0}, ValueError, "at most 250"),
    ],
)
def test_what_mlflow_cannot_hold_is_refused_and_not_written(
    path: Path, step: int, metrics: dict[str, float], error: type[Exception], told: str
) -> None:
    journal = Journal(path)
    with pytest.raises(error, match=".*") as caught:
        journal.write(step, {"good": 1.0, **metrics})
    assert told in str(caught.value)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("name", ["a", "train/loss", "a.b", "a/b..", "x y", "lr:0", "a" * 250])
def test_names_that_mlflow_takes_are_taken(path: Path, name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(name)
    Journal(path).write(0, {name: 1.0})
    assert load_metrics(path) == {name: [(0, 1.0)]}


def test_missing_journal_is_named(path: Path) -> None:
    with pytest.raises(UserError, match=str(path)):
        load_metrics(path)
    with pytest.raises(UserError, match=str(path)):
        read_journal(path)


def test_tail_follows_a_growing_file(path: Path) -> None:
    tail = Tail(path)
    assert tail.read(100) == []
    journal = Journal(path)
    assert tail.read(100) == []
    for step in range(5):
        journal.write(step, {"a": 1.0, "b": 2.0})
    with path.open("ab") as file:
        file.write(b'{"step":5,"time_ms":')
    assert [entry.step for entry in tail.read(4)] == [0, 1]
    assert [entry.step for entry in tail.read(100)] == [2, 3, 4]
    assert tail.read(100) == []
    with path.open("ab") as file:
        file.write(b'0,"metrics":{"a":1}}\n')
    assert [entry.step for entry in tail.read(100)] == [5]
    tail.rewind()
    assert len(tail.read(100)) == 6


def test_tail_starts_over_where_a_shorter_file_took_the_place(path: Path) -> None:
    Journal(path).write(10, {"a": 1.0, "b": 2.0})
    tail = Tail(path)
    assert [entry.step for entry in tail.read(100)] == [10]
    path.unlink()
    Journal(path).write(1, {"a": 1.0})
    assert [entry.step for entry in tail.read(100)] == [1]
