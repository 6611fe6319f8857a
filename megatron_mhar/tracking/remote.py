"""One training job's run in MLflow: found or made, described, filled and ended. The only file that imports mlflow."""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_mhar.tracking.job import EndStatus, Job, locked, shown, sqlite_path

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUN_KEY_TAG = "mhar.run_key"
CHANGED_PARAMS_TAG = "mhar.changed_params"
MAX_METRICS = 1000  # MLflow's limits: values a request,
MAX_PARAMS = 100  # parameters a request,
MAX_PARAM_LENGTH = 6000  # characters of a parameter
MAX_TAG_LENGTH = 5000  # and of a tag, on every kind of server


class Point(NamedTuple):
    """One value of one metric."""

    name: str
    step: int
    value: float
    time_ms: int


class RunUnusable(Exception):
    """The run exists but cannot be written; the message says what to do."""


def missing_package(uri: str) -> str | None:
    """What to install before ``uri`` can be used; None where everything is there. Imports nothing."""
    if importlib.util.find_spec("mlflow") is None:
        need = "mlflow" if _is_database(uri) else "mlflow-skinny (or mlflow)"
        return f"mlflow is not installed; install {need}"
    if _is_database(uri) and any(importlib.util.find_spec(name) is None for name in ("sqlalchemy", "alembic")):
        return (
            f"mlflow-skinny cannot open the database {shown(uri)}; install mlflow (the full package) "
            "or set tracking.uri to an MLflow server"
        )
    return None


class RemoteRun:
    """The MLflow run of a job. Every method asks the server, within ``request_timeout_s`` for each request.

    Any method may raise whatever MLflow, the network or a database raises; calling it again later is safe.

    Args:
        job: whose run.
        uri: MLflow server or store.
        run_id: the run, where it is known from earlier.
    """

    def __init__(self, job: Job, uri: str, run_id: str | None) -> None:
        self.job = job
        self.uri = uri
        self.run_id = run_id
        self._experiment_id = ""
        self._client: MlflowClient | None = None

    @property
    def client(self) -> MlflowClient:
        """MLflow's client, made (and mlflow imported) when first needed."""
        if self._client is None:
            self._client = _client(self.uri, self.job.request_timeout_s)
        return self._client

    def open(self, *, resume: bool) -> dict[str, int]:
        """Find or make the run, complete its parameters and, with ``resume``, set it running again.

        Returns:
            {metric: highest step that the server has}
        """
        run = self._run()
        if run.info.lifecycle_stage != "active":
            raise RunUnusable(f"MLflow run {run.info.run_id} was deleted on the server; restore it there to go on")
        self.run_id, self._experiment_id = run.info.run_id, run.info.experiment_id
        self._log_params(run)
        if resume and run.info.status != "RUNNING":
            self.client.update_run(run.info.run_id, status="RUNNING")
        return {metric.key: metric.step for metric in run.to_proto().data.metrics}

    def steps(self, name: str) -> set[int]:
        """Every step at which the server has a value of a metric; a request a few ten thousand values."""
        return {metric.step for metric in self.client.get_metric_history(self._opened(), name)}

    def send(self, points: Sequence[Point]) -> None:
        """Log at most ``MAX_METRICS`` values in one request."""
        from mlflow.entities import Metric

        metrics = [Metric(point.name, point.value, point.time_ms, point.step) for point in points]
        self.client.log_batch(self._opened(), metrics=metrics, synchronous=True)

    def end(self, status: EndStatus, end_ms: int) -> None:
        """Set the run's end status. Empty twins, made by a request whose answer came too late, are removed."""
        self.client.set_terminated(self._opened(), status=status, end_time=end_ms)
        for run in self._mine(self._experiment_id):
            if run.info.run_id != self.run_id and run.info.lifecycle_stage == "active" and not run.data.metrics:
                self.client.delete_run(run.info.run_id)

    def _opened(self) -> str:
        if self.run_id is None:
            raise RuntimeError("open() comes first")
        return self.run_id

    def _run(self) -> Run:
        from mlflow.exceptions import MlflowException

        if self.run_id is not None:
            try:
                return self.client.get_run(self.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                self.run_id = None  # the store was emptied or replaced
        experiment = self._experiment()
        # The answer to an earlier create_run may have been lost: look before making one.
        runs = self._mine(experiment)
        if runs:
            return next((run for run in runs if run.data.metrics), runs[0])
        tags = {
            RUN_KEY_TAG: self.job.run_key,
            "mhar.run_dir": self.job.run_dir[:MAX_TAG_LENGTH],
            "mlflow.source.name": "mhar train",
            "mlflow.user": _user(),
        }
        return self.client.create_run(experiment, start_time=self.job.start_ms, run_name=self.job.name, tags=tags)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self.job.experiment
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            database = sqlite_path(self.uri)
            # MLflow would put a local store's artifacts below the working directory of whoever came first.
            artifacts = None if database is None else (database.parent / "mlartifacts").as_uri()
            try:
                return self.client.create_experiment(name, artifact_location=artifacts)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = self.client.get_experiment_by_name(name)  # another job was quicker
        if experiment is None or experiment.lifecycle_stage != "active":
            raise RunUnusable(
                f"MLflow experiment {name!r} was deleted on the server; restore it there or set tracking.experiment"
            )
        return experiment.experiment_id

    def _mine(self, experiment: str) -> list[Run]:
        from mlflow.entities import ViewType

        return list(
            self.client.search_runs(
                [experiment],
                filter_string=f"tags.`{RUN_KEY_TAG}` = '{self.job.run_key}'",
                run_view_type=ViewType.ALL,
                order_by=["attributes.start_time ASC"],
                max_results=10,
            )
        )

    def _log_params(self, run: Run) -> None:
        """Log parameters that the run lacks. MLflow refuses to change one: what a restart changed goes to a tag."""
        from mlflow.entities import Param

        wanted = {name: cut(value, MAX_PARAM_LENGTH) for name, value in self.job.params.items()}
        known = run.data.params
        new = [Param(name, value) for name, value in wanted.items() if name not in known]
        for start in range(0, len(new), MAX_PARAMS):
            self.client.log_batch(run.info.run_id, params=new[start : start + MAX_PARAMS], synchronous=True)
        changed = {name: value for name, value in wanted.items() if known.get(name, value) != value}
        text = cut(json.dumps(changed, sort_keys=True), MAX_TAG_LENGTH) if changed else None
        if text is not None and run.data.tags.get(CHANGED_PARAMS_TAG) != text:
            self.client.set_tag(run.info.run_id, CHANGED_PARAMS_TAG, text)


def cut(text: str, length: int) -> str:
    """A text of at most ``length`` characters; one that was longer ends in '...'."""
    return text if len(text) <= length else text[: length - 3] + "..."


def _client(uri: str, request_timeout_s: int) -> MlflowClient:
    # Read by mlflow at each request. Its own retries would block for minutes and, worse, repeat a create_run whose
    # answer was lost; ours look first. Its telemetry would try to reach the internet from compute nodes.
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(request_timeout_s)
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ["MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER"] = "false"
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    database = sqlite_path(uri)
    if database is not None and not (database.is_file() and database.stat().st_size):
        _create_sqlite(database)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _create_sqlite(database: Path) -> None:
    """Make the store under another name and move it into place: a process that is killed leaves no half-made tables."""
    from mlflow import MlflowClient

    with locked(database.with_name(f".{database.name}.lock"), wait=True):
        if database.is_file() and database.stat().st_size:
            return  # made by another job while this one waited
        new = database.with_name(f".{database.name}.new")
        new.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"sqlite:///{new}").search_experiments(max_results=1)
        os.replace(new, database)


def _is_database(uri: str) -> bool:
    return uri.startswith(("sqlite", "mysql", "postgresql", "mssql"))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        return str(os.getuid())
