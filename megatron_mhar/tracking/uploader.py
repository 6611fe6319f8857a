"""The process that sends a run's journal to MLflow, so that neither mlflow nor a slow server is felt by training.

Started by :class:`megatron_mhar.tracking.tracker.Tracker` and :func:`megatron_mhar.tracking.sync.sync`:

    python -m megatron_mhar.tracking.uploader RUN_DIR --trainer PID
    python -m megatron_mhar.tracking.uploader RUN_DIR --sync SECONDS [--uri URI]

It lives as long as the trainer, its parent process, and at most ``drain_timeout_s`` longer; with ``--sync`` until all
is sent, at most SECONDS. A trainer that died without a word leaves its MLflow run FAILED.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_mhar.errors import UserError
from megatron_mhar.tracking.job import EndStatus, Files, Job, Locked, Upload, first_line, locked, shown
from megatron_mhar.tracking.journal import Tail
from megatron_mhar.tracking.remote import MAX_METRICS, Point, RemoteRun

logger = logging.getLogger("megatron_mhar.tracking.uploader")

# Exit codes.
DONE, UNUSABLE, TIMED_OUT, LOCKED = 0, 1, 3, 4

POLL_S = 0.2  # between looks at the journal and at the trainer
SEND_INTERVAL_S = 1.0  # between requests while training runs and all is well
MAX_BACKOFF_S = 30.0  # between attempts while the server fails,
MAX_FINAL_BACKOFF_S = 1.0  # and once training has ended
MAX_WAITING = 200_000  # values held in memory; a longer backlog stays in the journal until these are sent


class Ending:
    """Watches for the end of training and then bounds this process's life.

    Args:
        find: the end status and time (milliseconds since 1970) once training has ended, else None.
        timeout_s: seconds from then until the process is ended, whatever it is doing.
    """

    def __init__(self, find: Callable[[], tuple[EndStatus | None, int] | None], timeout_s: float) -> None:
        self.ended = threading.Event()
        self.status: EndStatus | None = None
        self.end_ms = 0
        self.half_s = float("inf")  # monotonic time when half of the last wait is over
        self._find = find
        self._timeout_s = timeout_s
        self._look()
        threading.Thread(target=self._watch, name="ending", daemon=True).start()

    def _look(self) -> None:
        if (found := self._find()) is not None:
            self.status, self.end_ms = found
            self.half_s = time.monotonic() + self._timeout_s / 2
            self.ended.set()

    def _watch(self) -> None:
        while not self.ended.is_set():
            time.sleep(POLL_S)
            self._look()
        time.sleep(self._timeout_s)
        os._exit(TIMED_OUT)  # the only way out of a request, a name look-up or a file system that hangs


class Uploader:
    """Sends a journal to a job's MLflow run, each (metric, step) once, for as long as it takes.

    Of a step that was logged again after a resume MLflow keeps what it was sent first (it would show both); what is
    still waiting is sent with its last value.

    Values go in rising steps, so that a metric's highest step tells what the server has. After a resume with other
    intervals the journal has late values too: at new steps below one that was logged before. Which of these the server
    has is asked, once a metric and connection.
    """

    def __init__(self, files: Files, job: Job, uri: str, ending: Ending) -> None:
        self._upload_file = files.upload
        self._upload = Upload.read(files.upload, uri)
        self._upload.error = None
        self._upload.ended = False
        self._upload.late = {}  # found again in the journal
        self._save()
        self._tail = Tail(files.journal)
        self._remote = RemoteRun(job, uri, self._upload.run_id)
        self._ending = ending
        self._waiting: dict[tuple[str, int], Point] = {}
        self._logged: dict[str, set[int]] = {}  # steps of each metric that were read from the journal
        self._highest: dict[str, int] = {}  # of these
        self._there: dict[str, set[int]] = {}  # steps that the server has, of metrics with late values
        self._connected = False

    def run(self) -> int:
        """Send until training has ended and everything is sent. Returns an exit code."""
        backoff = POLL_S
        next_attempt = 0.0
        while True:
            # Asked before the journal is read: what was logged before the end is then sent before the end.
            ended = self._ending.ended.is_set()
            self._read()
            if ended:
                backoff = min(backoff, MAX_FINAL_BACKOFF_S)
                next_attempt = min(next_attempt, time.monotonic() + backoff)
            if time.monotonic() >= next_attempt:
                try:
                    if self._round(ended):
                        return DONE
                    backoff = POLL_S
                    hurry = ended or len(self._waiting) >= MAX_METRICS
                    next_attempt = time.monotonic() + (0 if hurry else SEND_INTERVAL_S)
                except ImportError as error:
                    self._failed(error)
                    return UNUSABLE
                except Exception as error:  # whatever a server, a proxy or a database does: later is another chance
                    self._failed(error)
                    next_attempt = time.monotonic() + backoff
                    backoff = min(2 * backoff, MAX_BACKOFF_S)
            if next_attempt > time.monotonic():
                time.sleep(POLL_S)

    def _read(self) -> None:
        """Take new values from the journal into ``_waiting``, which stays in rising steps."""
        last = next(reversed(self._waiting))[1] if self._waiting else -1
        rising = True
        for entry in self._tail.read(MAX_WAITING - len(self._waiting)) if len(self._waiting) < MAX_WAITING else ():
            rising = rising and entry.step >= last
            last = entry.step
            for name, value in entry.metrics.items():
                if self._note(name, entry.step):
                    self._waiting[name, entry.step] = Point(name, entry.step, value, entry.time_ms)
        if not rising:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[0][1]))

    def _note(self, name: str, step: int) -> bool:
        """Note what the journal has. Whether the server may lack it."""
        logged = self._logged.setdefault(name, set())
        if step not in logged:
            logged.add(step)
            if step < self._highest.get(name, -1):
                self._upload.late.setdefault(name, set()).add(step)
            else:
                self._highest[name] = step
        return step > self._upload.marks.get(name, -1) or step in self._upload.late.get(name, ())

    def _drop_late(self) -> None:
        """Leave out late values that the server has."""
        for name, steps in self._upload.late.items():
            if steps and name not in self._there:
                self._there[name] = self._remote.steps(name)
            for step in steps & self._there.get(name, set()):
                steps.remove(step)
                self._waiting.pop((name, step), None)

    def _round(self, ended: bool) -> bool:
        """One attempt at one request's worth of work. True once nothing is left to do."""
        if not self._connected:
            self._connect(resume=not ended)
            self._read()
        self._drop_late()
        hurry = time.monotonic() > self._ending.half_s or self._ending.status == "KILLED"
        if ended and not self._upload.ended and (not self._waiting or hurry):
            # After the metrics; or earlier where they may take longer than there is time.
            if self._ending.status is not None:
                self._remote.end(self._ending.status, self._ending.end_ms)
            self._upload.ended = True
            self._save()
        batch = list(itertools.islice(self._waiting.values(), MAX_METRICS))
        if batch:
            self._remote.send(batch)
            for name, step, *_ in batch:
                self._upload.marks[name] = max(step, self._upload.marks.get(name, -1))
                self._upload.late.get(name, set()).discard(step)
                self._there.get(name, set()).add(step)
                del self._waiting[name, step]
            self._save()
        return self._upload.ended and not self._waiting

    def _connect(self, *, resume: bool) -> None:
        marks = self._remote.open(resume=resume)
        if any(step > marks.get(name, -1) for name, step in self._upload.marks.items()):
            self._tail.rewind()  # the store lost what it had, or is another one: start over
            self._logged, self._highest, self._upload.late = {}, {}, {}
        self._there = {}
        self._upload.marks = marks
        self._waiting = {
            (name, step): point
            for (name, step), point in self._waiting.items()
            if step > marks.get(name, -1) or step in self._upload.late.get(name, ())
        }
        self._upload.run_id = self._remote.run_id
        if self._upload.error is not None:
            logger.info("connected again")
        self._upload.error = None
        self._save()
        self._connected = True

    def _failed(self, error: Exception) -> None:
        # The request may have reached the server all the same: connecting again asks what it has.
        self._connected = False
        text = first_line(error)
        if text != self._upload.error:
            logger.warning("%s: %s", shown(self._upload.uri), text)
            self._upload.error = text
            self._save()

    def _save(self) -> None:
        try:
            self._upload.write(self._upload_file)
        except OSError as error:
            logger.warning("%s: %s", self._upload_file, error)


def end_of_training(files: Files, trainer: int) -> Callable[[], tuple[EndStatus, int] | None]:
    """A function that says how and when (milliseconds) the trainer, process ``trainer``, ended; None while it runs.

    The trainer must be the parent process: once it is gone the system gives its children to another parent.
    """

    def find() -> tuple[EndStatus, int] | None:
        now_ms = time.time_ns() // 1_000_000
        alive = os.getppid() == trainer
        with contextlib.suppress(UserError):
            job = Job.read(files.job)
            if job.status != "RUNNING" and job.pid == trainer:
                return job.status, job.end_ms or now_ms
        return None if alive else ("FAILED", now_ms)

    return find


def already_ended(job: Job, now_ms: int) -> tuple[EndStatus | None, int]:
    """End status (None: leave it alone) and time of a job that this process does not belong to."""
    if job.status != "RUNNING":
        return job.status, job.end_ms or now_ms
    return ("FAILED" if job.trainer_lives() is False else None), now_ms


def main() -> int:
    """Entry point; see the module's description."""
    parser = argparse.ArgumentParser(prog="python -m megatron_mhar.tracking.uploader")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--uri")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--trainer", type=int, metavar="PID")
    mode.add_argument("--sync", type=float, metavar="SECONDS")
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if arguments.trainer is not None:  # training comes first; who calls mhar sync waits for this
        os.nice(10)
    files = Files.of(arguments.run_dir)
    try:
        job = Job.read(files.job)
    except UserError as error:
        logger.error("%s", error)
        return UNUSABLE
    uri = arguments.uri or job.uri
    if arguments.sync is not None:
        end = already_ended(job, time.time_ns() // 1_000_000)
        ending = Ending(lambda: end, arguments.sync)
    else:
        # A scheduler signals every process of a job; training decides when it ends, and this process ends after it.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        ending = Ending(end_of_training(files, arguments.trainer), job.drain_timeout_s)
    while True:
        try:
            with locked(files.lock):
                return Uploader(files, job, uri, ending).run()
        except Locked:
            if arguments.sync is not None:
                return LOCKED
            time.sleep(POLL_S)  # the process of an earlier start is still sending; it ends within its own time-out


if __name__ == "__main__":
    sys.exit(main())
