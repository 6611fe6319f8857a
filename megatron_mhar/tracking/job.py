"""What tracking keeps in a run folder, beside the journal: who this training job is and how far it was sent.

::

    metrics.jsonl          the journal
    tracking/job.json      the job: its key, names, parameters and status; written by the trainer
    tracking/upload.json   how far the MLflow run has got; written by the one process that holds the lock
    tracking/lock          held by the process that sends
    tracking/uploader.log  what that process had to say
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import psutil
from pydantic import BaseModel, ValidationError

from megatron_mhar.errors import UserError
from megatron_mhar.run_files import RunFiles
from megatron_mhar.tracking.journal import read_journal

logger = logging.getLogger(__name__)

_SQLITE = re.compile(r"(?P<scheme>sqlite(\+\w+)?:///)(?P<path>[^?]+)(?P<options>\?.*)?")

EndStatus = Literal["FINISHED", "FAILED", "KILLED"]
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


class Files(NamedTuple):
    """Where tracking's files of one run lie."""

    journal: Path
    job: Path
    upload: Path
    lock: Path
    log: Path

    @classmethod
    def of(cls, run_dir: Path) -> Files:
        """The files of a run folder; nothing is made."""
        folder = run_dir / "tracking"
        return cls(
            journal=RunFiles(run_dir).journal,
            job=folder / "job.json",
            upload=folder / "upload.json",
            lock=folder / "lock",
            log=folder / "uploader.log",
        )


class Job(BaseModel):
    """One training job: the same ``run_key``, and so the same MLflow run, over all its restarts."""

    run_key: str
    name: str
    run_dir: str
    uri: str
    experiment: str
    params: dict[str, str]
    request_timeout_s: int
    drain_timeout_s: float
    start_ms: int
    status: Status = "RUNNING"
    end_ms: int | None = None
    host: str
    pid: int
    pid_started: float

    @classmethod
    def read(cls, path: Path) -> Job:
        """The job in a file.

        Raises:
            UserError: the file is missing or holds no job.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; a run folder written by `mhar train` has one") from None
        except (OSError, ValidationError) as error:
            raise UserError(f"{path}: not a readable tracking job: {first_line(error)}") from None

    def write(self, path: Path) -> None:
        """Replace the file as a whole, also over a power cut."""
        _replace(path, self.model_dump_json(indent=1), durable=True)

    def trainer_lives(self) -> bool | None:
        """Whether the training process runs; None where this cannot be seen (it was started on another host)."""
        if self.host != socket.gethostname():
            return None
        try:
            return abs(psutil.Process(self.pid).create_time() - self.pid_started) < 1
        except psutil.NoSuchProcess:
            return False


class Upload(BaseModel):
    """How far a job's MLflow run has got. A cache: the server is asked again by whoever sends next."""

    uri: str
    run_id: str | None = None
    marks: dict[str, int] = {}  # metric -> highest step that the server has
    late: dict[str, set[int]] = {}  # metric -> steps below that which it lacks
    ended: bool = False  # the run's end status has been set
    error: str | None = None

    @classmethod
    def read(cls, path: Path, uri: str) -> Upload:
        """The state for ``uri`` in a file; an empty one where the file is missing, damaged or about another server."""
        with contextlib.suppress(OSError, ValidationError):
            upload = cls.model_validate_json(path.read_bytes())
            if upload.uri == uri:
                return upload
        return cls(uri=uri)

    def write(self, path: Path) -> None:
        """Replace the file as a whole."""
        _replace(path, self.model_dump_json(indent=1), durable=False)


class Locked(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a file for the block; the system frees it should the process die.

    Raises:
        Locked: another process holds it (never with ``wait``).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise Locked from None
        except OSError as error:
            # Some cluster file systems are mounted without locks; two senders are unlikely, no tracking would be sure.
            logger.warning("%s: no file locks here (%s), going on without", path, error)
        yield
    finally:
        os.close(fd)


class Count(NamedTuple):
    """Values of a journal, each (metric, step) once."""

    sent: int
    pending: int


def count(journal: Path, upload: Upload) -> Count:
    """How many values of a journal the server of ``upload`` has, and how many it lacks.

    Raises:
        UserError: there is no such file.
    """
    logged: dict[str, set[int]] = {}
    for entry in read_journal(journal):
        for name in entry.metrics:
            logged.setdefault(name, set()).add(entry.step)
    pending = 0
    for name, steps in logged.items():
        mark, late = upload.marks.get(name, -1), upload.late.get(name, ())
        pending += sum(step > mark or step in late for step in steps)
    return Count(sum(map(len, logged.values())) - pending, pending)


def absolute_uri(uri: str) -> str:
    """A tracking URI that means the same from every working directory (a sqlite file's path may be relative)."""
    match = _SQLITE.fullmatch(uri)
    if match is None or match["path"] == ":memory:":
        return uri
    return f"{match['scheme']}{Path(match['path']).absolute()}{match['options'] or ''}"


def sqlite_path(uri: str) -> Path | None:
    """The file of a sqlite URI; None for every other URI."""
    match = _SQLITE.fullmatch(uri)
    return Path(match["path"]) if match and match["path"] != ":memory:" else None


def shown(uri: str) -> str:
    """A URI as it may be printed and sent: without user and password."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else uri


def first_line(error: BaseException) -> str:
    """An error in one line of bounded length, the same each time it happens, without passwords."""
    lines = str(error).strip().splitlines()
    text = re.sub(r" object at 0x[0-9a-f]+", "", lines[0]) if lines else type(error).__name__
    text = re.sub(r"://[^/\s]*@", "://", text)
    # What mlflow, requests and urllib3 wrap around the one thing that went wrong.
    if cause := re.search(r"\(Caused by (\w+)\((['\"])(.*)\2\)", text):
        text = f"{cause[1]}: {cause[3]}"
    return text if len(text) <= 400 else f"{text[:150]} ... {text[-245:]}"  # the cause often stands last


def _replace(path: Path, text: str, *, durable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(new, path)
