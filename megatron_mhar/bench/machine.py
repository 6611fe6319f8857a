"""What a figure was measured on: the header of every benchmark and of every run of the GPU tests."""

from __future__ import annotations

import os
import platform as python_platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from megatron_mhar import platform

_LIBRARIES = ("torch", "triton", "megatron-core", "transformer-engine", "flash-linear-attention", "fast-attnres",
              "liger-kernel")  # fmt: skip
COMMIT_VARIABLE = "MHAR_COMMIT"


@dataclass(frozen=True)
class Machine:
    """Hardware, versions and the commit.

    Attributes:
        device: name of what is computed on.
        num_devices: how many of them the process sees.
        memory_bytes: of one; None on a CPU.
        driver: version of NVIDIA's driver.
        clocks: what the driver says of clocks, power and temperature as the benchmark begins, with units.
        cuda: version that torch was built for.
        python: version.
        versions: of the libraries that are installed.
        commit: what MHAR_COMMIT says, for copies without a git of their own; else that of the checkout, "-dirty" behind
            it if files differ; None if unknown.
    """

    device: str
    num_devices: int
    memory_bytes: int | None
    driver: str | None
    clocks: dict[str, str]
    cuda: str | None
    python: str
    versions: dict[str, str]
    commit: str | None

    def lines(self) -> list[str]:
        """For people to read."""
        count = f"{self.num_devices} x " if self.num_devices > 1 else ""
        memory = f", {self.memory_bytes / 2**30:.0f} GiB" if self.memory_bytes else ""
        driver = f", driver {self.driver}" if self.driver else ""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"{count}{self.device}{memory}{driver}{f', CUDA {self.cuda}' if self.cuda else ''}, Python {self.python}",
            f"{versions}; commit {self.commit or 'unknown'}",
        ]
        if self.clocks:
            lines.append(", ".join(f"{name} {value}" for name, value in self.clocks.items()))
        return lines


def describe_machine() -> Machine:
    """What this process runs on."""
    gpu = platform.HAS_GPU
    return Machine(
        device=platform.device_name(),
        num_devices=torch.cuda.device_count() if gpu else 1,
        memory_bytes=torch.cuda.get_device_properties().total_memory if gpu else None,
        driver=next(iter(_smi("driver_version") or ()), None) if gpu else None,
        clocks=_clocks() if gpu else {},
        cuda=torch.version.cuda if gpu else None,
        python=python_platform.python_version(),
        versions={name: version for name in _LIBRARIES if (version := _version(name)) is not None},
        commit=_commit(),
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _clocks() -> dict[str, str]:
    names = {
        "clocks.sm": "SM clock", "clocks.max.sm": "of", "clocks.mem": "memory clock", "power.limit": "power limit",
        "temperature.gpu": "degrees C",
    }  # fmt: skip
    return dict(zip(names.values(), _smi(*names) or (), strict=False))


def _smi(*fields: str) -> list[str] | None:
    """Answers of nvidia-smi about this process's GPU, None where it cannot be asked."""
    uuid = getattr(torch.cuda.get_device_properties(), "uuid", None)
    one = [f"--id=GPU-{uuid}"] if uuid is not None else []
    answer = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", *one])
    values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer else []
    return values if len(values) == len(fields) else None


def _commit() -> str | None:
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    root = Path(__file__).parents[2]
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"]) if (root / ".git").exists() else None
    if not commit:
        return None
    changed = _output(["git", "--no-optional-locks", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-dirty" if changed else commit


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
