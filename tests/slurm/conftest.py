"""The job files: tests of the cluster are collected where there is one (make test-slurm), the others everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.jobs import Job, Outcome

collect_ignore = [] if os.environ.get("TEST_CLUSTER") else ["test_cluster.py", "test_faults.py", "test_soak.py"]


@pytest.fixture(scope="session")
def undisturbed(groups: None, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What the run of :func:`tests.slurm.jobs.settings` comes to when nothing happens to it.

    Checkpoints are read within process groups, those of ``groups``.
    """
    from tests.slurm.jobs import train_undisturbed

    return train_undisturbed(corpus, tmp_path_factory.mktemp("torchrun"))


@pytest.fixture(scope="session")
def output_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all jobs' runs: one MLflow store, which takes its time to be made."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def job(corpus: Path, tmp_path: Path, output_dir: Path) -> Iterator[Job]:
    """A job in a folder of its own; whatever a test leaves of it is ended."""
    from tests.slurm.jobs import Job

    job = Job(corpus, tmp_path, output_dir, tmp_path.name)
    yield job
    job.end()
