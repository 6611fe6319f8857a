"""docker/pins.py: what of a base image stays, what is added to it, and which base is refused."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pins() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pins", ROOT / "docker/pins.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TESTED = """\
# the tested set
click==8.5.1
numpy==2.3.5
torch==2.11.0
triton==3.6.0
nvidia-nccl-cu13==2.28.9

Jinja2==3.1.6  # a remark
"""
WANTED = ["torch>=2.11", "numpy>=2", "click>=8.2", "rich>=14"]


def test_a_base_without_packages_gets_the_tested_set(pins: ModuleType) -> None:
    kept, added = pins.pins(TESTED, {}, WANTED)
    assert kept == []
    assert added == [
        "click==8.5.1", "numpy==2.3.5", "torch==2.11.0", "triton==3.6.0", "nvidia-nccl-cu13==2.28.9", "Jinja2==3.1.6"
    ]  # fmt: skip


def test_the_stack_of_a_base_stays_and_what_is_refused_is_added(pins: ModuleType) -> None:
    base = {"torch": "2.14.0a0+b2c75dd062.nv26.09", "triton": "3.6.0+git", "numpy": "2.1.0", "click": "8.1.7"}
    kept, added = pins.pins(TESTED, base | {"jinja2": "3.0", "apex": "0.1"}, WANTED)
    assert kept == ["apex==0.1", "torch==2.14.0a0+b2c75dd062.nv26.09", "triton==3.6.0+git"]
    # numpy and jinja2 fit, so they have no pin; click does not.
    assert added == ["click==8.5.1", "nvidia-nccl-cu13==2.28.9"]


def test_a_base_with_too_old_a_torch_is_refused(pins: ModuleType) -> None:
    with pytest.raises(SystemExit) as refusal:
        pins.pins(TESTED, {"torch": "2.11.0a0+eb65b36914.nv26.02"}, WANTED)
    assert str(refusal.value) == (
        "BASE_IMAGE: its torch is 2.11.0a0+eb65b36914.nv26.02, but this project needs torch>=2.11; take another release"
    )


def test_all_names_of_the_stack_are_kept(pins: ModuleType) -> None:
    stack = [
        "torch", "torchvision", "triton", "pytorch-triton", "transformer-engine", "transformer-engine-torch", "apex",
        "nvidia-dali-cuda130", "nvidia-cudnn-frontend", "cuda-bindings", "flash-attn", "tensorrt",
    ]  # fmt: skip
    assert [name for name in stack if not pins.is_kept(name)] == []
    assert not any(map(pins.is_kept, ["numpy", "pytest", "mlflow-skinny", "megatron-core", "networkx"]))


def test_requirements_are_those_of_the_project_and_its_extras(pins: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pins.requirements(project, []) == project["dependencies"]
    more = pins.requirements(project, ["tracking", "gpu"])
    extras = project["optional-dependencies"]
    assert more == [*project["dependencies"], *extras["tracking"], *extras["gpu"]]
    with pytest.raises(SystemExit, match="EXTRAS: 'traking' given; allowed: tracking, gpu, dev"):
        pins.requirements(project, ["traking"])


def test_installed_reads_metadata_and_the_first_of_a_name_counts(pins: ModuleType, tmp_path: Path) -> None:
    def distribution(folder: str, name: str, version: str) -> None:
        info = tmp_path / folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    distribution("first", "Transformer_Engine", "2.16.0+4220403e")
    distribution("second", "transformer.engine", "1.0")
    distribution("second", "numpy", "2.1.0")
    (tmp_path / "second/gone-1.0.dist-info").mkdir()  # what is left of a package that was removed by hand
    found = pins.installed([str(tmp_path / "first"), str(tmp_path / "second")])
    assert found == {"transformer-engine": "2.16.0+4220403e", "numpy": "2.1.0"}
