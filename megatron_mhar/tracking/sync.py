"""Sends a run's journal to MLflow from a shell: after a server was down, or to another server."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import NamedTuple

from megatron_mhar.errors import UserError
from megatron_mhar.tracking.job import Files, Job, Upload, absolute_uri, count, shown
from megatron_mhar.tracking.remote import missing_package
from megatron_mhar.tracking.tracker import start_uploader
from megatron_mhar.tracking.uploader import DONE, LOCKED, TIMED_OUT


class SyncReport(NamedTuple):
    """What a server has of a run's metric values (each metric and step once) and what it lacks."""

    sent: int
    pending: int
    run_id: str | None
    error: str | None  # why not everything was sent; None where it was


def sync(run_dir: Path, *, timeout_s: float, uri: str | None = None) -> SyncReport:
    """Send what the job's MLflow run lacks, and set the run's end status where training has ended.

    Training that is known to have died (its process ran on this host) is marked FAILED. Nothing is sent twice.

    Args:
        run_dir: folder of a run, finished or not.
        timeout_s: seconds after which this returns, whatever the server does.
        uri: MLflow server or store; the run's own by default. The job has one run on each.

    Raises:
        UserError: the folder holds no run, or a package is missing.
    """
    files = Files.of(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give a run folder, as written by `mhar train`")
    if not files.journal.is_file():
        raise UserError(f"{files.journal}: no such file; {run_dir} is not a run folder, as written by `mhar train`")
    job = Job.read(files.job)
    uri = absolute_uri(uri or job.uri)
    missing = missing_package(uri)
    if missing is not None:
        raise UserError(missing)
    try:
        process = start_uploader(run_dir, "--sync", str(timeout_s), "--uri", uri)
    except OSError as error:
        raise UserError(f"{files.log}: the sending process cannot be started: {error}") from None
    code = TIMED_OUT
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=timeout_s)
    finally:  # also after Ctrl-C
        process.kill()
        process.wait()
    upload = Upload.read(files.upload, uri)
    sent, pending = count(files.journal, upload)
    reason = None
    if code == LOCKED:
        reason = "the run's own process is sending at this moment; try again once it has ended"
    elif code != DONE:
        reason = upload.error or f"{shown(uri)} took more than {timeout_s:g} s; see {files.log}"
    return SyncReport(sent, pending, upload.run_id, reason)
