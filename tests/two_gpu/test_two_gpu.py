"""The script for two GPUs, on two CPU processes; and that it says what is wrong when something is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.two_gpu import cases, run
from tests.two_gpu.cases import BF16, FP32, ONE, Record

GOOD = Record(losses=[4.0, 3.5, 3.0], norms=[2.0, 1.5, 1.0], seconds=[9.0, 1.0, 1.0], tokens=100,
              sent=[[8, 80], [8, 80]], predicted=[[8, 80], [8, 80]], gradient_error=1e-7)  # fmt: skip


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Everything but the other methods and layouts, with models of width 64, and the text that it printed."""
    out = tmp_path_factory.mktemp("two-gpu")
    command = [
        sys.executable, "-m", "tests.two_gpu.run", "fp32", "350m", "kill", "hang", "--tiny", "--out", str(out),
        "--layouts", "pp2_vpp2", "--methods", "mhar", "--steps", "10", "--long-steps", "12",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return run.read(run.parse(["--out", str(out)])), done.stdout


def test_every_phase_writes_what_came_of_it_and_where(tried):
    results, printed = tried
    assert set(results) == {"fp32", "350m", "kill", "hang"}
    assert all(result["machine"]["versions"]["megatron-core"] == "0.19.2" for result in results.values())
    small, shape = (run.records(results[phase])["pp2_vpp2/mhar"] for phase in ("fp32", "350m"))
    assert len(small.losses) == cases.SMALL_STEPS and small.gradient_error is not None
    assert (len(shape.losses), len(run.records(results["350m"])[f"{ONE}/mhar"].losses)) == (12, 10)
    assert shape.sent == shape.predicted and min(min(rank) for rank in shape.sent) > 0
    assert "\npp2_vpp2 " in printed and "All is as it should be" in printed


@pytest.mark.parametrize("phase,said", [("kill", "has died"), ("hang", "hangs: rank 0 has waited 1")])
def test_the_rank_that_is_killed_or_hangs_is_named(tried, phase, said):
    results, printed = tried
    (record,) = run.records(results[phase]).values()
    assert "rank 1 on host" in record.note and said in record.note and record.note[:30] in printed and record.made


def test_a_run_as_on_one_gpu_has_no_fault():
    assert cases.faults(GOOD, GOOD, FP32, pipelined=True) == []


@pytest.mark.parametrize(
    "changed,tolerance,fault",
    [
        ({"losses": [4.01, 3.5, 3.0]}, BF16, "first loss off by 0.01"),
        ({"losses": [4.0, 3.5, 3.03]}, BF16, "loss off by 0.03"),
        ({"norms": [2.0, 1.5, 1.1]}, BF16, "norm off by 0.1"),
        ({"losses": [4.0, 3.5, float("nan")]}, BF16, "not finite"),
        ({"losses": [4.0, 3.5]}, BF16, "2 steps made, but 3 on one GPU"),
        ({"gradient_error": 1e-3}, FP32, "a gradient is off by 0.001"),
        ({"sent": [[8, 80], [8, 81]]}, FP32, "the plan says"),
        ({"sent": [], "predicted": []}, FP32, "nothing was sent"),
        ({"failed": "it hung"}, FP32, "it hung"),
    ],
)
def test_a_fault_is_said(changed, tolerance, fault):
    (found,) = cases.faults(replace(GOOD, **changed), GOOD, tolerance, pipelined=True)
    assert fault in found


@pytest.mark.parametrize("one", [None, Record(failed="it hung")])
def test_without_a_run_on_one_gpu_nothing_is_as_it_should_be(one):
    assert cases.faults(GOOD, one, FP32, pipelined=True) == ["there is no run on one GPU to compare it with"]


def test_losses_that_stand_still_prove_nothing():
    still = replace(GOOD, losses=[4.0, 4.0, 4.01])
    assert "move by 0.01 only" in cases.faults(still, still, BF16, pipelined=True)[0]


def test_speed_is_of_the_later_steps():
    assert GOOD.tokens_per_second == 100


def test_what_is_missing_is_said(tmp_path, capsys):
    options = run.parse(
        ["350m", "checkpoint", "--out", str(tmp_path), "--layouts", "pp2", "--methods", "baseline", "mhar"]
    )
    text = {"machine": {}, "records": {f"{place}/baseline": GOOD.__dict__ for place in (ONE, "pp2")}}
    (tmp_path / "350m.json").write_text(json.dumps(text))
    assert not run.report(options)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert said == ["WRONG: checkpoint tp2_sp_then_pp2 mhar: no result", "WRONG: 350m pp2 mhar: no result"]


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["2b"], "phase '2b' given"),
        (["fp8", "--tiny", "--out", "there"], "it needs GPUs"),
        (["350m", "--tiny"], "--tiny given without --out"),
        (["--steps", "1"], "2 <= steps"),
        (["--steps", "200"], "2 <= steps"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        run.parse(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_machine_that_does_not_fit_leaves_the_results_there_are(tmp_path, monkeypatch):
    for phase in ("350m", "kill"):
        (tmp_path / f"{phase}.json").write_text(json.dumps({"records": {"pp2/mhar": asdict(GOOD)}}))
    before = {file: file.read_text() for file in tmp_path.iterdir()}
    ranks = ranks_of(*[f"raise SystemExit({cases.UNFIT})"] * 2)
    monkeypatch.setattr(run, "Ranks", lambda told: ranks)
    with pytest.raises(SystemExit) as ended:
        run.run(run.parse(["--out", str(tmp_path)]))
    assert ended.value.code == cases.UNFIT
    assert {file: file.read_text() for file in tmp_path.iterdir()} == before


def ranks_of(*scripts: str) -> run.Ranks:
    """Two processes that run a line of Python each."""
    ranks = run.Ranks.__new__(run.Ranks)
    ranks.processes = [subprocess.Popen([sys.executable, "-c", script]) for script in scripts]
    ranks.ended = {}
    return ranks


def test_a_rank_that_goes_on_after_the_other_has_failed_is_ended(monkeypatch):
    monkeypatch.setattr(run, "GRACE_S", 0.2)
    ranks, began = ranks_of("import time; time.sleep(60)", "raise SystemExit(3)"), time.time()
    assert not ranks.wait(60)
    assert time.time() - began < 30 and ranks.ended[1][0] == 3 and ranks.processes[0].returncode == -signal.SIGKILL


def test_ranks_that_do_not_end_in_time_are_ended():
    ranks = ranks_of(*["import time; time.sleep(60)"] * 2)
    assert not ranks.wait(0.2) and not ranks.ended
    assert all(process.returncode == -signal.SIGKILL for process in ranks.processes)


def test_ranks_that_end_well():
    assert ranks_of("", "").wait(60)


@pytest.mark.parametrize(
    "ended,after_s,log,failed",
    [
        ({0: 1, 1: -9}, 2, "rank 1 on host x (pid {pid}) has died, after step 3", ""),
        ({0: 1, 1: -9}, 60, "rank 1 on host x (pid {pid}) has died, after step 3", "allowed are"),
        ({0: 1, 1: -9}, 2, "rank 1 on host x (pid 1{pid}) has died, after step 3", "said of the other one []"),
        ({0: -6, 1: -9}, 2, "rank 1 on host x (pid {pid}) has died, after step 3", "ended with code -6"),
        ({1: -9}, 2, "", "rank 0 went on"),
        ({0: 1, 1: 1}, 2, "", "rank 1 was to end with code -9"),
        ({0: 1, 1: -9}, None, "", "did not come to the step"),
    ],
)
def test_what_came_of_a_killed_rank(tmp_path: Path, ended, after_s, log, failed):
    ranks, folder = ranks_of("", ""), tmp_path / "kill"
    ranks.wait(60)
    pid, now = ranks.processes[1].pid, time.time()
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "log.txt").write_text(f"12:00 {log.format(pid=pid)}\n")
    if after_s is not None:
        (folder / "fault").write_text(str(now - after_s))
    ranks.ended = {rank: (code, now) for rank, code in ended.items()}
    record = run.judge(ranks, "kill", tmp_path)
    assert failed in record.failed and bool(record.failed) == bool(failed)
    assert failed or record.note.startswith("rank 0 ended 2.0 s after")


def test_the_launcher_needs_no_torch():
    """Its start is time of two GPUs."""
    code = "import sys; import tests.two_gpu.run; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ).returncode == 0
