"""What a GPU's compiler has against the kernels, found without a GPU."""

import os
import subprocess
import sys

from tests.launch import ROOT


def test_every_kernel_is_taken_by_the_compiler_at_every_width_and_number_of_heads():
    """The interpreter takes more: a product of tiles of eight channels, for one."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.routing.compile_worker"], cwd=ROOT,
                          env=environment, capture_output=True, text=True, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *refused, last = done.stdout.splitlines()
    assert not refused
    kernels = ("add", "couple", "couple_normed", "null", "own", "pull", "pull_group", "query", "read", "read_group")
    assert last.endswith(f"launches of {list(kernels)}")
