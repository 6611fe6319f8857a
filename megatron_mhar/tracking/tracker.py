"""What the trainer's one tracking rank holds: writes the journal, and has another process send it to MLflow.

Nothing here raises, waits for a server or imports mlflow, :meth:`Tracker.close` excepted, which waits for a bounded
time. What goes wrong is logged once and training goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psutil

import megatron_mhar
from megatron_mhar.errors import UserError
from megatron_mhar.tracking.job import EndStatus, Files, Job, Upload, absolute_uri, count, first_line, shown
from megatron_mhar.tracking.journal import Journal
from megatron_mhar.tracking.remote import missing_package

if TYPE_CHECKING:
    from megatron_mhar.config.schema import TrackingConfig

logger = logging.getLogger(__name__)

# Slurm kills what has not ended 30 s (KillWait) after SIGTERM, and the checkpoint comes first. What is left over is
# sent by the next start, or by mhar sync.
STOPPED_DRAIN_S = 10.0


class Tracker:
    """Journal and MLflow run of one training job; the same run again when the job is restarted in its run folder.

    Use it on one rank, as a context manager: an exception marks the run FAILED (an interrupt: KILLED).

    Args:
        run_dir: the run's folder; holds ``metrics.jsonl`` and ``tracking/``.
        name: name of the MLflow run.
        params: the resolved config; nested mappings become dotted names. A value that a restart changed is
            shown in the tag ``mhar.changed_params``, as MLflow keeps the first.
        config: server, experiment and time-outs. Not enabled: the journal alone is written.
        default_store: folder of ``mlflow.db``, used where ``config.uri`` is not given.
    """

    def __init__(
        self, run_dir: Path, *, name: str, params: Mapping[str, object], config: TrackingConfig, default_store: Path
    ) -> None:
        self._run_dir = run_dir.absolute()
        self._files = Files.of(self._run_dir)
        self._drain_timeout_s = config.drain_timeout_s
        self._warned: set[str] = set()
        self._closed = False
        self._enabled = config.enabled
        self._job: Job | None = None
        self._journal: Journal | None = None
        self._process: subprocess.Popen[bytes] | None = None
        with self._never_raising("journal"):
            self._journal = Journal(self._files.journal)
        with self._never_raising("job"):
            uri = config.uri or f"sqlite:///{default_store.absolute() / 'mlflow.db'}"
            self._job = self._begin(name, params, config, absolute_uri(uri))
            if self._enabled:
                self._start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a step: a line in the journal, some 20 microseconds. Steps count from 0.

        A value is a Python or NumPy number, NaN and infinities allowed; anything else is dropped with a warning.
        """
        if self._journal is not None and metrics:
            with self._never_raising("log"):
                self._journal.write(step, metrics)
        if self._process is not None and self._process.poll() is not None:
            self._warn(
                "uploader",
                f"its process ended with status {self._process.returncode}, see {self._files.log}; "
                f"metrics stay in {self._files.journal}",
            )

    def close(self, status: EndStatus) -> None:
        """End the MLflow run, wait at most ``drain_timeout_s`` for what is left to be sent, and log how much was.

        A run that was told to stop (KILLED) waits for :data:`STOPPED_DRAIN_S` at most. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if status == "KILLED":
            self._drain_timeout_s = min(self._drain_timeout_s, STOPPED_DRAIN_S)
        with self._never_raising("close"):
            if self._journal is not None:
                self._journal.close()
            if self._job is not None:
                self._job.status, self._job.end_ms = status, _now_ms()
                self._job.write(self._files.job)
            if self._process is not None and self._job is not None:
                self._drain(self._process)
                self._report(self._job)
        self._process = self._journal = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close("FINISHED")
        else:
            self.close("KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED")

    def _begin(self, name: str, params: Mapping[str, object], config: TrackingConfig, uri: str) -> Job:
        """Write the job of this start; its key is that of the first."""
        key, start_ms = uuid.uuid4().hex, _now_ms()
        if self._files.job.exists():
            try:
                earlier = Job.read(self._files.job)
                key, start_ms = earlier.run_key, earlier.start_ms
            except UserError as error:
                self._warn("earlier", f"{error}; a new MLflow run is begun")
        job = Job(
            run_key=key,
            name=name,
            run_dir=str(self._run_dir),
            uri=uri,
            experiment=config.experiment,
            params={param: shown(value) for param, value in _flat(params)},
            request_timeout_s=config.request_timeout_s,
            drain_timeout_s=config.drain_timeout_s,
            start_ms=start_ms,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_started=psutil.Process().create_time(),
        )
        job.write(self._files.job)
        return job

    def _start(self) -> None:
        assert self._job is not None
        missing = missing_package(self._job.uri)
        if missing is not None:
            self._warn("package", f"{missing}; metrics stay in {self._files.journal}")
            return
        self._process = start_uploader(self._run_dir, "--trainer", str(os.getpid()))

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._drain_timeout_s
        if process.poll() is not None:  # killed by someone: another try
            self._start()
            process = self._process or process
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)  # it ignores SIGTERM
            process.wait()

    def _report(self, job: Job) -> None:
        upload = Upload.read(self._files.upload, job.uri)
        sent, pending = count(self._files.journal, upload)
        if not pending and upload.ended:
            logger.info("MLflow: %d metric values sent to %s (run %s)", sent, shown(job.uri), upload.run_id)
        else:
            logger.warning(
                "MLflow: %d metric values sent to %s, %d wait in %s (%s); `mhar sync %s` sends them",
                sent, shown(job.uri), pending, self._files.journal,
                upload.error or f"no end within {self._drain_timeout_s:g} s", self._run_dir,
            )  # fmt: skip

    def _warn(self, kind: str, message: str) -> None:
        """Log a warning, once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "tracking: %s; training goes on. `mhar sync %s` sends what is in the journal", message, self._run_dir
            )

    @contextlib.contextmanager
    def _never_raising(self, kind: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._warn(kind, f"{type(error).__name__}: {first_line(error)}")


def start_uploader(run_dir: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start the process that sends a run's journal; it writes to ``tracking/uploader.log``.

    Raises:
        OSError: the process cannot be started or its log not be opened.
    """
    log = Files.of(run_dir).log
    log.parent.mkdir(parents=True, exist_ok=True)
    package = str(Path(megatron_mhar.__file__).parents[1])
    paths = [path for path in (os.environ.get("PYTHONPATH"), package) if path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_mhar.tracking.uploader", str(run_dir), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C and a launcher's signals to the group are for training alone
        )


def _flat(params: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
