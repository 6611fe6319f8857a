"""The GPU tests in an environment that is given: ``python -m tests.gpu [pytest arguments]``, or ``make test-gpu``.

Nothing is installed and no network is asked; pytest alone must be there beside what the package needs. What was found
goes to ``results/gpu``, or to the folder RESULTS.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FUSED_PATH = "tests/bench/test_fused_path.py::test_kernels_ran_on_the_gpu"  # must have passed
# What computes on a GPU in one process; tests of several ranks need a GPU each.
TESTS = (
    "tests/routing", "tests/depth", "tests/model", "tests/bench", "tests/train/test_loop.py",
    "tests/train/test_cuda_graph.py", "tests/train/test_kernels_train.py", "tests/train/test_layer_change.py",
    "tests/train/test_optimizer.py", "tests/train/test_profile.py", "tests/train/test_resume.py",
    "tests/train/test_watch_gpu.py",
)  # fmt: skip
VERSION = 2  # of the JSON
WRITE_EVERY_S = 5


@dataclass(frozen=True)
class Outcome:
    """How one test ended; ``why`` is the reason of a skip, or the error."""

    outcome: str
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class TestReport:
    """The JSON of a run; while it goes on, or if it was ended before its last test, it is not ``complete``."""

    __test__ = False

    version: int
    kind: str
    date: str
    machine: object
    complete: bool
    fused_path_ran: bool
    counts: dict[str, int]
    seconds: float
    tests: dict[str, Outcome]


@dataclass
class Recorder:
    """A plugin of pytest's that keeps outcomes, by test.

    Attributes:
        write: called now and then with whether all is done: a time limit may end us at any moment.
        outcomes: by test.
        collected: names of the tests that there are.
    """

    write: Callable[[bool], object]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    collected: set[str] = field(default_factory=set)
    _written: float = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without workers."""
        self.collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """With pytest-xdist: what one of its workers has found."""
        self.collected |= set(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The call, or a set-up or tear-down that did not pass."""
        if report.when != "call" and report.passed:
            return
        why = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            why = str(report.longrepr[2])
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message.splitlines()[0] if crash is not None else report.longreprtext.strip()[-200:]
        self.outcomes[report.nodeid] = Outcome(report.outcome, round(report.duration, 3), why)
        if time.monotonic() - self._written > WRITE_EVERY_S:
            self.write(False)
            self._written = time.monotonic()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read."""
        if report.failed:
            self.outcomes[report.nodeid] = Outcome("failed", 0.0, report.longreprtext.strip().splitlines()[-1])


def run_tests(arguments: Sequence[str], folder: Path, machine: object, device: str) -> int:
    """Run tests and write the JSON; 0 if all passed and the fused path was among them."""
    from megatron_mhar.bench.report import write_json

    start = time.time()
    date = time.strftime("%Y-%m-%d", time.gmtime(start))
    path = folder / f"tests_{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}_{date}.json"

    def write(complete: bool) -> TestReport:
        counts = Counter(outcome.outcome for outcome in recorder.outcomes.values())
        fused = getattr(recorder.outcomes.get(FUSED_PATH), "outcome", "") == "passed"
        report = TestReport(
            VERSION, "tests", date, machine, complete, fused, dict(counts), round(time.time() - start, 1),
            recorder.outcomes,
        )  # fmt: skip
        write_json(report, path)
        return report

    recorder = Recorder(write)
    # The project's options are for its own environment: without pytest-timeout they would be refused.
    options = ["--rootdir", str(ROOT), "-o", "addopts=--import-mode=importlib", "-o", f"testpaths={' '.join(TESTS)}"]
    code = pytest.main([*options, "-ra", "-p", "no:cacheprovider", *arguments], plugins=[recorder])
    report = write(code in (0, 1) and set() < recorder.collected <= recorder.outcomes.keys())
    print(f"\n{', '.join(f'{count} {outcome}' for outcome, count in report.counts.items())}: {path}")
    if not report.fused_path_ran:
        print(f"FAILED: {FUSED_PATH} has not passed: no fused kernel is known to have run", file=sys.stderr)
    return 0 if code == 0 and report.fused_path_ran else 1


def main() -> int:
    """See the head of the file."""
    from megatron_mhar import platform
    from megatron_mhar.bench.machine import describe_machine

    if not platform.HAS_GPU:
        print(f"no GPU: torch of {sys.executable} sees none; these tests are for one", file=sys.stderr)
        return 2
    machine = describe_machine()
    print("\n".join(machine.lines()))
    os.environ.pop("TRITON_INTERPRET", None)  # it would lead the kernels away from the GPU
    folder = Path(os.environ.get("RESULTS") or ROOT / "results/gpu")
    return run_tests(sys.argv[1:], folder, machine, machine.device)


if __name__ == "__main__":
    sys.exit(main())
