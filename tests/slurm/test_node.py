"""The ranks of a node: where they stand, what becomes of them, and what is left to read."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_mhar.config.load import dump_config
from megatron_mhar.errors import UserError
from megatron_mhar.launch import node, place
from megatron_mhar.launch.health import Meeting
from megatron_mhar.launch.node import Node, leave_reason, main, reserve_reason
from megatron_mhar.launch.place import Place, find_place, hosts_of, port_of_job
from tests.conftest import tiny_run
from tests.launch import ROOT

STEP = {
    "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "12345", "SLURM_GPUS_ON_NODE": "4",
}  # fmt: skip


def test_place_from_slurm() -> None:
    place = find_place(STEP)
    assert place == Place(node=1, nodes=2, ranks=4, address="node1", port=22345)
    assert place.environment(3) == {
        "RANK": "7", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1",
        "MASTER_PORT": "22345",
    }  # fmt: skip
    assert find_place(STEP | {"MHAR_RANKS_PER_NODE": "2"}).ranks == 2


def test_place_by_hand_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    given = {
        "NNODES": "3",
        "NODE_RANK": "2",
        "MASTER_ADDR": "first",
        "MASTER_PORT": "4000",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    assert find_place(given) == Place(2, 3, 2, "first", 4000)
    alone = find_place({})
    assert (alone.node, alone.nodes, alone.ranks, alone.address) == (0, 1, 1, "localhost")
    assert alone.port != find_place({}).port or alone.port > 1024


@pytest.mark.parametrize(
    "environment,message",
    [
        (STEP | {"SLURM_STEP_NUM_TASKS": "8"}, r"srun: 8 tasks on 2 nodes given.*--ntasks-per-node=1"),
        (STEP | {"MHAR_RANKS_PER_NODE": "all"}, r"MHAR_RANKS_PER_NODE: 'all' given.*whole number of 1 or more"),
        (STEP | {"MHAR_RANKS_PER_NODE": "5"}, r"MHAR_RANKS_PER_NODE: 5 given, but the job has 4 GPUs a node, one a"),
        ({"NNODES": "2"}, r"NODE_RANK: missing"),
        ({"NNODES": "2", "NODE_RANK": "2"}, r"NODE_RANK: 2 given, but with NNODES 2 it must be below"),
        ({"NNODES": "2", "NODE_RANK": "0"}, r"MASTER_ADDR: missing; .*host of node 0"),
    ],
)
def test_wrong_place_is_one_clear_error(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_place({"CUDA_VISIBLE_DEVICES": "0", **environment})


@pytest.mark.parametrize(
    "nodelist,hosts",
    [
        ("login", "login"),
        ("node[1-4]", "node1 node2 node3 node4"),
        ("node[003,7-9]", "node003 node7 node8 node9"),
        ("a1,node[2-3]", "a1 node2 node3"),
        ("rack[2-3,7]-n[09-10],login", "rack2-n09 rack2-n10 rack3-n09 rack3-n10 rack7-n09 rack7-n10 login"),
        ("gpu-a-[098-101]", "gpu-a-098 gpu-a-099 gpu-a-100 gpu-a-101"),
    ],
)
def test_hosts_of_slurms_short_form(nodelist: str, hosts: str) -> None:
    assert hosts_of(nodelist) == hosts.split()


def test_jobs_that_share_a_node_meet_at_other_ports() -> None:
    ports = [port_of_job(job) for job in range(4999990, 5000010)]
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 32768 for port in ports)  # Linux gives out ports from 32768 on


def run_ranks(
    tmp_path: Path,
    script: str,
    *,
    ranks: int = 2,
    meeting: Meeting | None = None,
    patience_s: float = 5,
    linger_s: float = 60,
) -> tuple[int, Path]:
    """A node whose ranks run a Python script instead of mhar train."""
    logs = tmp_path / "logs"
    ours = Node(Place(0, 1, ranks, "localhost", 1), [], logs, meeting, patience_s=patience_s, linger_s=linger_s)
    ours._command = [sys.executable, "-c", "import os, sys, time\nrank = int(os.environ['RANK'])\n" + script]
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        return ours.run(), logs
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reason(logs: Path) -> str:
    (file,) = logs.glob("*.end")
    match = re.fullmatch(r"\d+\.\d{3} (\d+ .*)\n", file.read_text())
    assert match is not None
    return match[1]


def test_a_full_disk_has_room_for_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container this machine's temporary files are no place where the job's script looks."""
    logs = tmp_path / "logs"

    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with reserve_reason(logs, 3):
        monkeypatch.setattr(Path, "write_text", full)
        leave_reason(logs, 3, 2, "the disk is full")
        leave_reason(logs, 3, 1, "and so it failed")
    assert reason(logs) == "2 the disk is full" and [path.name for path in logs.iterdir()] == ["node-0003.end"]
    monkeypatch.undo()
    with reserve_reason(tmp_path / "well", 0):
        pass
    assert not list((tmp_path / "well").iterdir())


@pytest.mark.parametrize(
    "arguments,environment,code,said",
    [
        (("output_dir=/proc/x",), {}, 2, "mhar: error: "),
        ((), {"MASTER_PORT": "99999"}, 2, "MASTER_PORT: '99999' given, but it must be a whole number of 1 to 65535"),
        ((), {"SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1",
              "SLURM_JOB_ID": "1", "SLURM_NODEID": "x"}, 2, "SLURM_NODEID: 'x' given"),
        ((), {"SLURM_STEP_NODELIST": "n[1-", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1",
              "SLURM_JOB_ID": "1"}, 2, "SLURM_STEP_NODELIST: 'n[1-' given, but it must name hosts"),
        ((), {"NNODES": "2", "NODE_RANK": "1"}, 2, "MASTER_ADDR: missing"),
        (("no=key",), {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost"}, 2, "unknown key"),
        ((), {"MHAR_LOGS": "/proc/none"}, 1, "cannot start ranks: [Errno 2]"),
    ],
    ids=["folder", "port", "node", "hosts", "address", "by hand", "logs of a job"],
)  # fmt: skip
def test_what_is_wrong_is_one_line(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...], environment: dict[str, str], code: int, said: str,
) -> None:  # fmt: skip
    for name in list(os.environ):
        if name.startswith(("SLURM_", "MHAR_", "MASTER_", "NODE_")):
            monkeypatch.delenv(name)
    for name, value in ({"MHAR_HEALTH_CHECK": "off", "MHAR_RANKS_PER_NODE": "1"} | environment).items():
        monkeypatch.setenv(name, value)
    config = tmp_path / "run.yaml"
    config.write_text(dump_config(tiny_run(corpus, tmp_path / "runs")))
    assert main([str(config), *arguments]) == code
    told = "".join(capfd.readouterr())
    assert said in told and len(told.splitlines()) == 1, told


def test_every_rank_has_a_log_and_the_first_one_is_repeated(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    code, logs = run_ranks(
        tmp_path, "print(f'I am {rank} of', os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'])"
    )
    assert code == 0
    assert not list(logs.glob("*.end"))
    texts = [(logs / f"rank-{rank:05d}.log").read_text() for rank in range(2)]
    assert texts == ["I am 0 of 2 1\n", "I am 1 of 2 1\n"]
    out = capfdbinary.readouterr().out
    assert b"I am 0 of 2" in out and b"I am 1" not in out


def test_a_killed_rank_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    begun = time.monotonic()
    script = "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)"
    code, logs = run_ranks(tmp_path, script, ranks=3, patience_s=0.5)
    assert time.monotonic() - begun < 30
    assert code == 128 + 9
    assert re.match(r"137 rank 1 on \S+ \(pid \d+\) was killed by SIGKILL$", reason(logs))


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """They are told to save: else they would go on, and hold the run's folder and port."""
    launcher = (
        "import sys; from pathlib import Path; from megatron_mhar.launch.node import Node, Place\n"
        "node = Node(Place(0, 1, 2, 'localhost', 1), [], Path(sys.argv[1]), patience_s=5, linger_s=60)\n"
        "node._command = [sys.executable, '-c', sys.argv[2]]\nnode.run()"
    )
    rank = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(print('told', flush=True)))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher, str(tmp_path), rank], cwd=ROOT)
    log, until = tmp_path / "rank-00001.log", time.monotonic() + 60
    for said in ("ready\n", "ready\ntold\n"):
        while not log.exists() or log.read_text() != said:
            assert time.monotonic() < until
            time.sleep(0.05)
        process.kill()
        process.wait()


def test_a_notice_before_training_ends_a_rank(tmp_path: Path) -> None:
    script = "os.system(f'kill -USR1 {os.getppid()}')\ntime.sleep(60)"
    code, logs = run_ranks(tmp_path, script, ranks=1)
    assert code == 128 + signal.SIGUSR1
    assert reason(logs).endswith("was told to stop while it did not train, and had nothing to save")


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_KILL_AFTER_S", 0.5)
    script = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nrank or sys.exit(7)\ntime.sleep(60)"
    code, logs = run_ranks(tmp_path, script, patience_s=3)
    assert code == 7
    assert reason(logs).startswith("7 rank 0 on ")


def test_a_rank_that_hangs_when_the_run_is_over_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own watch has ended with the run, and so have the other ranks'."""
    monkeypatch.setattr(node, "_KILL_AFTER_S", 0.5)
    script = "rank or sys.exit()\nos.kill(os.getpid(), 19)"  # SIGSTOP
    code, logs = run_ranks(tmp_path, script, linger_s=2)
    assert code == 137
    assert re.match(r"137 rank 1 on \S+ \(pid \d+\) did not end within 2 s of another rank, .*; killed$", reason(logs))


@pytest.mark.parametrize("left", [None, 7, 0])
def test_what_becomes_of_another_node_ends_the_ranks_here(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], left: int | None
) -> None:
    """Lost, its ranks failed, or they ended well and ours hang: at the very start too, when no rank watches another."""
    port = place.free_port()
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(lambda: Meeting(Place(1, 2, 1, "localhost", port), timeout_s=30))
        meeting, other = Meeting(Place(0, 2, 1, "localhost", port), timeout_s=30), joined.result()
    meeting.hosts = ["n1", "n2"]
    # When it is lost it may be that the ranks here save: that takes longer than one that hangs is given.
    script = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(2), print("saved"), sys.stdout.flush(), os._exit(0)))
print("ready", flush=True)
time.sleep(60)
"""

    def end() -> None:
        log = tmp_path / "logs/rank-00000.log"
        while not log.exists() or "ready" not in log.read_text():
            time.sleep(0.05)
        if left is not None:
            other.leave(left)
            other.leave(left + 1)  # what it says first holds
        other.close()

    begun = time.monotonic()
    with meeting, ThreadPoolExecutor(1) as pool:
        pool.submit(end)
        code, logs = run_ranks(tmp_path, script, ranks=1, meeting=meeting, patience_s=0.5, linger_s=1)
    assert time.monotonic() - begun < 30
    said = capfd.readouterr().err
    if left is None:
        assert (logs / "rank-00000.log").read_text() == "ready\nsaved\n"
        assert code == 137 and reason(logs) == (
            "137 node n2 is lost: its launch/node has ended without a word, or is out of reach"
        )
    elif left:
        assert code == 7 and not list(logs.glob("*.end"))  # that node has told why
        assert "the ranks on n2 have failed, with code 7; those on" in said
    else:
        assert code == 137 and "did not end within 1 s of another rank, which ended well; killed" in reason(logs)


def test_the_reason_is_the_error_message(tmp_path: Path) -> None:
    script = "print('noise'); print('mhar: error: x: 3 given,\\n  but 4 is right')\nsys.exit(2)"
    code, logs = run_ranks(tmp_path, script, ranks=1)
    assert code == 2
    assert reason(logs).endswith("ended with code 2: x: 3 given, but 4 is right")


def test_bad_input_outranks_ranks_that_fail_with_it(tmp_path: Path) -> None:
    script = "print('mhar: error: bad' if rank else 'rank 1 is lost', flush=True)\nsys.exit(2 if rank else 1)"
    code, logs = run_ranks(tmp_path, "time.sleep(0.5)\n" + script)
    assert code in (1, 2)  # whichever ended first; seen at once, it is the cause
    assert reason(logs).startswith(f"{code} rank {code - 1} on ")


def test_a_reason_that_the_logs_cannot_take_is_left_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    (tmp_path / "12-0").write_text("no folder")
    node.leave_reason(tmp_path / "12-0", 1, 2, "disk\nfull")
    node.leave_reason(tmp_path / "12-0", 1, 1, "later")
    assert reason(tmp_path / "temporary" / "mhar-12-0") == "2 disk full"


def test_signals_become_a_notice_and_the_second_is_passed_on(tmp_path: Path) -> None:
    script = (
        "import signal\nseen = []\nfor number in (signal.SIGUSR1, signal.SIGTERM):\n"
        "    signal.signal(number, lambda number, frame: seen.append(signal.Signals(number).name))\n"
        "for name in ('TERM', 'USR1', 'TERM'): os.system(f'kill -{name} {os.getppid()}'); time.sleep(0.5)\n"
        "print(*seen)"
    )
    code, logs = run_ranks(tmp_path, script, ranks=1)
    assert code == 0
    assert (logs / "rank-00000.log").read_text().split() == ["SIGUSR1", "SIGUSR1", "SIGTERM"]


def test_launch_node_trains_on_two_ranks(tmp_path: Path, corpus: Path) -> None:
    """From the shell, as on a laptop; a misspelt key is told once."""
    config = tmp_path / "tiny.yaml"
    config.write_text(dump_config(tiny_run(corpus, tmp_path / "runs", training={"steps": 3})))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    environment |= {"MHAR_RANKS_PER_NODE": "2", "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}

    def start(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / "launch/node"), str(config), *overrides]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)

    wrong = start("trainin.steps=3")
    assert wrong.returncode == 2
    assert wrong.stderr.count("mhar: error:") == 1 and "trainin" in wrong.stderr
    done = start()
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout and "finished" in done.stdout
    (logs,) = (tmp_path / "runs/run/logs").iterdir()
    assert sorted(path.name for path in logs.iterdir()) == ["rank-00000.log", "rank-00001.log"]
    # Its torch's own launcher is one too.
    (tmp_path / "runs/run/summary.json").unlink()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    again = subprocess.run(
        [*torchrun, str(ROOT / "launch/node"), str(config)], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "runs/run/summary.json").is_file()


def test_nodes_by_hand_with_other_configs_are_refused(tmp_path: Path, corpus: Path) -> None:
    """In two terminals, with a typing error in one of them: else each rank would step its weights in its own way."""
    config = tmp_path / "tiny.yaml"
    config.write_text(dump_config(tiny_run(corpus, tmp_path / "runs", parallel={"heartbeat_s": 3})))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    environment |= {
        "NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(place.free_port()), "MHAR_HEALTH_CHECK": "quick",
        "MHAR_RANKS_PER_NODE": "1", "OMP_NUM_THREADS": "1", "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
    }  # fmt: skip
    terminals = [
        subprocess.Popen(
            [str(ROOT / "launch/node"), str(config), f"optimizer.lr={rate}"],
            env=environment | {"NODE_RANK": number}, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )
        for number, rate in (("0", 0.001), ("1", 0.01))
    ]  # fmt: skip
    for terminal in terminals:
        _, said = terminal.communicate(timeout=200)
        assert terminal.returncode == 2
        assert "optimizer.lr: 0.01 given on rank 1, but 0.001 on rank 0; all ranks of a run" in said
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()
