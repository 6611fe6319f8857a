from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_mhar.tracking.job import Job
from megatron_mhar.tracking.remote import Point, RemoteRun, RunUnusable, cut, missing_package


def job(**changes: Any) -> Job:
    fields = {
        "run_key": "key",
        "name": "name",
        "run_dir": "/runs/name",
        "uri": "",
        "experiment": "experiment",
        "params": {"a": "1"},
        "request_timeout_s": 1,
        "drain_timeout_s": 1.0,
        "start_ms": 1000,
        "host": "host",
        "pid": 1,
        "pid_started": 0.0,
    }
    return Job.model_validate(fields | changes)


@pytest.fixture
def uri(store_dir: Path) -> str:
    return f"sqlite:///{store_dir / 'mlflow.db'}"


def test_run_is_made_described_filled_and_ended(uri: str, store_dir: Path, local_store: Any) -> None:
    remote = RemoteRun(job(), uri, None)
    assert remote.open(resume=True) == {}
    remote.send([Point("loss", step, value, 5) for step, value in enumerate((1.5, math.nan, math.inf, -math.inf))])
    remote.send([Point("valid/loss", 2, 0.25, 6)])
    remote.end("FINISHED", 9000)
    (run,) = local_store.runs("key")
    assert run.info.run_id == remote.run_id
    assert (run.info.run_name, run.info.status) == ("name", "FINISHED")
    assert (run.info.start_time, run.info.end_time) == (1000, 9000)
    assert run.data.params == {"a": "1"}
    assert run.data.tags["mhar.run_dir"] == "/runs/name"
    largest = 1.7976931348623157e308
    assert [v for _, v in local_store.points(run.info.run_id, "loss") if not math.isnan(v)] == [1.5, largest, -largest]
    assert math.isnan(local_store.points(run.info.run_id, "loss")[1][1])
    assert RemoteRun(job(), uri, None).open(resume=False) == {"loss": 3, "valid/loss": 2}
    experiment = local_store.client.get_experiment(run.info.experiment_id)
    assert experiment.artifact_location == f"file://{store_dir}/mlartifacts"


def test_earlier_run_is_found_by_its_key_and_runs_again(uri: str, local_store: Any) -> None:
    first = RemoteRun(job(), uri, None)
    first.open(resume=True)
    first.end("FAILED", 9000)
    for known in (None, first.run_id, "0123456789abcdef0123456789abcdef"):
        again = RemoteRun(job(), uri, known)
        again.open(resume=True)
        assert again.run_id == first.run_id
        assert [run.info.status for run in local_store.runs("key")] == ["RUNNING"]
    RemoteRun(job(run_key="other"), uri, None).open(resume=True)
    assert len(local_store.runs("key")) == len(local_store.runs("other")) == 1


def test_params_of_any_number_and_length_are_set_once(uri: str, local_store: Any) -> None:
    params = {f"section.key_{i}": str(i) for i in range(250)} | {"long": "x" * 7000, "empty": ""}
    RemoteRun(job(params=params), uri, None).open(resume=True)
    (run,) = local_store.runs("key")
    assert run.data.params == params | {"long": "x" * 5997 + "..."}
    assert "mhar.changed_params" not in run.data.tags

    RemoteRun(job(params=params | {"section.key_7": "changed", "new": "1"}), uri, None).open(resume=True)
    (run,) = local_store.runs("key")
    assert run.data.params == params | {"long": "x" * 5997 + "...", "new": "1"}
    assert json.loads(run.data.tags["mhar.changed_params"]) == {"section.key_7": "changed"}

    RemoteRun(job(params=dict.fromkeys(params, "y" * 100)), uri, None).open(resume=True)
    assert len(local_store.runs("key")[0].data.tags["mhar.changed_params"]) == 5000


def test_empty_twins_go_and_filled_ones_stay(uri: str, local_store: Any) -> None:
    """A create_run whose answer timed out may still be carried out later."""
    remote = RemoteRun(job(), uri, None)
    remote.open(resume=True)
    (run,) = local_store.runs("key")
    make = local_store.client.create_run
    late = make(run.info.experiment_id, start_time=1, tags={"mhar.run_key": "key"}).info.run_id
    filled = make(run.info.experiment_id, start_time=1, tags={"mhar.run_key": "key"}).info.run_id
    other = make(run.info.experiment_id, start_time=1, tags={"mhar.run_key": "another"}).info.run_id
    local_store.client.log_metric(filled, "loss", 1.0)
    remote.end("FINISHED", 9000)
    stages = {run.info.run_id: run.info.lifecycle_stage for run in local_store.runs("key")}
    assert stages == {remote.run_id: "active", late: "deleted", filled: "active"}
    assert local_store.client.get_run(other).info.lifecycle_stage == "active"
    # Whoever comes next without knowing the run takes the one with values.
    again = RemoteRun(job(), uri, None)
    assert again.open(resume=False) == {"loss": 0}
    assert again.run_id == filled


def test_deleted_run_or_experiment_is_not_brought_back(uri: str, local_store: Any) -> None:
    remote = RemoteRun(job(), uri, None)
    remote.open(resume=True)
    (run,) = local_store.runs("key")
    local_store.client.delete_run(run.info.run_id)
    for known in (None, remote.run_id):
        with pytest.raises(RunUnusable, match=f"{run.info.run_id} was deleted"):
            RemoteRun(job(), uri, known).open(resume=True)
    local_store.client.delete_experiment(run.info.experiment_id)
    with pytest.raises(RunUnusable, match="'experiment' was deleted"):
        RemoteRun(job(run_key="other"), uri, None).open(resume=True)
    assert local_store.runs("other") == []


def test_missing_packages_are_named_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_package("sqlite:///a.db") is None
    find = importlib.util.find_spec
    absent = {"sqlalchemy"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    told = missing_package("sqlite:///a.db")
    assert told is not None and "mlflow-skinny cannot open" in told and "install mlflow" in told
    assert missing_package("http://host") is None
    absent.add("mlflow")
    assert missing_package("http://host") == "mlflow is not installed; install mlflow-skinny (or mlflow)"
    assert missing_package("sqlite:///a.db") == "mlflow is not installed; install mlflow"


def test_cut() -> None:
    assert cut("abcde", 5) == "abcde"
    assert cut("abcdef", 5) == "ab..."
