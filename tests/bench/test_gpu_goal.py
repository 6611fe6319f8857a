"""``make test-gpu``: what it writes, and that it does not pass where the fused path has not run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

CASES = """
import pytest

def test_good(): ...

def test_bad(): assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="not today")
def test_skipped(): ...

@pytest.mark.timeout(5)  # a mark of a plugin that need not be there
def test_marked(): ...
"""


def python(*arguments, **keywords):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, **keywords
    )


def test_what_is_written(tmp_path):
    (tmp_path / "test_cases.py").write_text(CASES)
    code = (
        "import sys; from pathlib import Path; from tests import gpu; file, out, gpu.FUSED_PATH, *rest = sys.argv[1:]\n"
        "sys.exit(gpu.run_tests([file, *rest], Path(out), gpu.Outcome('x', 1), 'NVIDIA H200'))"
    )
    file = str(tmp_path / "test_cases.py")
    failed = python("-c", code, file, str(tmp_path / "out"), "test_cases.py::test_good", "-p", "no:timeout")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    (path,) = (tmp_path / "out").iterdir()
    assert path.name.startswith("tests_nvidia-h200_20")
    report = json.loads(path.read_text())
    assert report["counts"] == {"passed": 2, "failed": 1, "skipped": 1} and report["version"] == 2
    assert report["complete"]
    found = {name.rpartition("::")[2]: outcome for name, outcome in report["tests"].items()}
    assert found["test_bad"]["why"] == "AssertionError: one is not two"
    assert found["test_skipped"]["why"] == "Skipped: not today"
    assert not report["fused_path_ran"] and "no fused kernel" in failed.stderr


RUN = (
    "import sys; from pathlib import Path; from tests import gpu; gpu.TESTS, gpu.WRITE_EVERY_S = sys.argv[1:2], 0\n"
    "sys.exit(gpu.run_tests(sys.argv[3:], Path(sys.argv[2]), gpu.Outcome('x', 1), 'NVIDIA H200'))"
)


def test_a_run_that_is_killed_keeps_what_there_is(tmp_path):
    file = tmp_path / "test_cases.py"
    file.write_text("import os\ndef test_good(): ...\ndef test_killed(): os.kill(os.getpid(), 9)\n")
    assert python("-c", RUN, str(file), str(tmp_path / "out")).returncode == -9
    (path,) = (tmp_path / "out").iterdir()
    report = json.loads(path.read_text())
    assert not report["complete"] and report["counts"] == {"passed": 1}


@pytest.mark.parametrize("options,count,complete", [(["-q", "-k", "test"], 2, True), (["-x"], 1, False)])
def test_options_alone_choose_all_gpu_tests(tmp_path, options, count, complete):
    file = tmp_path / "test_cases.py"
    file.write_text("def test_bad(): assert False\ndef test_good(): ...\n")
    assert python("-c", RUN, str(file), str(tmp_path / "out"), *options).returncode == 1
    (path,) = (tmp_path / "out").iterdir()
    report = json.loads(path.read_text())
    assert sum(report["counts"].values()) == count and report["complete"] == complete


def test_gpu_tests_are_there():
    from tests.gpu import TESTS

    assert all((ROOT / test).exists() for test in TESTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_fails():
    done = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", "test-gpu", f"PYTHON={sys.executable}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0 and "no GPU" in done.stderr
