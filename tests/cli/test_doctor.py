"""``mhar doctor``: every state of a library, and one real look at this machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from megatron_mhar.cli import doctor
from megatron_mhar.cli.doctor import Check, Library, check_library, probe_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that this process and its children can import; torch is not among what they load."""
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("body", "state", "found"),
    [
        ("", "ok", "found"),
        ("print('PROBE of another kind')\nprint('chatter')", "ok", "found"),
        ("raise ImportError('libcudart.so.13: cannot open\\nsecond line')", "broken",
         "ImportError: libcudart.so.13: cannot open"),
        ("import not_there_at_all", "broken", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("raise SystemExit(3)", "broken", "SystemExit: 3"),
        ("raise RuntimeError", "broken", "RuntimeError: "),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "broken",
         "importing mhar_probe ends the process (SIGSEGV)"),
        ("import os\nos._exit(7)", "broken", "importing mhar_probe ends the process (code 7)"),
    ],
)  # fmt: skip
def test_states_of_a_module(package: Path, body: str, state: str, found: str) -> None:
    (package / "mhar_probe.py").write_text(body)
    assert probe_import("mhar_probe") == (state, found)


def test_module_that_hangs(package: Path) -> None:
    (package / "mhar_probe.py").write_text("import time\ntime.sleep(60)")
    assert probe_import("mhar_probe", timeout_s=1) == ("broken", "importing mhar_probe does not end within 1 s")


def test_module_that_is_not_there(package: Path) -> None:
    assert probe_import("mhar_no_such_module") == ("missing", "not installed")
    (package / "mhar_other").mkdir()
    assert probe_import("mhar_other.part") == ("missing", "not installed")
    (package / "mhar_other/__init__.py").write_text("")
    assert probe_import("mhar_other.part") == ("missing", "not part of the mhar_other that is installed")


def test_library_of_several_modules(package: Path) -> None:
    (package / "mhar_one.py").write_text("")
    (package / "mhar_two.py").write_text("1 / 0")

    def check(*modules: str) -> Check:
        return check_library(Library("optional", "several", modules, None, "build it"))

    assert check("mhar_one") == Check("optional", "several", "ok", "mhar_one")
    assert check("mhar_one", "mhar_no", "mhar_none") == Check(
        "optional", "several", "missing", "not installed (mhar_no, mhar_none)", "build it"
    )
    assert check("mhar_two", "mhar_no") == Check(
        "optional", "several", "broken", "ZeroDivisionError: division by zero (mhar_two); not installed (mhar_no)",
        "build it",
    )  # fmt: skip


def test_skinny_mlflow_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    library = next(library for library in doctor.LIBRARIES if library.name == "MLflow")
    monkeypatch.setattr(doctor, "probe_import", lambda module: ("ok", "found"))
    versions = {"mlflow-skinny": "3.17.2"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name))
    skinny = check_library(library)
    assert (skinny.state, skinny.found) == ("ok", "3.17.2, skinny: needs a tracking server")
    assert "'.[tracking]'" in skinny.advice
    versions["mlflow"] = "3.17.2"
    assert check_library(library) == Check("optional", "MLflow", "ok", "3.17.2, full")


def test_exit_code_follows_the_core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Check("core", "torch", "ok", "2.11.0", core=True),
        Check("optional", "DALI", "broken", "ImportError: [red]x[/red]", "install [gpu]"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: rows)
    result = CliRunner().invoke(doctor.doctor)
    assert result.exit_code == 0
    assert "[red]x[/red]" in result.stdout
    assert "install [gpu]" in result.stdout
    assert "Ready to train." in result.stdout
    rows[0] = Check("core", "torch", "broken", "ImportError: x", "make venv", core=True)
    result = CliRunner().invoke(doctor.doctor)
    assert result.exit_code == 1
    assert "Not ready" in result.stdout
    result = CliRunner().invoke(doctor.doctor, ["--json"])
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["healthy"] is False
    assert answer["checks"][0] == {
        "group": "core",
        "name": "torch",
        "state": "broken",
        "found": "ImportError: x",
        "advice": "make venv",
        "core": True,
    }


def test_this_machine() -> None:
    result = CliRunner().invoke(doctor.doctor, ["--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["healthy"] is True
    rows = {row["name"]: row for row in answer["checks"]}
    for name in ("Python", "torch", "numpy", "megatron-core", "gloo"):
        assert (rows[name]["state"], rows[name]["core"]) == ("ok", True)
    for name in ("CUDA", "NCCL", "Triton", "Transformer Engine", "apex", "DALI", "MLflow", "memory", "disk here"):
        assert name in rows
    import torch

    assert rows["torch"]["found"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert sum(name.startswith("GPU ") for name in rows) == torch.cuda.device_count()
    assert rows["collectives"]["found"] == ("nccl" if torch.cuda.is_available() else "gloo")
    assert rows["layers"]["found"] in ("local", "transformer_engine")
    assert rows["routing backend"]["found"] != "auto"
    from megatron_mhar.model.fusions import served_by

    for operation, library in served_by(rows["layers"]["found"], rows["routing backend"]["found"]).items():
        assert (rows[operation]["state"], rows[operation]["found"]) == ("ok", library)
    assert rows["CUDA graphs"]["state"] == ("ok" if torch.cuda.is_available() else "missing")
    if rows["layers"]["found"] == "local":
        assert (rows["FP8"]["state"], rows["FP8"]["found"].split(",")[0]) == (
            "missing", "it needs Transformer Engine's layers"
        )  # fmt: skip


def rows_of_devices(monkeypatch: pytest.MonkeyPatch, *, has_gpu: bool, driver: str | None) -> dict[str, Check]:
    from megatron_mhar import platform

    monkeypatch.setattr(platform, "HAS_GPU", has_gpu)
    monkeypatch.setattr(doctor, "_driver_version", lambda: driver)
    return {check.name: check for check in doctor._devices()}


def test_gpus_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=139 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    rows = rows_of_devices(monkeypatch, has_gpu=True, driver="580.65.06")
    assert rows["CUDA"].found == f"{torch.version.cuda}, driver 580.65.06"
    assert rows["GPU 1"].found == "NVIDIA H200, 139.0 GiB, compute capability 9.0"
    assert [name for name in rows if name.startswith("GPU")] == ["GPU 0", "GPU 1"]


def test_driver_without_a_visible_gpu_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    rows = rows_of_devices(monkeypatch, has_gpu=False, driver="470.1")
    assert (rows["CUDA"].state, rows["CUDA"].core) == ("broken", False)
    assert "driver 470.1" in rows["CUDA"].found
    assert "CUDA_VISIBLE_DEVICES" in rows["CUDA"].advice
    assert rows_of_devices(monkeypatch, has_gpu=False, driver=None)["CUDA"].state == "missing"


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    assert rows_of_devices(monkeypatch, has_gpu=False, driver=None)["CUDA"].state == "missing"
    assert rows_of_devices(monkeypatch, has_gpu=False, driver="580.1")["CUDA"].state == "broken"


@pytest.mark.parametrize(
    ("script", "version"),
    [("echo 580.65.06; echo 580.65.06", "580.65.06"), ("exit 9", None), ("true", None)],
)
def test_driver_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, version: str | None) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._driver_version() == version
    smi.unlink()
    assert doctor._driver_version() is None


@pytest.mark.parametrize(
    ("reasons", "row"),
    [
        ({"tensorwise": "", "delayed": "", "mxfp8": "needs 10.0"},
         ("ok", "tensorwise, delayed", "not mxfp8: needs 10.0")),
        ({"tensorwise": "", "delayed": ""}, ("ok", "tensorwise, delayed", "")),
        ({"tensorwise": "old", "mxfp8": "old"},
         ("missing", "no recipe runs on this GPU", "not tensorwise: old; not mxfp8: old")),
    ],
)  # fmt: skip
def test_fp8_recipes(monkeypatch: pytest.MonkeyPatch, reasons: dict[str, str], row: tuple[str, str, str]) -> None:
    monkeypatch.setattr("megatron_mhar.model.fp8.recipes_here", lambda: reasons)
    check = doctor._fp8("a run here uses", "transformer_engine")
    assert (check.state, check.found, check.advice) == row
    assert doctor._fp8("a run here uses", "local").state == "missing"


def test_a_run_that_cannot_start_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise OSError("libnvrtc.so: not found\nmore")

    monkeypatch.setattr("megatron_mhar.routing.resolve_backend", fail)
    last = list(doctor._run_here())[-1]
    assert (last.state, last.core) == ("broken", True)
    assert last.found == "OSError: libnvrtc.so: not found"


def test_nothing_is_imported_when_the_core_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_import", lambda module: ("broken", "ImportError: x"))
    monkeypatch.setattr(doctor, "_devices", lambda: pytest.fail("torch was imported"))
    groups = {check.group: check.state for check in doctor.examine()}
    assert groups == {"machine": "ok", "core": "broken", "optional": "broken"}
