"""Where a run is, from its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_mhar.cli.status import status
from megatron_mhar.config.load import dump_config
from megatron_mhar.errors import UserError
from megatron_mhar.launch.attempts import attempts_path, read_attempts
from megatron_mhar.launch.state import read_state, step_seconds
from megatron_mhar.run_files import RunFiles, RunSummary
from megatron_mhar.tracking.journal import Journal
from tests.conftest import tiny_run

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 100 steps of 2 s, reported every 5th, at step 40; saved at 30; its last report is a minute old."""
    config = tiny_run("corpus", tmp_path, training={"steps": 100, "log_interval": 5})
    files = RunFiles(config.run_dir)
    (files.checkpoints / "step_00000015").mkdir(parents=True)
    (files.checkpoints / "step_00000030").mkdir()
    (files.checkpoints / "step_00000040.ab12.partial").mkdir()
    files.config.write_text(dump_config(config))
    files.log.write_text("one\ntwo\nthree\nfour\n")
    journal = Journal(files.journal)
    last = NOW - timedelta(minutes=1)
    for step in range(1, 41):
        when = last - timedelta(seconds=2 * (40 - (step + 4) // 5 * 5))
        metrics = {"train/loss": 5 - step / 100}
        if step % 5 == 0:
            metrics["train/tokens_per_second"] = 1000.0 + step
        journal.write(step, metrics, round(when.timestamp() * 1000))
    journal.write(30, {"valid/loss": 4.5}, round(last.timestamp() * 1000))
    journal.write(40, {"valid/loss": 4.4}, round(last.timestamp() * 1000))
    journal.close()
    return config.run_dir


def write_attempts(run_dir: Path, *lines: tuple[str, ...]) -> None:
    attempts_path(run_dir).write_text("".join("\t".join(line) + "\n" for line in lines))


START = ("2026-01-02T11:00:00Z", "start", "12", "0", "0", "on node[1-2]")
END = ("2026-01-02T11:59:30Z", "end", "12", "0", "30", "rank 3 on node2 (pid 9) was killed by SIGKILL; requeued")


def test_running(run_dir: Path) -> None:
    write_attempts(run_dir, START)
    state = read_state(run_dir, now=NOW)
    assert (state.name, state.state, state.step, state.steps, state.checkpoint) == ("run", "running", 40, 100, 30)
    assert state.step_seconds == pytest.approx(2)
    assert state.remaining() == timedelta(seconds=120)
    assert state.tokens_per_second == 1040
    assert state.train_loss == (40, pytest.approx(4.6)) and state.valid_loss == (40, 4.4)
    assert state.last_words == ("two", "three", "four")


def test_a_start_that_never_reports_is_silent(run_dir: Path) -> None:
    write_attempts(run_dir, START)
    RunFiles(run_dir).journal.unlink()
    assert read_state(run_dir, now=NOW).state == "silent"
    assert read_state(run_dir, now=NOW - timedelta(minutes=58)).state == "new"


def test_an_end_is_told_and_what_was_not_saved_is_to_be_done_again(run_dir: Path) -> None:
    write_attempts(run_dir, START, END)
    state = read_state(run_dir, now=NOW)
    assert state.state == "requeued" and state.attempts[-1].text.startswith("rank 3 on node2")
    assert state.remaining() == timedelta(seconds=140)


def test_a_failure_by_hand_is_told(run_dir: Path) -> None:
    """launch/node leaves it in the logs; there is no job that would write attempts.tsv."""
    logs = run_dir / "logs/20260102-110000"
    logs.mkdir(parents=True)
    when = NOW + timedelta(minutes=1)
    for node, text in enumerate(("1 lost its neighbour", "2 bad input", "torn")):
        (logs / f"node-{node:04d}.end").write_text(f"{when.timestamp():.3f} {text}\n")
    state = read_state(run_dir, now=NOW)
    assert state.state == "ended" and state.failure == (when, "bad input")
    assert "bad input" in CliRunner().invoke(status, [str(run_dir)], catch_exceptions=False).output
    evaluation = run_dir / "logs/evaluate-20260102-113000"
    evaluation.mkdir()
    (evaluation / "node-0000.end").write_text(f"{when.timestamp():.3f} 2 no complete checkpoint\n")
    assert read_state(run_dir, now=NOW).failure == (when, "bad input"), "an evaluation is not the run"
    os.utime(logs, (1, 1))
    (run_dir / "logs/20260102-120000").mkdir()
    assert read_state(run_dir, now=NOW).state == "running", "started again since"


@pytest.mark.parametrize(
    "words",
    ["stopped by SIGINT after step 42, saved at step 42; the same command goes on",
     "rank 1 on host x (pid 7) has died. There is no complete checkpoint yet: the same command starts anew"],
)  # fmt: skip
def test_what_the_log_says_last_is_an_end(run_dir: Path, words: str) -> None:
    """Of a run without a launcher; with one, its attempts tell."""
    log = RunFiles(run_dir).log
    log.write_text(f"one\n2026-01-02 11:59:10 {words}\n")
    state = read_state(run_dir, now=NOW)
    assert state.state == "ended" and state.last_words[-1].endswith(words)
    assert "running" not in CliRunner().invoke(status, [str(run_dir)]).output
    with log.open("a") as file:
        file.write("2026-01-02 11:59:20 run: baseline, the next start\n")
    assert read_state(run_dir, now=NOW).state == "running"


def test_silence_is_not_taken_for_running(run_dir: Path) -> None:
    assert read_state(run_dir, now=NOW).state == "running"
    assert read_state(run_dir, now=NOW + timedelta(minutes=10)).state == "silent"
    # A start that is young has nothing to report yet.
    write_attempts(run_dir, START, END, ("2026-01-02T12:09:00Z", "start", "12", "1", "30", "on node[1-2]"))
    assert read_state(run_dir, now=NOW + timedelta(minutes=10)).state == "running"


def test_finished(run_dir: Path) -> None:
    summary = RunSummary(
        name="run", method="baseline", num_heads=1, parameters=1, steps=100, valid_loss=4.0, valid_loss_last=4.0,
        tokens_per_second=1.0, peak_memory_bytes=1, device="CPU",
    )  # fmt: skip
    summary.write(RunFiles(run_dir).summary)
    state = read_state(run_dir, now=NOW)
    assert state.state == "finished" and state.remaining() is None


def test_pauses_and_repeated_steps_do_not_count() -> None:
    steady = [(step, 2.0 * step) for step in range(0, 50, 5)]
    assert step_seconds(steady) == 2
    paused = [*steady, (50, 9000.0), (55, 9010.0), (40, 9100.0), (45, 9110.0)]
    assert step_seconds(paused) == 2
    assert step_seconds(steady[:1]) is None


def test_the_end_of_another_job_is_not_the_runs(run_dir: Path) -> None:
    """One that was submitted twice is refused, and the first goes on."""
    start, end = (("2026-01-02T11:00:01Z", event, "13", "0", "0", "text") for event in ("start", "end"))
    for lines, state in (
        ((START, start, end), "running"), ((START, start, END), "running"), ((START, start, END, end), "ended"),
        ((START, end, END), "requeued"), ((START, (*END[:5], "rank 3 failed; gave up")), "ended"),
    ):  # fmt: skip
        write_attempts(run_dir, *lines)
        assert read_state(run_dir, now=NOW).state == state


def test_damaged_lines_are_left_out(run_dir: Path) -> None:
    damaged = (("2026-01-02T11:00:00Z", "sta"), END[:3], ("soon", *START[1:]), ("2026-01-02T11:00:00", *START[1:]),
               ("9999-12-31T23:59:59Z", *START[1:]), (*START[:4], "9" * 5000, "x"))  # fmt: skip
    write_attempts(run_dir, START, *damaged, END)
    assert [attempt.event for attempt in read_attempts(run_dir)] == ["start", "end"]


@pytest.mark.parametrize("name", ["attempts.tsv", "metrics.jsonl", "config.yaml"])
def test_a_file_that_cannot_be_read_is_named(run_dir: Path, name: str) -> None:
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir()
    if name == "metrics.jsonl":
        assert read_state(run_dir).step == 0
    else:
        with pytest.raises(UserError, match=rf"{name}|holds no run"):
            read_state(run_dir)


def test_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run of mhar train"):
        read_state(tmp_path)
    write_attempts(tmp_path, START, END)
    with pytest.raises(UserError, match=r"it came to no run yet; last: rank 3 on node2"):
        read_state(tmp_path)


def test_command(run_dir: Path) -> None:
    write_attempts(run_dir, START, END)
    shown = CliRunner().invoke(status, [str(run_dir)], catch_exceptions=False)
    assert shown.exit_code == 0
    for text in (
        "run: requeued, step 40 of 100 (40.0%)", "2 min 20 s of training, at 2 s a step", "1,040 tokens/s",
        "training 4.6000 (step 40), validation 4.4000 (step 40)", "newest complete one is of step 30",
        "job 12, start from step 0 on node[1-2]", "was killed by SIGKILL; requeued", "log.txt\n    two\n",
    ):  # fmt: skip
        assert text in shown.output, shown.output
    values = json.loads(CliRunner().invoke(status, [str(run_dir), "--json"], catch_exceptions=False).output)
    assert (values["step"], values["checkpoint"], values["remaining_s"]) == (40, 30, 140)
    assert values["attempts"][1]["text"] == END[-1]


def test_a_loss_without_bounds_is_null_in_json(run_dir: Path) -> None:
    journal = Journal(RunFiles(run_dir).journal)
    journal.write(40, {"train/loss": float("inf")}, round(NOW.timestamp() * 1000))
    journal.close()
    text = CliRunner().invoke(status, [str(run_dir), "--json"], catch_exceptions=False).output

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert json.loads(text, parse_constant=refuse)["train_loss"] == [40, None]


def test_it_is_told_without_torch(run_dir: Path) -> None:
    """Which takes seconds to import."""
    code = (
        f"import sys; from megatron_mhar.cli.main import cli; cli(['status', {str(run_dir)!r}], standalone_mode=False)"
    )
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
