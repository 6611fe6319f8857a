"""What docker/test-image built: contents, user, health check, and the demo's training inside it.

MHAR_IMAGE names the image on a plain base, MHAR_STACK_IMAGE the dependencies on a base that has a GPU stack.
"""

from __future__ import annotations

import filecmp
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
USER = 10001  # the Dockerfile's default
OTHER_USER = 4242  # one whom the image does not know
STEPS = 4
SHORT = [f"training.steps={STEPS}", "optimizer.warmup_steps=1", "training.log_interval=1", "evaluation.interval=4"]

pytestmark = pytest.mark.timeout(900)


def buildah(*arguments: str | Path) -> str:
    done = subprocess.run(["buildah", *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"buildah {' '.join(map(str, arguments))}:\n{done.stderr[-4000:]}"
    return done.stdout.strip()


class Container(NamedTuple):
    """A container of an image.

    Attributes:
        name: as buildah calls it.
        root: where its files are seen on this machine.
    """

    name: str
    root: Path

    def run(
        self, *command: str, user: int | None = None, mounts: dict[Path, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as the image's user unless another number is given."""
        options = [option for source, target in (mounts or {}).items() for option in ("--volume", f"{source}:{target}")]
        if user is not None:
            options += ["--user", f"{user}:{user}"]
        return subprocess.run(
            ["buildah", "run", *options, self.name, "--", *command], capture_output=True, text=True, timeout=600
        )

    def output(self, *command: str, user: int | None = None, mounts: dict[Path, str] | None = None) -> str:
        """What a command that must succeed prints."""
        done = self.run(*command, user=user, mounts=mounts)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout


def started(image: str) -> Iterator[Container]:
    name = buildah("from", "--pull-never", image)
    try:
        yield Container(name, Path(buildah("mount", name)))
    finally:
        buildah("rm", name)


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    yield from started(os.environ["MHAR_IMAGE"])


@pytest.fixture(scope="module")
def stack() -> Iterator[Container]:
    yield from started(os.environ["MHAR_STACK_IMAGE"])


@pytest.fixture(scope="module")
def image() -> dict[str, Any]:
    """The image's description in Docker's format."""
    found: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", os.environ["MHAR_IMAGE"]))["Docker"]
    return found


def folder_of(user: int, path: Path) -> Path:
    path.mkdir()
    os.chown(path, user, user)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def owners(folder: Path) -> set[int]:
    return {path.lstat().st_uid for path in folder.rglob("*")}


# --- what the image says of itself


def test_description(image: dict[str, Any]) -> None:
    config = image["config"]
    assert config["User"] == f"{USER}:{USER}"
    assert config["WorkingDir"] == "/workspace"
    assert config["Cmd"] == ["mhar", "doctor"]
    assert config["Healthcheck"]["Test"] == ["CMD", "mhar", "doctor"]
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert labels["title"] == "megatron_mhar"
    assert labels["licenses"] == "Apache-2.0"
    assert (labels["version"], labels["revision"]) == ("0.0.0+test", "test")
    assert labels["base.name"].startswith("localhost/debian-python:")


def test_layers_are_few_and_a_change_of_code_is_a_small_one(
    image: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    store = json.loads(buildah("info"))["store"]
    driver = store["GraphDriverName"]
    if driver == "vfs":
        pytest.skip("with vfs docker/test-image makes one layer a stage")
    sizes = {
        layer["diff-digest"]: layer["diff-size"]
        for layer in json.loads((Path(store["GraphRoot"]) / f"{driver}-layers/layers.json").read_text())
        if "diff-digest" in layer
    }
    made_by = [entry["created_by"] for entry in image["history"] if not entry.get("empty_layer")]
    layers = [(sizes[digest], how) for digest, how in zip(image["rootfs"]["diff_ids"], made_by, strict=True)]
    with capsys.disabled():
        print("\nlayers, in MB:")
        for size, how in layers:
            print(f"{size / 1e6:10.2f}  {re.sub(r'^/bin/sh -c (#[(]nop[)])?', '', how).strip()[:90]}")
    base, asked, dependencies, *ours = [size for size, _ in layers]
    assert base > 50e6
    assert dependencies > 100e6
    assert len(ours) == 4  # the user, the package, what starts the ranks of a node, the configs
    assert asked + sum(ours) < 5e6


# --- what is in it


def test_no_caches_no_tests_no_history(container: Container) -> None:
    root = container.root
    found = []
    for folder in ("home", "root", "workspace", "build", "dist", "tmp", "opt/mhar", "var/cache/apt", "var/lib/apt"):
        found += [str(path.relative_to(root)) for path in (root / folder).rglob("*")]
    assert len(found) > 10_000  # the packages
    outside = [path for path in found if not path.startswith("opt/mhar/")]
    assert [path for path in outside if path.startswith(("build/", "dist/", "tmp/", "home/mhar/"))] == []
    files = [path for path in outside if (root / path).is_file()]  # builders leave empty folders where they mounted
    assert [path for path in files if "/.cache/" in path or path.endswith((".deb", "_Packages", ".lz4"))] == []
    parts = {part for path in found for part in path.split("/")}
    assert parts & {".git", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", "runs", "slurm"} == set()
    packages = next((root / "opt/mhar/lib").glob("python3*/site-packages"))
    assert not (root / "etc/pip.conf").exists()  # docker/test-image has pip's settings there during the build
    assert not (packages / "tests").exists()
    assert {path.name for path in (root / "workspace").iterdir()} == {"configs", "launch"}
    names = {path.name for path in packages.iterdir()}
    assert not names & {"pytest", "ruff", "mypy", "pip"}


def test_package_and_configs_are_those_of_the_checkout(container: Container) -> None:
    packages = next((container.root / "opt/mhar/lib").glob("python3*/site-packages"))
    for here, there in (("configs", container.root / "workspace"), ("megatron_mhar", packages)):
        files = [path for path in (ROOT / here).rglob("*") if path.suffix in (".py", ".yaml")]
        assert len(files) > 20
        for path in files:
            assert filecmp.cmp(path, there / path.relative_to(ROOT), shallow=False), path


def test_versions_are_the_tested_set(container: Container) -> None:
    tested = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if re.match(r"[\w.-]+==", line)
    )
    script = (
        "from importlib.metadata import version; print(*map(version, ['torch', 'megatron-core', 'numpy', 'click']))"
    )
    found = container.output("python", "-c", script).split()
    assert found == [tested[name] for name in ("torch", "megatron-core", "numpy", "click")]


# --- who runs in it


def test_the_process_is_not_root_and_cannot_change_the_program(container: Container) -> None:
    assert container.output("id", "-u").strip() == str(USER)
    assert container.output("whoami").strip() == "mhar"
    for user in (None, OTHER_USER):
        for folder in ("/workspace", "/home/mhar"):
            container.output("sh", "-c", f"touch {folder}/{user} && rm {folder}/{user}", user=user)
        for folder in ("/opt/mhar", "/opt/mhar/bin/mhar", "/usr", "/etc/passwd", "/workspace/configs"):
            assert container.run("test", "-w", folder, user=user).returncode == 1, folder
    assert container.output("python", "-c", "import getpass; print(getpass.getuser())", user=OTHER_USER).strip()


def test_help_and_version(container: Container) -> None:
    text = container.output("mhar", "--help")
    assert "Train Multi-Head Attention Residuals" in text
    assert "doctor" in text
    assert re.search(r"\d+\.\d+", container.output("mhar", "--version"))


def test_the_health_check_succeeds_and_would_fail(container: Container, image: dict[str, Any]) -> None:
    command = image["config"]["Healthcheck"]["Test"][1:]
    assert "Ready to train." in container.output(*command)
    container.output("sh", "-c", "mkdir /workspace/broken && echo 1/0 >/workspace/broken/torch.py")
    try:
        broken = container.run("env", "PYTHONPATH=/workspace/broken", *command)
    finally:
        container.output("rm", "-r", "/workspace/broken")
    assert broken.returncode == 1
    assert "Not ready" in broken.stdout


# --- the demo


class Demo(NamedTuple):
    """Mounted folders of a demo that ran in the image as its own user."""

    data: Path
    runs: Path


@pytest.fixture(scope="module")
def demo(container: Container, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Corpus, a baseline on one process, MHAR on two, and their comparison, as the README has them, in few steps."""
    folder = tmp_path_factory.mktemp("demo")
    found = Demo(folder_of(USER, folder / "data"), folder_of(USER, folder / "runs"))
    mounts = {found.data: "/workspace/data", found.runs: "/workspace/runs"}
    corpus = ["mhar", "data", "demo", "--min-mb", "1", "--max-mb", "2"]
    container.output(*corpus, mounts=mounts)
    container.output("mhar", "train", "configs/demo/baseline.yaml", *SHORT, mounts=mounts)
    # The container has this machine's network, and its own name stands in no /etc/hosts, as it would under Docker.
    torchrun = ["env", "GLOO_SOCKET_IFNAME=lo", "torchrun", "--nproc-per-node", "2", "--no-python"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    parallel = ["parallel.tensor=2", "parallel.sequence=true"]
    container.output(*torchrun, "mhar", "train", "configs/demo/mhar.yaml", *parallel, *SHORT, mounts=mounts)
    table = container.output(
        "mhar", "compare", "runs/demo-baseline", "runs/demo-mhar", "--out", "runs/demo", mounts=mounts
    )
    assert "demo-mhar" in table or "mhar" in table
    return found


def losses(run: Path) -> list[float]:
    """Training losses by step, from a run's journal."""
    by_step = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "train/loss" in entry.get("metrics", {}):
            by_step[entry["step"]] = entry["metrics"]["train/loss"]
    return [by_step[step] for step in sorted(by_step)]


def test_the_demo_trains_and_its_files_are_the_users(demo: Demo) -> None:
    for name in ("demo-baseline", "demo-mhar"):
        run = demo.runs / name
        assert (run / "summary.json").is_file()
        assert list((run / "checkpoints").glob("step_*"))
        found = losses(run)
        assert len(found) == STEPS
        assert all(map(math.isfinite, found))
        assert found[-1] < found[0]
    assert (demo.runs / "demo/loss.png").stat().st_size > 10_000
    assert owners(demo.runs) == owners(demo.data) == {USER}


def test_the_image_computes_what_this_machine_does(demo: Demo, tmp_path: Path) -> None:
    """The same run outside, another Python with the same torch, on the corpus that was built inside."""
    data = [f"data.{split}=[{demo.data}/demo/{split}]" for split in ("train", "valid")]
    command: list[str | Path] = [Path(sys.executable).with_name("mhar"), "train", ROOT / "configs/demo/baseline.yaml"]
    done = subprocess.run(
        [*command, *data, *SHORT, f"output_dir={tmp_path}", "tracking.enabled=false"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert losses(tmp_path / "demo-baseline") == pytest.approx(losses(demo.runs / "demo-baseline"), rel=1e-5)


def test_a_user_whom_the_image_does_not_know_trains(container: Container, demo: Demo, tmp_path: Path) -> None:
    """By launch/node, as docker/README.md has it."""
    runs = folder_of(OTHER_USER, tmp_path / "runs")
    mounts = {demo.data: "/workspace/data", runs: "/workspace/runs"}
    container.output("launch/node", "configs/demo/baseline.yaml", *SHORT, user=OTHER_USER, mounts=mounts)
    assert (runs / "demo-baseline/summary.json").is_file()
    assert owners(runs) == {OTHER_USER}
    assert losses(runs / "demo-baseline") == losses(demo.runs / "demo-baseline")


@pytest.mark.parametrize("command", ["mhar train", "launch/node"])
def test_a_folder_of_someone_else_is_refused_in_one_line(
    container: Container, demo: Demo, tmp_path: Path, command: str
) -> None:
    runs = folder_of(OTHER_USER, tmp_path / "runs")
    mounts = {demo.data: "/workspace/data", runs: "/workspace/runs"}
    done = container.run(*command.split(), "configs/demo/baseline.yaml", *SHORT, mounts=mounts)
    assert done.returncode == 2
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("mhar: error: ")]
    assert re.search(r"cannot be written.* \(Permission denied\)", message)
    assert "Traceback" not in done.stderr
    assert list(runs.iterdir()) == []


# --- a base that has a GPU stack


def test_the_stack_of_a_base_is_neither_replaced_nor_shadowed(stack: Container) -> None:
    base = dict(line.split("==") for line in (Path(__file__).parent / "stack/versions.txt").read_text().splitlines())
    (there,) = (stack.root / "usr/local/lib").glob("python3*/dist-packages")
    assert {path.name for path in there.glob("*.dist-info")} == {f"{name}-{v}.dist-info" for name, v in base.items()}

    packages = next((stack.root / "opt/mhar/lib").glob("python3*/site-packages"))
    added = dict(path.name.removesuffix(".dist-info").lower().split("-", 1) for path in packages.glob("*.dist-info"))
    tested = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"megatron-core=={added['megatron_core']}" in tested
    # Of what the base has, only what this project refuses is added, at the tested version.
    assert set(added) & set(base) == {"click"}
    assert f"click=={added['click']}" in tested
    assert [name for name in added if re.match(r"torch|triton|nvidia|cuda|transformer_engine|apex", name)] == []
