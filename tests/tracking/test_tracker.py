from __future__ import annotations

import logging
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from click.testing import CliRunner

from megatron_mhar.cli.sync import sync as sync_command
from megatron_mhar.config.schema import TrackingConfig
from megatron_mhar.errors import UserError
from megatron_mhar.tracking import tracker as tracker_module
from megatron_mhar.tracking.job import Files, Job, Upload, locked
from megatron_mhar.tracking.journal import load_metrics
from megatron_mhar.tracking.sync import SyncReport, sync
from megatron_mhar.tracking.tracker import Tracker

Make = Callable[..., Any]  # a maker of a store or a proxy, see conftest.py
ROOT = Path(__file__).parents[2]
STEPS = 300
BACK_IN_TIME = ("down", "500")  # faults that are over before training ends
TOO_LATE = ("hang", "429")  # and after
FAULTS = BACK_IN_TIME + TOO_LATE


def start(
    run_dir: Path,
    *,
    uri: str | None = None,
    params: dict[str, object] | None = None,
    drain_timeout_s: float = 60,
    enabled: bool = True,
) -> Tracker:
    config = TrackingConfig(uri=uri, request_timeout_s=1, drain_timeout_s=drain_timeout_s, enabled=enabled)
    params = {"model": {"hidden_size": 8}, "lr": 0.1} if params is None else params
    return Tracker(run_dir, name=run_dir.name, params=params, config=config, default_store=run_dir.parent)


def log(tracker: Tracker, steps: range) -> float:
    """Log steps as a trainer does; returns the mean seconds a step inside tracking."""
    spent = 0.0
    for step in steps:
        metrics = {f"train/{name}": step + 0.5 for name in ("loss", "lr", "grad_norm", "tokens_per_second", "memory")}
        began = time.perf_counter()
        tracker.log(step, metrics)
        spent += time.perf_counter() - began
    return spent / len(steps)


def upload(run_dir: Path) -> Upload:
    files = Files.of(run_dir)
    return Upload.read(files.upload, Job.read(files.job).uri)


class Recorder(logging.Handler):
    """Keeps messages where caplog cannot: in a fixture of a whole class."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def assert_same(store: Any, run_id: str, run_dir: Path) -> None:
    """The store has the journal's values, each once."""
    for name, values in load_metrics(Files.of(run_dir).journal).items():
        points = store.points(run_id, name)
        assert [step for step, _ in points] == [step for step, _ in values]
        assert [value for _, value in points] == pytest.approx([value for _, value in values], nan_ok=True)


class TestLocalStore:
    def test_one_run_over_restarts(
        self, eventually: Make, store_dir: Path, local_store: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        run_dir = store_dir / "run"
        with caplog.at_level(logging.INFO), start(run_dir) as tracker:
            tracker.log(0, {"nan": math.nan, "valid/loss": 3.0})
            log(tracker, range(0, 400))
            for step in range(0, 400, 100):
                tracker.log(step, {"seldom": 1.0})
        (key,) = {Job.read(Files.of(run_dir).job).run_key}
        (run,) = local_store.runs(key)
        assert run.info.status == "FINISHED" and run.info.run_name == "run"
        assert run.data.params == {"model.hidden_size": "8", "lr": "0.1"}
        assert_same(local_store, run.info.run_id, run_dir)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert f"2006 metric values sent to sqlite:///{store_dir}/mlflow.db" in caplog.messages[0]
        before = {name: local_store.points(run.info.run_id, name) for name in run.data.metrics}

        tracker = start(run_dir, params={"model": {"hidden_size": 8}, "lr": 0.2, "new": None})
        eventually(lambda: local_store.runs(key)[0].info.status == "RUNNING", what="status RUNNING again")
        log(tracker, range(350, 500))
        for step in range(250, 500, 50):  # with a smaller interval than before
            tracker.log(step, {"seldom": 1.0})
        with pytest.raises(KeyboardInterrupt), tracker:
            raise KeyboardInterrupt
        (run,) = local_store.runs(key)
        assert run.info.status == "KILLED"
        assert run.data.params == {"model.hidden_size": "8", "lr": "0.1", "new": "null"}
        assert run.data.tags["mhar.changed_params"] == '{"lr": "0.2"}'
        assert_same(local_store, run.info.run_id, run_dir)
        assert local_store.points(run.info.run_id, "train/loss")[:400] == before["train/loss"]

    def test_two_jobs_make_one_new_store(self, make_store: Make, tmp_path: Path) -> None:
        trackers = [start(tmp_path / name) for name in ("one", "two")]
        for tracker in trackers:
            log(tracker, range(50))
        for tracker in trackers:
            tracker.close("FINISHED")
            tracker.close("FAILED")  # the first word counts
        store = make_store(f"sqlite:///{tmp_path}/mlflow.db")
        for name in ("one", "two"):
            (run,) = store.runs(Job.read(Files.of(tmp_path / name).job).run_key)
            assert (run.info.run_name, run.info.status) == (name, "FINISHED")
            assert_same(store, run.info.run_id, tmp_path / name)
        assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "mlflow.db", ".mlflow.db.lock"}

    def test_crashed_trainer_leaves_a_failed_run_and_no_process(
        self, eventually: Make, store_dir: Path, local_store: Any
    ) -> None:
        run_dir = store_dir / "run"
        program = (
            "import sys, time; from pathlib import Path\n"
            "from megatron_mhar.config.schema import TrackingConfig\n"
            "from megatron_mhar.tracking.tracker import Tracker\n"
            "run = Path(sys.argv[1])\n"
            "tracker = Tracker(run, name='run', params={}, config=TrackingConfig(), default_store=run.parent)\n"
            "for step in range(100): tracker.log(step, {'loss': 1.0})\n"
            "print(tracker._process.pid, flush=True); time.sleep(600)"
        )
        trainer = subprocess.Popen(
            [sys.executable, "-c", program, str(run_dir)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout is not None
        uploader = psutil.Process(int(trainer.stdout.readline()))
        eventually(lambda: upload(run_dir).marks, what="values of a running trainer")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            uploader.send_signal(number)  # a scheduler's warning is for training alone
        time.sleep(0.5)
        assert uploader.status() != psutil.STATUS_ZOMBIE
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        eventually(lambda: not uploader.is_running(), what="end of the sending process")
        (run,) = local_store.runs(Job.read(Files.of(run_dir).job).run_key)
        assert run.info.status == "FAILED"
        assert local_store.points(run.info.run_id, "loss") == [(step, 1.0) for step in range(100)]

    def test_killed_sender_is_told_and_replaced_at_the_end(
        self, store_dir: Path, local_store: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        run_dir = store_dir / "run"
        tracker = start(run_dir)
        assert tracker._process is not None
        tracker._process.kill()
        tracker._process.wait()
        log(tracker, range(20))
        assert len(caplog.messages) == 1
        assert "ended with status -9" in caplog.messages[0] and f"`mhar sync {run_dir}`" in caplog.messages[0]
        tracker.close("FINISHED")
        (run,) = local_store.runs(Job.read(Files.of(run_dir).job).run_key)
        assert run.info.status == "FINISHED"
        assert_same(local_store, run.info.run_id, run_dir)


def test_a_run_that_is_told_to_stop_does_not_wait_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm kills it 30 s after SIGTERM, which is the usual longest wait for a server."""
    monkeypatch.setattr(tracker_module, "STOPPED_DRAIN_S", 0.5)
    tracker = start(tmp_path / "run", drain_timeout_s=60)
    assert tracker._process is not None
    tracker._process.send_signal(signal.SIGSTOP)
    log(tracker, range(10))
    began = time.monotonic()
    tracker.close("KILLED")
    assert time.monotonic() - began < 0.5 + 5


def test_sender_that_does_not_react_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = start(tmp_path / "run", drain_timeout_s=0.5)
    process = tracker._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    log(tracker, range(10))
    began = time.monotonic()
    tracker.close("FINISHED")
    assert time.monotonic() - began < 0.5 + 5
    assert process.returncode == -signal.SIGKILL
    (message,) = caplog.messages
    assert "50 wait in" in message and "no end within 0.5 s" in message


class Outcome(NamedTuple):
    """What happened to a run whose server failed from the start."""

    seconds_a_step: float
    error: str  # what the sending process met
    runs_before: int  # runs on the server while it failed
    close_s: float
    messages: list[str]
    synced: SyncReport | None
    run_dir: Path
    refused: int


@pytest.fixture(scope="module")
def outcomes(
    eventually: Make,
    make_store: Make,
    make_proxy: Make,
    mlflow_server: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Outcome]]:
    """A server that fails in each way from the start. All at once, as each process takes seconds to import mlflow."""
    folder = tmp_path_factory.mktemp("faults")
    store = make_store(mlflow_server)
    proxies = {fault: make_proxy(mlflow_server, fault) for fault in FAULTS}
    dirs = {fault: folder / fault for fault in FAULTS}
    handler = Recorder()
    logger = logging.getLogger("megatron_mhar.tracking")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    trackers = {
        fault: start(dirs[fault], uri=proxies[fault].uri, drain_timeout_s=60 if fault in BACK_IN_TIME else 1)
        for fault in FAULTS
    }
    errors = {
        fault: eventually(lambda fault=fault: upload(dirs[fault]).error, what=f"an error of {fault}")
        for fault in FAULTS
    }
    seconds = {fault: log(trackers[fault], range(STEPS)) for fault in FAULTS}
    keys = {fault: Job.read(Files.of(dirs[fault]).job).run_key for fault in FAULTS}
    before = {fault: len(store.runs(keys[fault])) for fault in FAULTS}
    refused = {fault: proxies[fault].refused for fault in FAULTS}
    for fault in BACK_IN_TIME:
        proxies[fault].heal()
    for fault in BACK_IN_TIME:
        eventually(
            lambda fault=fault: upload(dirs[fault]).marks.get("train/loss") == STEPS - 1,
            what=f"values after {fault}",
        )
    result = {}
    for fault in (*TOO_LATE, *BACK_IN_TIME):
        handler.messages.clear()
        began = time.monotonic()
        trackers[fault].close("FINISHED")
        close_s = time.monotonic() - began
        messages = list(handler.messages)
        synced = None
        if fault in TOO_LATE:
            proxies[fault].heal()
            synced = sync(dirs[fault], timeout_s=60)
        result[fault] = Outcome(
            seconds[fault], errors[fault], before[fault], close_s, messages, synced, dirs[fault], refused[fault]
        )
    yield result
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)
    for proxy in proxies.values():
        proxy.close()


class TestFaults:
    """Whatever the server does, training goes on, and the metrics arrive once it is back."""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_training_does_not_feel_it(self, outcomes: dict[str, Outcome], fault: str) -> None:
        outcome = outcomes[fault]
        assert outcome.seconds_a_step < 1e-3
        told = {"down": "refused", "hang": "timed out", "429": "429", "500": "500"}
        assert told[fault] in outcome.error
        assert outcome.runs_before == 0
        assert fault == "down" or outcome.refused > 0

    @pytest.mark.parametrize("fault", BACK_IN_TIME)
    def test_values_arrive_by_themselves(self, outcomes: dict[str, Outcome], fault: str) -> None:
        outcome = outcomes[fault]
        assert len(outcome.messages) == 1
        assert f"{5 * STEPS} metric values sent" in outcome.messages[0]

    @pytest.mark.parametrize("fault", TOO_LATE)
    def test_training_ends_in_time_and_says_what_waits(self, outcomes: dict[str, Outcome], fault: str) -> None:
        outcome = outcomes[fault]
        assert outcome.close_s < 1 + 5  # seconds of a busy machine
        (message,) = outcome.messages
        assert f"{5 * STEPS} wait in {outcome.run_dir}/metrics.jsonl" in message
        assert f"`mhar sync {outcome.run_dir}`" in message
        assert outcome.synced is not None
        assert (outcome.synced.sent, outcome.synced.pending, outcome.synced.error) == (5 * STEPS, 0, None)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_server_ends_with_one_whole_run(
        self, make_store: Make, outcomes: dict[str, Outcome], fault: str, mlflow_server: str
    ) -> None:
        store = make_store(mlflow_server)
        (run,) = store.runs(Job.read(Files.of(outcomes[fault].run_dir).job).run_key)
        assert run.info.status == "FINISHED"
        assert run.data.params == {"model.hidden_size": "8", "lr": "0.1"}
        assert_same(store, run.info.run_id, outcomes[fault].run_dir)

    def test_sync_again_changes_nothing(
        self, make_store: Make, outcomes: dict[str, Outcome], mlflow_server: str
    ) -> None:
        outcome = outcomes["429"]
        assert sync(outcome.run_dir, timeout_s=60) == outcome.synced
        assert outcome.synced is not None and outcome.synced.run_id is not None
        assert_same(make_store(mlflow_server), outcome.synced.run_id, outcome.run_dir)


def test_lost_answers_make_no_second_run(
    make_store: Make, make_proxy: Make, mlflow_server: str, tmp_path: Path
) -> None:
    proxy = make_proxy(mlflow_server, "lost")
    tracker = start(tmp_path / "run", uri=proxy.uri)
    tracker.log(0, {"nan": math.nan, "plus": math.inf, "minus": -math.inf})
    log(tracker, range(10))
    tracker.close("FINISHED")
    proxy.close()
    store = make_store(mlflow_server)
    (run,) = store.runs(Job.read(Files.of(tmp_path / "run").job).run_key)
    assert proxy.fault is None and proxy.creations == 1  # the answer was dropped, and no second run asked for
    assert run.info.status == "FINISHED"
    assert len(store.points(run.info.run_id, "train/loss")) == 10
    assert math.isnan(store.points(run.info.run_id, "nan")[0][1])
    assert store.points(run.info.run_id, "plus")[0][1] > 1e308 and store.points(run.info.run_id, "minus")[0][1] < -1e308


class TestNeverRaises:
    def test_disabled_tracking_keeps_the_journal_alone(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO), start(tmp_path / "run", enabled=False) as tracker:
            log(tracker, range(10))
            assert tracker._process is None
        assert len(load_metrics(tmp_path / "run" / "metrics.jsonl")["train/loss"]) == 10
        assert caplog.messages == []
        assert not (tmp_path / "mlflow.db").exists()
        assert Job.read(Files.of(tmp_path / "run").job).status == "FINISHED"

    def test_missing_package_is_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tracker_module, "missing_package", lambda uri: "mlflow is not installed; install mlflow")
        with start(tmp_path / "run") as tracker:
            log(tracker, range(10))
            assert tracker._process is None
        (message,) = caplog.messages
        assert "install mlflow" in message and f"`mhar sync {tmp_path}/run`" in message
        assert len(load_metrics(tmp_path / "run" / "metrics.jsonl")["train/loss"]) == 10

    def test_run_folder_that_cannot_be(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").touch()
        with start(tmp_path / "file" / "run") as tracker:
            log(tracker, range(10))
        assert len(caplog.messages) == 2  # the journal, the job
        assert all(str(tmp_path / "file") in message for message in caplog.messages)

    def test_process_that_cannot_start(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
        with start(tmp_path / "run") as tracker:
            log(tracker, range(10))
        assert len(caplog.messages) == 1 and "no-python" in caplog.messages[0]

    def test_wrong_values_are_told_once_and_dropped(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with start(tmp_path / "run", enabled=False) as tracker:
            for step in range(5):
                tracker.log(step, {"loss": "low"})  # type: ignore[dict-item]
            tracker.log(5, {"loss": 1.0})
            tracker.log(6, {})
        (message,) = caplog.messages
        assert "metric loss: str given" in message
        assert load_metrics(tmp_path / "run" / "metrics.jsonl") == {"loss": [(5, 1.0)]}

    @pytest.mark.parametrize(("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
    def test_exceptions_pass_and_are_noted(self, tmp_path: Path, error: type[BaseException], status: str) -> None:
        with pytest.raises(error), start(tmp_path / "run", enabled=False):
            raise error
        assert Job.read(Files.of(tmp_path / "run").job).status == status

    def test_passwords_are_no_parameters(self, tmp_path: Path) -> None:
        start(tmp_path / "run", enabled=False, params={"tracking": {"uri": "https://me:secret@host"}}).close("FINISHED")
        assert Job.read(Files.of(tmp_path / "run").job).params == {"tracking.uri": "https://host"}


class TestSync:
    def test_command_sends_runs_to_another_store(self, store_dir: Path, local_store: Any) -> None:
        """Runs of machines without a server, gathered later."""
        (store_dir / "offline").mkdir()
        run_dir = store_dir / "offline" / "run"
        with start(run_dir, enabled=False) as tracker:
            log(tracker, range(10))
        uri = f"sqlite:///{store_dir}/mlflow.db"
        result = CliRunner().invoke(sync_command, [str(run_dir), "--uri", uri])
        assert result.exit_code == 0, result.output
        (run,) = local_store.runs(Job.read(Files.of(run_dir).job).run_key)
        assert result.output == f"{run_dir}: 50 metric values in MLflow run {run.info.run_id}\n"
        assert run.info.status == "FINISHED"
        assert_same(local_store, run.info.run_id, run_dir)

    def test_command_says_what_waits_and_fails(self, make_proxy: Make, tmp_path: Path) -> None:
        proxy = make_proxy("http://unused", "hang")
        with start(tmp_path / "run", enabled=False) as tracker:
            log(tracker, range(10))
        began = time.monotonic()
        result = CliRunner().invoke(sync_command, [str(tmp_path / "run"), "--uri", proxy.uri, "--timeout", "2"])
        assert time.monotonic() - began < 2 + 2
        proxy.close()
        assert result.exit_code == 1
        assert result.output.startswith(f"{tmp_path}/run: 0 metric values sent, 50 wait: ")

    def test_run_that_is_being_sent_is_left_alone(self, tmp_path: Path) -> None:
        start(tmp_path / "run", enabled=False).close("FINISHED")
        with locked(Files.of(tmp_path / "run").lock):
            report = sync(tmp_path / "run", timeout_s=30)
        assert report.error is not None and "try again" in report.error

    @pytest.mark.parametrize("given", ["nothing", "no journal", "no job"])
    def test_folders_that_are_no_runs_are_named(self, tmp_path: Path, given: str) -> None:
        run_dir = tmp_path / "run"
        if given != "nothing":
            run_dir.mkdir()
        if given == "no job":
            (run_dir / "metrics.jsonl").touch()
        with pytest.raises(UserError, match=str(run_dir)):
            sync(run_dir, timeout_s=1)
        assert not (run_dir / "tracking").exists()
