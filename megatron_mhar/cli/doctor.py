"""``mhar doctor``: what this machine has, and what a run here will use."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Literal

import click
import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_mhar.quiet import quiet_imports

State = Literal["ok", "missing", "broken"]

_INSTALL = "make venv"
_INSTALL_GPU = "pip install --no-build-isolation -c constraints.txt '.[gpu]'"
_INSTALL_APEX = "NVIDIA's apex comes with NGC images or is built from source; pip's apex is another project"


@dataclass(frozen=True)
class Check:
    """One row: a thing looked for, what was found, and what to do where it is not in order."""

    group: str
    name: str
    state: State
    found: str
    advice: str = ""
    core: bool = False  # no run works without it


@dataclass(frozen=True)
class Library:
    """A library that is looked up by importing what a run would import."""

    group: str
    name: str
    modules: tuple[str, ...]
    distribution: str | None  # whose version is shown
    advice: str
    core: bool = False


LIBRARIES = (
    Library("core", "torch", ("torch",), "torch", _INSTALL, core=True),
    Library("core", "numpy", ("numpy",), "numpy", _INSTALL, core=True),
    Library("core", "megatron-core", ("megatron.core",), "megatron-core", _INSTALL, core=True),
    Library("optional", "Triton", ("triton",), "triton", "comes with torch's CUDA builds for Linux"),
    Library("optional", "Transformer Engine", ("transformer_engine.pytorch",), "transformer-engine", _INSTALL_GPU),
    Library(
        "optional",
        "apex",
        ("apex.optimizers", "amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"),
        None,
        _INSTALL_APEX,
    ),
    Library("optional", "DALI", ("nvidia.dali",), "nvidia-dali-cuda130", _INSTALL_GPU),
    Library("optional", "MLflow", ("mlflow",), "mlflow-skinny", _INSTALL),
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def doctor(as_json: bool) -> None:
    """Show what this machine has and what a run here will use.

    Every library is imported in a process of its own, so that one that crashes is a row and not the end. Exits with 1
    if something is broken without which no run works, else with 0: optional parts may be missing.

    \b
    Examples:
      mhar doctor
      mhar doctor --json
    """
    with Console(stderr=True).status("Looking around (imports take some seconds) ..."):
        checks = examine()
    healthy = all(check.state == "ok" for check in checks if check.core)
    if as_json:
        click.echo(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print(checks, healthy)
    if not healthy:
        raise SystemExit(1)


def examine() -> list[Check]:
    """All rows, in the order shown. Takes some seconds; changes nothing."""
    with ThreadPoolExecutor(max_workers=max(2, min(8, os.cpu_count() or 2))) as pool:
        libraries = list(pool.map(check_library, LIBRARIES))
    checks = [*_machine(), *libraries]
    # What follows imports the core into this process: only when it is known not to crash.
    if all(check.state == "ok" for check in libraries if check.core):
        with quiet_imports():
            checks += _devices()
            checks += _run_here()
    order = ["machine", "core", "devices", "optional", "a run here uses"]
    return sorted(checks, key=lambda check: order.index(check.group))


def check_library(library: Library) -> Check:
    """Import a library's modules, each in a process of its own."""
    answers = {module: probe_import(module) for module in library.modules}
    state: State = "ok"
    found = (library.distribution and _version(library.distribution)) or ", ".join(answers)
    failed = {module: answer for module, answer in answers.items() if answer[0] != "ok"}
    if failed:
        state = "broken" if any(state == "broken" for state, _ in failed.values()) else "missing"
        reasons = dict.fromkeys(reason for _, reason in failed.values())
        found = "; ".join(f"{reason} ({', '.join(m for m in failed if failed[m][1] == reason)})" for reason in reasons)
    elif library.name == "MLflow":
        return _mlflow(library, found)
    return Check(library.group, library.name, state, found, "" if state == "ok" else library.advice, library.core)


def _mlflow(library: Library, version: str) -> Check:
    if _version("mlflow") is not None:
        return Check(library.group, library.name, "ok", f"{version}, full")
    advice = "for a local sqlite store and its page: pip install -c constraints.txt '.[tracking]'"
    return Check(library.group, library.name, "ok", f"{version}, skinny: needs a tracking server", advice)


_PROBE = """
import importlib.util, sys
try:
    if importlib.util.find_spec("torch"):
        import torch  # extension modules need its libraries loaded first
    importlib.import_module(sys.argv[1])
except BaseException as error:
    first = str(error).strip().split("\\n")[0]
    print(f"\\nPROBE {type(error).__name__}: {first}")
else:
    print("\\nPROBE ok")
"""


def probe_import(module: str, timeout_s: float = 180) -> tuple[State, str]:
    """Whether a module can be imported, tried in a process of its own; and if not, why in a line."""
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError) as error:
        return "broken", f"{type(error).__name__}: {error}"
    if spec is None:
        return "missing", "not installed"
    try:
        result = subprocess.run(
            [sys.executable, "-c", _PROBE, module],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return "broken", f"importing {module} does not end within {timeout_s:g} s"
    answers = [line.removeprefix("PROBE ") for line in result.stdout.splitlines() if line.startswith("PROBE ")]
    if not answers:
        how = f"code {result.returncode}"
        if result.returncode < 0:
            how = signal.Signals(-result.returncode).name
        return "broken", f"importing {module} ends the process ({how})"
    if answers[-1] == "ok":
        return "ok", "found"
    if answers[-1].startswith("ModuleNotFoundError") and f"'{module}'" in answers[-1]:
        if spec.origin is None:  # a namespace that several projects share
            return "missing", "not installed"
        return "missing", f"not part of the {top} that is installed"
    return "broken", answers[-1]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    right = (3, 12) <= sys.version_info < (3, 14)
    advice = "" if right else "Python 3.12 or 3.13: make venv PYTHON=/path/to/python3.12"
    yield Check("machine", "Python", "ok" if right else "broken", f"{version} ({sys.executable})", advice, core=True)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("machine", "CPU cores", "ok", f"{usable} usable of {os.cpu_count()}")
    memory = psutil.virtual_memory()
    yield Check("machine", "memory", "ok", f"{_gib(memory.available)} free of {_gib(memory.total)}")
    disk = shutil.disk_usage(Path.cwd())
    yield Check("machine", "disk here", "ok", f"{_gib(disk.free)} free of {_gib(disk.total)}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _devices() -> Iterator[Check]:
    """Driver, CUDA, GPUs and collectives."""
    import torch

    from megatron_mhar import platform

    driver = _driver_version()
    cuda = torch.version.cuda
    if platform.HAS_GPU:
        yield Check("devices", "CUDA", "ok", f"{cuda}, driver {driver or 'of unknown version'}")
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            found = f"{gpu.name}, {_gib(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
            yield Check("devices", f"GPU {index}", "ok", found)
    elif cuda is None:
        state: State = "missing" if driver is None else "broken"
        advice = "" if driver is None else f"driver {driver} is here: install torch's CUDA build"
        yield Check("devices", "CUDA", state, "torch is built without CUDA", advice)
    elif driver is None:
        yield Check(
            "devices", "CUDA", "missing", f"no NVIDIA driver (torch is built for CUDA {cuda}): runs use the CPU"
        )
    else:
        advice = f"a driver that supports CUDA {cuda}, and GPUs visible to this process (CUDA_VISIBLE_DEVICES)"
        yield Check("devices", "CUDA", "broken", f"driver {driver}, but torch (CUDA {cuda}) sees no GPU", advice)

    if torch.distributed.is_nccl_available():
        yield Check("devices", "NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield Check("devices", "NCCL", "missing", "torch is built without NCCL", "needed for more than one GPU")
    if torch.distributed.is_gloo_available():
        yield Check("devices", "gloo", "ok", "built into torch", core=True)
    else:
        yield Check("devices", "gloo", "missing", "torch is built without gloo", _INSTALL, core=True)


def _driver_version() -> str | None:
    """Version of the NVIDIA driver, or None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = result.stdout.split()
    return lines[0] if lines else None


def _run_here() -> Iterator[Check]:
    """What "auto" in a config means on this machine."""
    group = "a run here uses"
    try:
        from megatron_mhar import platform
        from megatron_mhar.model.build import resolve_layers
        from megatron_mhar.model.fusions import served_by
        from megatron_mhar.routing import resolve_backend

        yield Check(group, "device", "ok", platform.device_name())
        yield Check(group, "collectives", "ok", platform.BACKEND)
        layers = resolve_layers("auto")
        yield Check(group, "layers", "ok", layers)
        backend = resolve_backend("auto", "cuda" if platform.HAS_GPU else "cpu")
        yield Check(group, "routing backend", "ok", backend)
        for operation, library in served_by(layers, backend).items():
            yield Check(group, operation, "ok", library)
        yield _fp8(group, layers)
        if platform.HAS_GPU:
            yield Check(group, "CUDA graphs", "ok", "training.cuda_graph: full_iteration")
        else:
            yield Check(group, "CUDA graphs", "missing", "no GPU")
    except Exception as error:  # an optional library that a run imports too may raise anything
        yield Check(group, "a run", "broken", f"{type(error).__name__}: {error}".splitlines()[0], _INSTALL, core=True)


def _fp8(group: str, layers: str) -> Check:
    """Which FP8 recipes run here."""
    if layers == "local":
        return Check(group, "FP8", "missing", "it needs Transformer Engine's layers, and those here are local")
    from megatron_mhar.model.fp8 import recipes_here

    reasons = recipes_here()
    able = [recipe for recipe, reason in reasons.items() if not reason]
    unable = "; ".join(f"not {recipe}: {reason}" for recipe, reason in reasons.items() if reason)
    return Check(group, "FP8", "ok" if able else "missing", ", ".join(able) or "no recipe runs on this GPU", unable)


def _print(checks: list[Check], healthy: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a log file has no width to keep to
    styles = {"ok": "green", "missing": "yellow", "broken": "bold red"}
    for group, rows in groupby(checks, key=lambda check: check.group):
        table = Table(title=group, title_justify="left", title_style="bold", show_header=False, expand=False)
        table.add_column(min_width=21)
        table.add_column(min_width=7)
        table.add_column(overflow="fold")
        for row in rows:
            found = Text(row.found)
            if row.advice:
                found.append(f"\n-> {row.advice}", style="dim")
            table.add_row(row.name, Text(row.state, style=styles[row.state]), found)
        console.print(table)
    console.print("Ready to train." if healthy else Text("Not ready: mend the broken rows first.", style="bold red"))
