from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_mhar.errors import UserError
from megatron_mhar.tracking.job import (
    Count,
    Files,
    Job,
    Locked,
    Upload,
    absolute_uri,
    count,
    first_line,
    locked,
    shown,
    sqlite_path,
)
from megatron_mhar.tracking.journal import Journal


def make_job(**changes: object) -> Job:
    fields: dict[str, object] = {
        "run_key": "key",
        "name": "name",
        "run_dir": "/runs/name",
        "uri": "http://localhost:1",
        "experiment": "experiment",
        "params": {"a": "1"},
        "request_timeout_s": 1,
        "drain_timeout_s": 1.0,
        "start_ms": 1000,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": psutil.Process().create_time(),
    }
    return Job.model_validate(fields | changes)


def test_job_comes_back(tmp_path: Path) -> None:
    path = Files.of(tmp_path).job
    make_job().write(path)
    make_job(status="FINISHED", end_ms=5).write(path)
    assert Job.read(path) == make_job(status="FINISHED", end_ms=5)
    assert [file.name for file in path.parent.iterdir()] == ["job.json"]


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"run_key": '])
def test_missing_or_damaged_job_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "job.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        Job.read(path)


def test_trainer_is_told_by_host_process_and_its_start() -> None:
    assert make_job().trainer_lives() is True
    assert make_job(pid_started=psutil.Process().create_time() - 100).trainer_lives() is False
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert make_job(pid=ended.pid).trainer_lives() is False
    assert make_job(host="elsewhere").trainer_lives() is None


def test_upload_is_kept_for_its_own_server_only(tmp_path: Path) -> None:
    path = tmp_path / "upload.json"
    assert Upload.read(path, "http://a") == Upload(uri="http://a")
    state = Upload(uri="http://a", run_id="run", marks={"loss": 7}, ended=True, error="none")
    state.write(path)
    assert Upload.read(path, "http://a") == state
    assert Upload.read(path, "http://b") == Upload(uri="http://b")
    path.write_text("{")
    assert Upload.read(path, "http://a") == Upload(uri="http://a")


def test_lock_shuts_others_out_and_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "tracking" / "lock"
    program = (
        "import sys, time; from pathlib import Path; from megatron_mhar.tracking.job import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(Locked), locked(path):
        pass
    holder.kill()
    holder.wait()
    with locked(path), pytest.raises(Locked), locked(path):
        pass
    with locked(path):
        pass


def test_count_takes_each_value_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in (10, 20, 30, 40, 20, 30, 40, 50):  # resumed after step 10
        journal.write(step, {"loss": 1.0, "lr": 1.0})
    journal.write(50, {"valid": 1.0})
    upload = Upload(uri="http://a")
    assert count(tmp_path / "metrics.jsonl", upload) == Count(sent=0, pending=11)
    upload.marks = {"loss": 30, "lr": 20}
    assert count(tmp_path / "metrics.jsonl", upload) == Count(sent=5, pending=6)
    upload.marks = {"loss": 50, "lr": 50, "valid": 50}
    assert count(tmp_path / "metrics.jsonl", upload) == Count(sent=11, pending=0)
    journal.write(35, {"loss": 1.0})
    upload.late = {"loss": {35}}
    assert count(tmp_path / "metrics.jsonl", upload) == Count(sent=11, pending=1)


def test_sqlite_uris_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_uri("sqlite:///runs/a.db") == f"sqlite:///{tmp_path}/runs/a.db"
    assert absolute_uri("sqlite+pysqlite:///a.db?timeout=9") == f"sqlite+pysqlite:///{tmp_path}/a.db?timeout=9"
    for uri in ("sqlite:////abs/a.db", "sqlite:///:memory:", "http://host:5000", "databricks", "postgresql://u@h/db"):
        assert absolute_uri(uri) == uri
    assert sqlite_path("sqlite:////abs/a.db?timeout=9") == Path("/abs/a.db")
    assert sqlite_path("sqlite:///a.db") == Path("a.db")
    assert sqlite_path("sqlite:///:memory:") is None
    assert sqlite_path("http://host/sqlite:///") is None


def test_passwords_are_not_shown() -> None:
    assert shown("https://me:secret@host:5000/path") == "https://host:5000/path"
    for text in ("http://host:5000", "sqlite:////a/b.db", "plain text @ home", "http://[broken"):
        assert shown(text) == text


def test_an_error_is_one_short_line() -> None:
    assert first_line(ValueError("first\nsecond")) == "first"
    assert first_line(ValueError()) == "ValueError"
    assert first_line(OSError("<Connection object at 0x7f12> failed")) == "<Connection> failed"
    wrapped = (
        "API request to http://me:secret@host:5000/api failed with exception HTTPConnectionPool(host='host', "
        "port=5000): Max retries exceeded with url: /api (Caused by NewConnectionError("
        "\"HTTPConnection(host='host', port=5000): "
        'Failed to establish a new connection: [Errno 111] Connection refused"))'
    )
    assert first_line(OSError(wrapped)) == (
        "NewConnectionError: HTTPConnection(host='host', port=5000): "
        "Failed to establish a new connection: [Errno 111] Connection refused"
    )
    assert first_line(OSError("GET http://me:se:cr@t@host/api failed")) == "GET http://host/api failed"
    long = first_line(ValueError("begin" + "x" * 10_000 + "refused"))
    assert len(long) <= 400 and long.startswith("begin") and long.endswith("refused")
