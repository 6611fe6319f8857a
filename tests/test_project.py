"""The project's own machinery: finding a Python, making .venv, pins that agree with each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS = (
    "bash",
    "mktemp",
    "rm",
    "sort",
    "tail",
    "head",
    "grep",
    "cat",
    "dirname",
    "realpath",
    "mkdir",
    "cp",
    "mv",
    "touch",
)

# Stands in for an interpreter: answers the probes, makes a .venv of copies of itself, logs what it is asked to install.
FAKE_PYTHON = """\
#!/usr/bin/env bash
case "$1 $2" in
  "-c "*) [ -z "${BROKEN:-}" ] && [ ! -e "$(dirname "$0")/broken" ] && echo "$0" ;;
  "-m venv") echo "venv" >>"$LOG"; rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-m pip") echo "pip ${*: -1}" >>"$LOG"; ${DURING:-:}; exit "${PIP_EXIT:-0}" ;;
esac
"""

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with the common tools and no Python: its folder bin is the whole path."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (bin_dir / tool).symlink_to(found)
    return tmp_path


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def call(machine: Path, command: Sequence[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(machine / "bin"), "HOME": str(machine), "LOG": str(machine / "log"), **environment}
    return subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=60)


def find_python(machine: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return call(machine, [ROOT / "launch/find-python"], **environment)


def test_no_python_is_said_clearly(machine: Path) -> None:
    result = find_python(machine)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("No Python 3.12 or 3.13 was found")
    assert "make venv PYTHON=" in result.stderr


def test_a_shim_that_does_not_run_is_passed_over(machine: Path) -> None:
    executable(machine / "bin/python3.12", "#!/usr/bin/env bash\necho 'pyenv: command not found' >&2\nexit 127\n")
    right = executable(machine / "bin/python3.13", FAKE_PYTHON)
    assert find_python(machine).stdout.strip() == str(right)


def test_order_path_then_pyenv_newest_then_uv_then_313(machine: Path) -> None:
    places = [
        executable(machine / "bin/python3.12", FAKE_PYTHON),
        executable(machine / ".pyenv/versions/3.12.11/bin/python3.12", FAKE_PYTHON),
        executable(machine / ".pyenv/versions/3.12.9/bin/python3.12", FAKE_PYTHON),
        executable(machine / "uv/python3.12", FAKE_PYTHON),
        executable(machine / "bin/python3.13", FAKE_PYTHON),
    ]
    executable(machine / "bin/uv", f'#!/usr/bin/env bash\n[ "${{*: -1}}" = 3.12 ] && echo {machine}/uv/python3.12\n')
    for place in places:
        assert find_python(machine).stdout.strip() == str(place)
        place.unlink()
    assert find_python(machine).returncode == 1


def test_a_named_python_is_taken_or_refused(machine: Path) -> None:
    executable(machine / "bin/python3.12", FAKE_PYTHON)
    mine = executable(machine / "mine", FAKE_PYTHON)
    assert find_python(machine, PYTHON=str(mine)).stdout.strip() == str(mine)
    result = find_python(machine, PYTHON="/no/such/python")
    assert result.returncode == 1
    assert "PYTHON=/no/such/python does not run" in result.stderr


@pytest.fixture
def make_venv(machine: Path) -> Call:
    """A checkout of nothing but what make-venv reads; calling returns the result, the log tells what was done."""
    checkout = machine / "check out"
    checkout.mkdir()
    shutil.copytree(ROOT / "launch", checkout / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        (checkout / name).write_text("")
        os.utime(checkout / name, (1, 1))
    executable(machine / "bin/python3.12", FAKE_PYTHON)

    def run(folder: Path = checkout, **environment: str) -> subprocess.CompletedProcess[str]:
        (machine / "log").write_text("")
        return call(machine, [folder / "launch/make-venv"], **environment)

    return run


def log(machine: Path) -> list[str]:
    return (machine / "log").read_text().splitlines()


MADE = ["venv", "pip .[tracking,dev]"]


def test_venv_is_made_once(machine: Path, make_venv: Call) -> None:
    assert make_venv().returncode == 0
    assert log(machine) == MADE
    assert make_venv().returncode == 0
    assert log(machine) == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_venv_follows_its_sources(machine: Path, make_venv: Call, name: str) -> None:
    make_venv()
    stamp = machine / "check out/.venv/.installed"
    later = stamp.stat().st_mtime + 1
    os.utime(machine / "check out" / name, (later, later))
    assert make_venv().returncode == 0
    assert log(machine) == ["pip .[tracking,dev]"]


def test_what_changes_during_an_installation_is_installed_next_time(machine: Path, make_venv: Call) -> None:
    assert make_venv(DURING="touch pyproject.toml").returncode == 0
    assert make_venv(DURING=":").returncode == 0
    assert log(machine) == ["pip .[tracking,dev]"]
    assert make_venv().returncode == 0
    assert log(machine) == []


def test_other_extras_are_installed(machine: Path, make_venv: Call) -> None:
    make_venv()
    assert make_venv(EXTRAS="dev").returncode == 0
    assert log(machine) == ["pip .[dev]"]


def test_failed_installation_is_not_taken_for_complete(machine: Path, make_venv: Call) -> None:
    result = make_venv(PIP_EXIT="1")
    assert result.returncode == 1
    assert "did not finish" in result.stderr
    assert make_venv().returncode == 0
    assert log(machine) == MADE
    # An update that fails leaves no stamp either.
    assert make_venv(EXTRAS="dev", PIP_EXIT="1").returncode == 1
    assert make_venv().returncode == 0
    assert log(machine) == MADE


def test_venv_of_an_interpreter_that_is_gone_is_made_anew(machine: Path, make_venv: Call) -> None:
    make_venv()
    (machine / "check out/.venv/bin/broken").touch()
    assert make_venv().returncode == 0
    assert log(machine) == MADE


def test_copied_checkout_makes_its_own_venv(machine: Path, make_venv: Call) -> None:
    make_venv()
    shutil.copytree(machine / "check out", machine / "copy")
    assert make_venv(machine / "copy").returncode == 0
    assert log(machine) == MADE


def test_no_python_leaves_no_venv(machine: Path, make_venv: Call) -> None:
    result = make_venv(BROKEN="1")
    assert result.returncode == 1
    assert "No Python 3.12 or 3.13 was found" in result.stderr
    assert not (machine / "check out/.venv").exists()


def pins() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;@]+)", line)
            assert match is not None, f"constraints.txt: {line!r} is no plain pin"
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


def requirements() -> list[str]:
    project = PROJECT["project"]
    return [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]


def test_every_requirement_is_pinned_and_the_pin_fits() -> None:
    from packaging.requirements import Requirement

    pinned = pins()
    for line in requirements():
        requirement = Requirement(line)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert name in pinned, f"{name} has no line in constraints.txt"
        assert pinned[name] in requirement.specifier, f"{line}: constraints.txt has {pinned[name]}"


def test_tested_set() -> None:
    pinned = pins()
    assert (pinned["torch"], pinned["triton"], pinned["megatron-core"]) == ("2.11.0", "3.6.0", "0.19.2")
    assert pinned["mlflow"] == pinned["mlflow-skinny"] == "3.17.2"
    assert PROJECT["project"]["requires-python"] == ">=3.12,<3.14"
    assert (ROOT / ".python-version").read_text().strip() == "3.12"


def test_licence() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_make_alone_says_what_there_is() -> None:
    result = subprocess.run(["make", "-C", ROOT, "--no-print-directory"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    goals = [line.split()[1] for line in result.stdout.splitlines()]
    assert goals == [
        "help", "venv", "demo", "test", "test-all", "test-slurm", "soak-slurm", "test-image", "test-gpu", "test-2gpu",
        "lint", "types", "format", "clean",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "script", ["launch/find-python", "launch/make-venv", "launch/node", "tests/slurm/cluster", ".ci/run"]
)
def test_scripts_parse_and_may_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("goals", "image", "seconds", "status", "last"),
    [
        (0, 0, 0, 0, "image"),
        (0, 1, 0, 1, "image"),
        (0, 77, 0, 0, "The image was not tested: the line above says why."),
        (0, 1, 3700, 0, "The image was not tested: the checks before it took 61 minutes."),
        (2, 0, 0, 2, "make test"),
    ],
)
def test_checks_of_a_change_end_with_what_failed(
    machine: Path, goals: int, image: int, seconds: int, status: int, last: str
) -> None:
    checkout = machine / "checkout"
    executable(checkout / ".ci/run", (ROOT / ".ci/run").read_text())
    executable(checkout / "launch/find-python", "#!/usr/bin/env bash\n")
    executable(checkout / "docker/test-image", f"#!/usr/bin/env bash\necho image\nexit {image}\n")
    executable(machine / "bin/make", f'#!/usr/bin/env bash\necho "make $*"\nexit {goals}\n')
    executable(machine / "bin/git", "#!/usr/bin/env bash\n")
    result = call(machine, [checkout / ".ci/run"], SECONDS=str(seconds))
    assert result.returncode == status, result.stderr
    assert result.stdout.splitlines()[-1] == last
