"""Rules for docker/Dockerfile and .dockerignore that need no build; each is shown to notice what it is for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text()


def instructions(text: str) -> list[tuple[str, str]]:
    """Instruction and the rest of its line, continued lines joined, in order."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", lines)
    return [(line.split()[0].upper(), line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def final_stage(text: str) -> list[tuple[str, str]]:
    found = instructions(text)
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[last:]


def faults(text: str) -> set[str]:
    """What is wrong with a Dockerfile, a word or two for each rule it breaks."""
    found = set()
    every, last = instructions(text), final_stage(text)
    stages = [value for name, value in every if name == "FROM"]
    if {value.split()[0] for value in stages[:-1]} != {"${BASE_IMAGE}"} or stages[-1] != "dependencies":
        found.add("stages")
    release = re.search(r"^ARG BASE_IMAGE=nvcr\.io/nvidia/pytorch:(\d+\.\d+)-py3$", text, re.MULTILINE)
    if release is None or float(release[1]) < 26.04:  # the first whose torch fits
        found.add("base")

    users = [index for index, (name, _) in enumerate(last) if name == "USER"]
    if not users or any(name == "RUN" for name, _ in last[users[-1] :]):
        found.add("user")
    elif last[users[-1]][1] != "${USER_ID}:${GROUP_ID}" or not re.search(r"^ARG USER_ID=[1-9]", text, re.MULTILINE):
        found.add("user")
    health = [value for name, value in last if name == "HEALTHCHECK"]
    if len(health) != 1 or not health[0].endswith('CMD ["mhar", "doctor"]'):
        found.add("health check")
    commands = [value for name, value in last if name in ("CMD", "ENTRYPOINT")]
    if not commands or not all(value.startswith("[") and json.loads(value) for value in commands):
        found.add("command")  # a shell in between would keep SIGTERM from the trainer
    labels = " ".join(value for name, value in last if name == "LABEL")
    for label in ("title", "description", "licenses", "version", "revision", "base.name"):
        if f"org.opencontainers.image.{label}=" not in labels:
            found.add(f"label {label}")

    for name, value in every:
        if name == "ADD" or (name == "COPY" and re.search(r"(^|\s)\.\s", value)):
            found.add("whole context")
        if name == "RUN" and "pip " in value:
            if "--mount=type=cache" not in value:
                found.add("pip's cache")
            if 'PIP_CONSTRAINT="" python3 -m pip' not in value:
                found.add("the base's constraints")
            if "--mount=type=bind" in value:
                found.add("a mount")  # buildah takes the layer from its cache, whatever the mount holds
            if "--constraint" not in value and "--no-deps" not in value:
                found.add("pip's versions")
        if name == "RUN" and "apt-get install" in value and "rm -rf /var/lib/apt/lists" not in value:
            found.add("apt's lists")
        if name == "RUN" and "<<" in value:
            found.add("here-document")  # builders of long-term releases do not know them
    return found


def test_the_dockerfile_keeps_the_rules() -> None:
    assert faults(DOCKERFILE) == set()


@pytest.mark.parametrize(
    ("fault", "spoil"),
    [
        ("base", lambda text: re.sub(r"pytorch:[\d.]+-py3", "pytorch:26.03-py3", text)),
        ("base", lambda text: re.sub(r"pytorch:[\d.]+-py3", "pytorch:latest", text)),
        ("stages", lambda text: text.replace("FROM ${BASE_IMAGE} AS package", "FROM debian AS package")),
        ("stages", lambda text: text.replace("FROM dependencies\n", "FROM ${BASE_IMAGE}\n")),
        ("user", lambda text: text.replace("USER ${USER_ID}:${GROUP_ID}\n", "")),
        ("user", lambda text: text.replace("USER ${USER_ID}:${GROUP_ID}\n", "USER root\n")),
        ("user", lambda text: text.replace("ARG USER_ID=10001", "ARG USER_ID=0")),
        ("user", lambda text: text + "RUN true\n"),
        ("health check", lambda text: re.sub(r"HEALTHCHECK.*\n", "HEALTHCHECK NONE\n", text)),
        ("command", lambda text: text.rpartition("CMD")[0] + "CMD mhar doctor\n"),
        ("label revision", lambda text: text.replace("org.opencontainers.image.revision", "revision")),
        ("whole context", lambda text: text.replace("COPY megatron_mhar ./megatron_mhar", "COPY . ./")),
        ("pip's cache", lambda text: text.replace("--mount=type=cache,target=/root/.cache/pip", "")),
        ("the base's constraints", lambda text: text.replace('PIP_CONSTRAINT=""', "")),
        ("a mount", lambda text: text + "RUN --mount=type=bind,from=package,target=/p pip install --no-deps /p\n"),
        ("pip's versions", lambda text: text.replace("--constraint pins.txt", "")),
        ("apt's lists", lambda text: text + "RUN apt-get update && apt-get install -y git\n"),
        ("here-document", lambda text: text + "RUN <<END\ntrue\nEND\n"),
    ],
)
def test_each_rule_notices(fault: str, spoil: Callable[[str], str]) -> None:
    spoilt = spoil(DOCKERFILE)
    assert spoilt != DOCKERFILE
    assert fault in faults(spoilt)


@pytest.mark.parametrize("name", ["docker/Dockerfile", "tests/image/stack/Dockerfile"])
def test_hadolint_is_content(name: str) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not here; make test-image installs it")
    done = subprocess.run(["hadolint", ROOT / name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_script_parses_and_shellcheck_is_content() -> None:
    script = ROOT / "docker/test-image"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not here; make test-image installs it")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("user", "why"),
    [(1000, "needs root"), (0, "missing here, and there is no apt-get: buildah mmdebstrap shellcheck")],
)
def test_a_machine_that_cannot_build_is_told_from_a_failure(tmp_path: Path, user: int, why: str) -> None:
    tools = ("bash", "dirname", "realpath", "mkdir", "mktemp", "rm", "flock")
    for tool in tools:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(
        [shutil.which("bash") or "bash", ROOT / "docker/test-image"],
        env={"PATH": str(tmp_path), "IMAGE_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 77
    (line,) = done.stderr.splitlines()
    assert line.startswith("make test-image: not possible on this machine: ")
    assert why in line


def sent(root: Path) -> set[str]:
    """Files below ``root`` that the builder gets."""
    build = pytest.importorskip("docker.utils.build", reason="the package docker comes with the extra tracking")
    paths = build.exclude_paths(str(root), IGNORED.splitlines())
    return {path for path in paths if (root / path).is_file()} - {".dockerignore"}  # docker itself reads that one


def test_the_builder_gets_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    needed = {
        "README.md", "LICENSE", "pyproject.toml", "constraints.txt", "docker/pins.py", "configs/demo/mhar.yaml",
        "megatron_mhar/__init__.py", "megatron_mhar/data/demo.py", "launch/node",
    }  # fmt: skip
    others = {
        ".git/config", ".venv/bin/python", ".env", "runs/demo/checkpoints/step_3/a.distcp", "data/demo/train.bin",
        "tests/conftest.py", ".pytest_cache/a", ".mypy_cache/a", ".ruff_cache/a", "build/lib/a.py", "dist/a.whl",
        "megatron_mhar.egg-info/PKG-INFO", "megatron_mhar/__pycache__/a.cpython-312.pyc", "docker/test-image",
        "megatron_mhar/data/__pycache__/b.cpython-312.pyc", "configs/__pycache__/c.pyc", "id_rsa", "slurm-1.out",
        "docker/README.md", "launch/make-venv",
    }  # fmt: skip
    for name in needed | others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert sent(tmp_path) == needed


def test_everything_that_is_copied_is_sent() -> None:
    files = sent(ROOT)
    copied = [
        source
        for name, value in instructions(DOCKERFILE)
        if name == "COPY" and "--from=" not in value
        for source in value.split()[:-1]
    ]
    assert len(copied) >= 8
    for source in copied:
        assert source in files or any(name.startswith(f"{source}/") for name in files), source
    tops = {name.split("/")[0] for name in files}
    assert tops == {source.split("/")[0] for source in copied}
    assert sum((ROOT / name).stat().st_size for name in files) < 5_000_000


def test_the_readme_names_what_is_there() -> None:
    text = (ROOT / "docker/README.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / "docker" / target).exists(), target
    for path in re.findall(r"\b(?:configs|slurm|launch)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    arguments = {value.partition("=")[0] for name, value in instructions(DOCKERFILE) if name == "ARG"}
    table = text[text.index("| `--build-arg` |") : text.index("An index of your own")]
    assert set(re.findall(r"`([A-Z_]+)`", table)) == arguments
    user = re.search(r"^ARG USER_ID=(\d+)$", DOCKERFILE, re.MULTILINE)
    assert user is not None and f"number {user[1]}" in text


def test_the_version_of_the_label_is_the_projects() -> None:
    (command,) = re.findall(r'VERSION="\$\((sed [^\n]*?)\)" --build-arg', (ROOT / "docker/README.md").read_text())
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]]
