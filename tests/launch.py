"""Start a worker script on several ranks and read what its rank 0 wrote: one launch a world size serves many tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def launch(worker: str, world_size: int, out: Path, *arguments: str, timeout_s: int = 300) -> dict:
    """Run ``tests/<worker>`` under torchrun; it must save a dict with torch.save to ``out``.

    Ranks meet at a free port of this machine and are ended when one of them fails.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}",
        str(ROOT / "tests" / worker), str(out), *arguments,
    ]  # fmt: skip
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{worker} on {world_size} ranks failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return torch.load(out, weights_only=False)
