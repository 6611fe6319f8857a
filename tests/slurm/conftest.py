"""The job files: tests of the cluster are collected where there is one (make test-slurm), the others everywhere."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("SLURM_CONF") else ["test_cluster.py"]
