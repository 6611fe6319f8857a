from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_mhar.tracking import uploader as uploader_module
from megatron_mhar.tracking.job import EndStatus, Files, Job, Upload
from megatron_mhar.tracking.journal import Journal, load_metrics
from megatron_mhar.tracking.remote import Point
from megatron_mhar.tracking.uploader import DONE, UNUSABLE, Ending, Uploader, already_ended, end_of_training

ROOT = Path(__file__).parents[2]
NEVER_S = 1e6


class FakeServer:
    """An MLflow run in memory. Before a request it may fail, or carry it out and lose the answer."""

    def __init__(self, failures: float = 0.0, seed: int = 0) -> None:
        self.points: list[Point] = []
        self.requests: list[int] = []  # sizes
        self.status = "NONE"
        self.order: list[str] = []
        self._failures = failures
        self._random = random.Random(seed)

    def request(self, name: str) -> bool:
        """Whether the answer to a request that is carried out gets lost; raises where it is not carried out."""
        self.order.append(name)
        dice = self._random.random()
        if dice < self._failures / 2:
            raise ConnectionError("refused")
        return dice < self._failures

    def history(self) -> dict[str, list[tuple[int, float]]]:
        history: dict[str, list[tuple[int, float]]] = {}
        for point in self.points:
            history.setdefault(point.name, []).append((point.step, point.value))
        return history


class FakeRemote:
    server = FakeServer()

    def __init__(self, job: Job, uri: str, run_id: str | None) -> None:
        self.run_id = run_id

    def open(self, *, resume: bool) -> dict[str, int]:
        lost = self.server.request("open")
        if resume:
            self.server.status = "RUNNING"
        self.run_id = "run"
        if lost:
            raise TimeoutError("no answer")
        marks: dict[str, int] = {}
        for point in self.server.points:
            marks[point.name] = max(point.step, marks.get(point.name, -1))
        return marks

    def steps(self, name: str) -> set[int]:
        if self.server.request("steps"):
            raise TimeoutError("no answer")
        return {point.step for point in self.server.points if point.name == name}

    def send(self, points: Sequence[Point]) -> None:
        lost = self.server.request("send")
        self.server.points += points
        self.server.requests.append(len(points))
        if lost:
            raise TimeoutError("no answer")

    def end(self, status: EndStatus, end_ms: int) -> None:
        lost = self.server.request("end")
        self.server.status = status
        if lost:
            raise TimeoutError("no answer")


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader_module, "RemoteRun", FakeRemote)
    monkeypatch.setattr(uploader_module, "POLL_S", 0.001)
    monkeypatch.setattr(uploader_module, "SEND_INTERVAL_S", 0.001)
    monkeypatch.setattr(uploader_module, "MAX_BACKOFF_S", 0.004)


def job() -> Job:
    fields = {"run_key": "key", "name": "name", "run_dir": "", "uri": "uri", "experiment": "e", "params": {}}
    times = {"request_timeout_s": 1, "drain_timeout_s": 1.0, "start_ms": 0, "host": "h", "pid": 1, "pid_started": 0.0}
    return Job.model_validate(fields | times)


def write(run_dir: Path, steps: Sequence[int], start: float = 0.0, names: Sequence[str] = ("loss", "lr")) -> None:
    journal = Journal(Files.of(run_dir).journal)
    for step in steps:
        journal.write(step, dict.fromkeys(names, start + step))
    journal.close()


def send(run_dir: Path, server: FakeServer, status: EndStatus | None = "FINISHED") -> int:
    """A whole life of a process: from start to the end of training, which has already come."""
    FakeRemote.server = server
    return Uploader(Files.of(run_dir), job(), "uri", Ending(lambda: (status, 7), NEVER_S)).run()


def test_everything_is_sent_before_the_run_is_ended(tmp_path: Path) -> None:
    write(tmp_path, range(1, 1301))
    server = FakeServer()
    assert send(tmp_path, server) == DONE
    assert server.history() == load_metrics(Files.of(tmp_path).journal)
    assert server.requests == [1000, 1000, 600]
    assert server.order == ["open", "send", "send", "send", "end"]
    assert server.status == "FINISHED"
    upload = Upload.read(Files.of(tmp_path).upload, "uri")
    assert upload == Upload(uri="uri", run_id="run", marks={"loss": 1300, "lr": 1300}, ended=True)


def test_status_comes_first_where_the_metrics_may_take_too_long(tmp_path: Path) -> None:
    write(tmp_path, range(1, 1301))
    FakeRemote.server = server = FakeServer()
    ending = Ending(lambda: ("FAILED", 7), NEVER_S)
    ending.half_s = 0.0
    assert Uploader(Files.of(tmp_path), job(), "uri", ending).run() == DONE
    assert server.order == ["open", "end", "send", "send", "send"]


@pytest.mark.parametrize("seed", range(5))
def test_early_status_stays_whatever_fails_after_it(tmp_path: Path, seed: int) -> None:
    write(tmp_path, range(1, 1301))
    FakeRemote.server = server = FakeServer(failures=0.7, seed=seed)
    ending = Ending(lambda: ("FAILED", 7), NEVER_S)
    ending.half_s = 0.0
    assert Uploader(Files.of(tmp_path), job(), "uri", ending).run() == DONE
    assert server.status == "FAILED"
    assert server.history() == load_metrics(Files.of(tmp_path).journal)


def test_status_is_left_alone_where_the_end_is_not_known(tmp_path: Path) -> None:
    write(tmp_path, [1])
    server = FakeServer()
    assert send(tmp_path, server, status=None) == DONE
    assert server.order == ["open", "send"] and server.status == "NONE"


@pytest.mark.parametrize("seed", range(20))
def test_no_failure_loses_or_doubles_a_value(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader_module, "MAX_METRICS", 7)
    monkeypatch.setattr(uploader_module, "MAX_WAITING", 40)
    server = FakeServer(failures=0.6, seed=seed)
    write(tmp_path, range(0, 50), names=("loss",))
    write(tmp_path, range(0, 50, 10), names=("valid",))
    assert send(tmp_path, server, "FAILED") == DONE
    write(tmp_path, range(50, 100), names=("loss", "new"))  # a restart
    if seed % 2:
        Files.of(tmp_path).upload.unlink()
    assert send(tmp_path, server) == DONE
    assert server.history() == load_metrics(Files.of(tmp_path).journal)
    assert server.status == "FINISHED"
    assert server.order.count("open") > 2  # failures did happen


def test_repeated_steps_are_sent_once_and_waiting_ones_with_their_last_value(tmp_path: Path) -> None:
    server = FakeServer()
    write(tmp_path, range(0, 60, 10))
    assert send(tmp_path, server, "FAILED") == DONE  # 0 .. 50 are there
    write(tmp_path, range(60, 100, 10))  # not sent: killed with the trainer
    write(tmp_path, range(30, 130, 10), start=0.5)  # resumed after step 20
    write(tmp_path, range(85, 95), start=0.75)  # and again, logging every step
    assert send(tmp_path, server) == DONE
    last = load_metrics(Files.of(tmp_path).journal)["loss"]
    assert server.history()["loss"] == [(s, float(s)) for s in range(0, 60, 10)] + [p for p in last if p[0] > 50]
    assert (70, 70.5) in last and (90, 90.75) in last


def test_emptied_store_is_filled_again(tmp_path: Path) -> None:
    write(tmp_path, range(100))
    assert send(tmp_path, FakeServer()) == DONE
    server = FakeServer()
    assert send(tmp_path, server) == DONE
    assert server.history() == load_metrics(Files.of(tmp_path).journal)


@pytest.mark.parametrize("failures", [0.0, 0.6])
def test_late_values_are_sent_once(tmp_path: Path, failures: float) -> None:
    """Resumed at step 20 with smaller intervals: new steps below the highest that the server has."""
    server = FakeServer(failures)
    for steps in (range(10, 50, 10), range(22, 45, 2), range(25, 60, 5)):
        write(tmp_path, steps)
        assert send(tmp_path, server) == DONE
        found = {name: sorted(points) for name, points in server.history().items()}
        assert found == load_metrics(Files.of(tmp_path).journal)
    sent = len(server.points)
    assert send(tmp_path, server) == DONE and len(server.points) == sent
    assert Upload.read(Files.of(tmp_path).upload, "uri").late == {"loss": set(), "lr": set()}


def test_the_usual_resume_asks_for_no_history(tmp_path: Path) -> None:
    server = FakeServer()
    for steps in (range(1, 40), range(20, 60)):
        write(tmp_path, steps)
        assert send(tmp_path, server) == DONE
    assert "steps" not in server.order


def test_the_end_of_a_run_that_is_told_to_stop_comes_first(tmp_path: Path) -> None:
    """It may be killed before all is sent."""
    write(tmp_path, range(1, 10))
    server = FakeServer()
    assert send(tmp_path, server, "KILLED") == DONE
    assert server.order == ["open", "end", "send"]


def test_missing_package_ends_the_process_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mlflow(self: Any, *, resume: bool) -> dict[str, int]:
        raise ModuleNotFoundError("No module named 'mlflow'")

    monkeypatch.setattr(FakeRemote, "open", no_mlflow)
    assert send(tmp_path, FakeServer()) == UNUSABLE
    assert Upload.read(Files.of(tmp_path).upload, "uri").error == "No module named 'mlflow'"


def test_values_are_sent_while_training_runs(tmp_path: Path) -> None:
    FakeRemote.server = server = FakeServer(failures=0.3)
    over = threading.Event()
    ending = Ending(lambda: ("KILLED", 7) if over.is_set() else None, NEVER_S)
    results: list[int] = []
    sender = threading.Thread(
        target=lambda: results.append(Uploader(Files.of(tmp_path), job(), "uri", ending).run()), daemon=True
    )
    sender.start()
    pause = threading.Event()
    for step in range(3):
        write(tmp_path, [step])
        for _ in range(3000):
            if len(server.points) == 2 * (step + 1):
                break
            pause.wait(0.01)
        assert server.history() == load_metrics(Files.of(tmp_path).journal)
        assert server.status == "RUNNING"
    write(tmp_path, [1, 2, 3], start=0.5)
    over.set()
    sender.join(30)
    assert results == [DONE]
    assert server.history()["loss"] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.5)]
    assert server.status == "KILLED"


def test_end_of_training_is_the_jobs_word_or_the_trainers_death(tmp_path: Path) -> None:
    files = Files.of(tmp_path)
    parent = os.getppid()
    running = job().model_copy(update={"pid": parent})
    running.write(files.job)
    assert end_of_training(files, parent)() is None
    running.model_copy(update={"status": "KILLED", "end_ms": 9}).write(files.job)
    assert end_of_training(files, parent)() == ("KILLED", 9)
    another = running.model_copy(update={"status": "FINISHED", "end_ms": 9, "pid": 1})
    another.write(files.job)  # not this trainer's word
    assert end_of_training(files, parent)() is None
    found = end_of_training(files, os.getpid())()  # not the parent
    assert found is not None and found[0] == "FAILED"


def test_an_ended_job_without_a_word_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert already_ended(job().model_copy(update={"status": "FINISHED", "end_ms": 9}), 10) == ("FINISHED", 9)
    for lives, status in ((False, "FAILED"), (True, None), (None, None)):
        monkeypatch.setattr(Job, "trainer_lives", lambda self, lives=lives: lives)
        assert already_ended(job(), 10) == (status, 10)


def test_time_is_up_whatever_hangs() -> None:
    program = (
        "import threading; from megatron_mhar.tracking.uploader import Ending\n"
        "ending = Ending(lambda: ('FAILED', 0), 0.2)\n"
        "lock = threading.Lock(); lock.acquire(); lock.acquire()"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=30).returncode == uploader_module.TIMED_OUT
