"""Bad nodes are named before a run starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_mhar.errors import UserError
from megatron_mhar.launch import health
from megatron_mhar.launch.health import (
    Meeting,
    Unhealthy,
    by_topology,
    check_nodes,
    check_room,
    gpu_problems,
    judge_nodes,
    judge_probes,
    level_of,
    node_problems,
)
from megatron_mhar.launch.place import Place, free_port
from tests.launch import ROOT


def gpu(index: int, *, used: int = 600, errors: str = "0") -> str:
    return f"{index}, GPU-{index}ab, 81559, {used}, {errors}"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put an nvidia-smi on the path that says these lines, and ends with a code."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def says(*lines: str, code: int = 0) -> None:
        text = "\n".join(lines)
        tool = folder / "nvidia-smi"
        tool.write_text(f"#!/usr/bin/env bash\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        tool.chmod(0o755)

    return says


def test_healthy_gpus(nvidia_smi: Callable[..., None]) -> None:
    nvidia_smi(*(gpu(i, errors="[N/A]" if i else "0") for i in range(8)))
    assert gpu_problems(8, None) == gpu_problems(8, "0,1,2,3,4,5,6,7") == []
    assert gpu_problems(2, "GPU-3ab,GPU-5") == []
    assert gpu_problems(2, "MIG-1,MIG-2") == []


def test_bad_gpus_are_named(nvidia_smi: Callable[..., None]) -> None:
    nvidia_smi(gpu(0), gpu(1, errors="2"), gpu(2, used=40000))
    missing, ecc, memory = gpu_problems(4, "0,1,2,3")
    assert missing == "nvidia-smi shows 3 GPUs of the 4 that the job has here"
    assert ecc == "GPU 1 (GPU-1ab) has 2 uncorrected ECC errors since its last reset"
    assert memory == "GPU 2 (GPU-2ab) has 40000 of 81559 MiB in use before a rank has started"
    assert gpu_problems(1, "0") == [], "those of other jobs do not count"
    nvidia_smi("Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error", code=15)
    (problem,) = gpu_problems(1, None)
    assert problem.startswith("nvidia-smi ends with code 15: Unable to determine the device handle")


def test_without_nvidia_smi_there_are_no_gpus_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu_problems(8, None) == []


def test_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert node_problems(1) == []
    monkeypatch.setattr(health, "_LEAST_TEMPORARY", 1 << 60)
    (problem,) = node_problems(1)
    assert "MB are free in " in problem


def test_room_for_the_next_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(tmp_path)
    newest = tmp_path / "checkpoints/step_00000020"
    newest.mkdir(parents=True)
    (newest / "a.distcp").write_bytes(bytes(3_000_000))
    check_room(tmp_path)
    usage = health.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(health.shutil, "disk_usage", lambda folder: usage._replace(free=2_000_000))
    with pytest.raises(UserError, match=r"2\.0 MB are free there, but the next checkpoint needs 3\.0 MB.*from step 20"):
        check_room(tmp_path)
    left = newest.with_name("step_00000030.ab12cd34.partial")  # the run will remove it
    left.mkdir()
    (left / "a.distcp").write_bytes(bytes(1_500_000))
    check_room(tmp_path)


def report(
    host: str,
    offset_s: float = 0.0,
    *problems: str,
    topology: str = "",
    ranks: int = 8,
    unseen: str = "",
    unread: str = "",
) -> dict[str, Any]:
    return {
        "host": host, "offset_s": offset_s, "problems": list(problems), "topology": topology, "ranks": ranks,
        "unseen": unseen, "unread": unread,
    }  # fmt: skip


def judged(*reports: dict[str, Any] | None) -> tuple[str, list[str]]:
    there = {node: report for node, report in enumerate(reports) if report is not None}
    verdict = judge_nodes(there, len(reports), "a:20001")
    return verdict["reason"], verdict["bad"]


def test_verdict_over_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    assert judged(report("a"), report("b", 0.3), report("c", -0.2)) == ("", [])
    assert judged(report("a"), report("b", 0, "x", "y")) == ("node b is bad: x; y", ["b"])
    # The clock that most others disagree with; of two it cannot be told which is right.
    reason, bad = judged(report("a"), report("b", -60.0), report("c", -60.1))
    assert bad == ["a"] and "its clock is 60.1 s apart from the other nodes'" in reason
    assert judged(report("a"), report("b", 9))[1] == ["a", "b"]
    assert judged(report("a"), report("b"), None) == ("node number 2 is bad: it has not reached a:20001 within 300 s",
                                                     ["number 2"])  # fmt: skip
    assert judged(report("a"), None, None)[1] == ["a"], "one that nobody reaches is the bad one"


def test_a_folder_that_one_node_does_not_see_is_that_nodes_fault() -> None:
    reason, bad = judged(report("a"), report("b"), report("c", unseen="/runs/logs"))
    assert bad == ["c"] and "node c is bad: it does not see /runs/logs, which the job has made" in reason
    assert "output_dir" not in reason  # the others see it
    assert judged(report("a"), report("b", unseen="/runs/logs"))[0].endswith(
        "a file system is not mounted here, or output_dir is on none that both nodes share"
    )


def test_data_that_one_node_does_not_see_are_that_nodes_fault() -> None:
    reason, bad = judged(report("a"), report("b", unread="/corpus/x.idx"))
    assert bad == ["b"] and "node b is bad: it cannot read /corpus/x.idx, which other nodes can" in reason
    assert judged(report("a", unread="/x.idx"), report("b", unread="/x.idx")) == ("", []), "mhar says it better"


def test_nodes_that_are_not_started_as_one_run_are_not_bad() -> None:
    def mistake(*reports: dict[str, Any]) -> str:
        verdict = judge_nodes(dict(enumerate(reports)), len(reports), "a:20001")
        assert not verdict["bad"]
        return str(verdict["mistake"])

    text = mistake(report("a"), report("b", ranks=4), report("c"))
    assert text.startswith("node 1 (b) starts 4 ranks and node 2 (c) 8, but all nodes of a run have the same number")
    text = mistake(report("a"), report("b", unseen="/tmp/logs"), report("c", unseen="/tmp/logs"))
    assert text.startswith("output_dir: none of the other 2 nodes sees /tmp/logs, which the first one has made")
    for nodes in (1, 2, 4):  # nor does the first: its script ran outside of the container
        text = mistake(*(report(f"n{number}", unseen="/runs/logs") for number in range(nodes)))
        assert text.startswith("output_dir: no node sees /runs/logs, which the job has made: it is not mounted in the")


def test_verdict_over_the_all_reduce() -> None:
    def verdict(*failed: list[dict[str, Any]] | None) -> tuple[str, list[str]]:
        found = judge_probes(failed, ["a", "b"], 2)
        return found["reason"], found["bad"]

    wrong, lost = {"accused": [3], "reason": "wrong"}, {"accused": [], "reason": "connection lost"}
    assert verdict([], []) == ("", [])
    assert verdict([lost], [wrong, wrong]) == ("node b is bad: rank 3: wrong", ["b"])
    assert verdict([], None) == ("node b is bad: it has gone during the all-reduce", ["b"])
    assert verdict([lost], []) == ("a: connection lost", []), "nobody is accused without a reason"


def test_order_by_topology() -> None:
    assert by_topology(["", "", ""]) == [0, 1, 2]
    addresses = ["s.l2.a", "s.l1.b", "s.l2.c", "t.l3.d", "s.l1.e"]
    assert by_topology(addresses) == [0, 2, 1, 4, 3]


def meet(nodes: int, present: tuple[int, ...], timeout_s: float) -> dict[int, Any]:
    """What each node hears, or the error that it gets."""
    port, heard = free_port(), dict[int, Any]()

    def node(number: int) -> None:
        try:
            with Meeting(Place(number, nodes, 1, "localhost", port), timeout_s=timeout_s) as meeting:
                for _ in range(2):
                    heard[number] = meeting.exchange({"of": number}, lambda told: {str(n): m for n, m in told.items()})
        except Unhealthy as error:
            heard[number] = error

    def stranger() -> None:
        with socket.create_connection(("localhost", port), timeout=5) as connection:
            connection.sendall(b'{"job": "another", "node": 1}\n')

    threads = [threading.Thread(target=node, args=(number,)) for number in present]
    for thread in threads:
        thread.start()
    if 0 in present:
        for _ in range(100):
            try:
                stranger()
                break
            except OSError:
                threading.Event().wait(0.02)
    for thread in threads:
        thread.join(30)
    return heard


def test_nodes_meet_and_hear_the_same() -> None:
    heard = meet(3, (0, 1, 2), timeout_s=20)
    assert heard[0] == heard[1] == heard[2]
    assert {node: message["of"] for node, message in heard[0].items()} == {"0": 0, "1": 1, "2": 2}
    assert all(abs(message["offset_s"]) < 5 for message in heard[0].values())


def test_a_lost_node_has_its_own_name_where_the_topology_orders_nodes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes on two switches; the one in the middle by number is the last by rank, and is lost."""
    port, met = free_port(), dict[int, tuple[Place, Meeting]]()
    switches, names = ("s.l1", "s.l2", "s.l1"), threading.local()
    monkeypatch.setattr(health, "host_name", lambda: f"host{names.number}")
    monkeypatch.setattr(health, "node_problems", lambda ranks: [])

    class Environment(dict[str, str]):
        def get(self, key: str, default: Any = None) -> Any:
            return f"{switches[names.number]}.host{names.number}" if key == "SLURM_TOPOLOGY_ADDR" else default

    monkeypatch.setattr(health.os, "environ", Environment())

    def node(number: int) -> None:
        names.number = number
        met[number] = check_nodes(Place(number, 3, 1, "localhost", port), logs=None, level="quick")

    threads = [threading.Thread(target=node, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [met[number][0].node for number in range(3)] == [0, 2, 1]
    met[1][1].close()
    meeting = met[0][1]
    for _ in range(100):
        if meeting.ended():
            break
        threading.Event().wait(0.02)
    assert {meeting.hosts[number]: code for number, code in meeting.ended().items()} == {"host1": None}
    for _, meeting in met.values():
        meeting.close()


def test_who_does_not_come_is_missing() -> None:
    heard = meet(3, (0, 2), timeout_s=1.5)
    assert set(heard[0]) == {"0", "2"} and heard[0] == heard[2]
    assert "does not reach localhost:" in str(meet(2, (1,), timeout_s=0.5)[1])


def test_two_nodes_of_one_number_are_refused() -> None:
    port = free_port()
    place = Place(1, 3, 1, "localhost", port)
    threads = [threading.Thread(target=lambda: Meeting(place, timeout_s=20)) for _ in range(2)]
    for thread in threads:
        thread.start()
    with pytest.raises(UserError, match="NODE_RANK: 1 given on two nodes"):
        Meeting(Place(0, 3, 1, "localhost", port), timeout_s=20)
    for thread in threads:
        thread.join(30)


def test_who_waits_for_whom_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(health, "_SILENT_S", 0.2)
    meet(3, (0, 2), timeout_s=1.5)
    meet(2, (1,), timeout_s=0.6)
    said = capsys.readouterr().err
    assert " for node 1 of 3, 1 s more\n" in said
    assert said.count(" does not reach localhost:") == 1 and " yet (" in said


def test_a_first_node_that_nobody_knows_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand; in a job the name is Slurm's, and its node may be booting."""

    def nobodys(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(health, "_SILENT_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", nobodys)
    unknown = Place(1, 2, 1, "nobody", 29500)
    for job, least in (("", 0.2), ("7", 1.0)):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        began = time.monotonic()
        with pytest.raises(Unhealthy, match=r"does not reach nobody:29500: .*"):
            Meeting(unknown, timeout_s=1.0)
        assert time.monotonic() - began >= least and (job or time.monotonic() - began < 1.0)


def test_a_network_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (None, "", "lo", "lo,=eth7", "^docker0"):
        health.check_interface(names)
    with pytest.raises(UserError, match=r"MHAR_INTERFACE: 'ib7' given, but \S+ has no such .*; it has (.*, )?lo\b"):
        health.check_interface("ib7")


def test_a_port_that_is_taken_is_the_first_nodes_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as other:
        with pytest.raises(Unhealthy, match=r"node n7 is bad: port \d+ cannot be opened") as caught:
            Meeting(Place(0, 2, 1, "localhost", other.getsockname()[1]))
    assert caught.value.hosts == ("n7",)


SABOTAGE = """\
import os, torch
from megatron_mhar.launch import probe
whole = torch.distributed.all_reduce
def all_reduce(numbers):
    if os.environ["RANK"] == "1":
        numbers[1] += 1
    whole(numbers)
torch.distributed.all_reduce = all_reduce
probe.main()
"""


def test_the_rank_whose_part_of_a_sum_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of one node; a wrapper in place of the interpreter spoils what the second one gives."""
    (tmp_path / "sabotage.py").write_text(SABOTAGE)
    wrapper = tmp_path / "python"
    wrapper.write_text(f"#!/usr/bin/env bash\nexec {sys.executable} {tmp_path}/sabotage.py\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr(health.sys, "executable", str(wrapper))
    with pytest.raises(Unhealthy, match="node n7 is bad: rank 1: its part of a sum over all ranks arrived") as caught:
        check_nodes(Place(0, 1, 2, "localhost", free_port()), logs=None, level="full")
    assert caught.value.hosts == ("n7",)


def test_a_rank_that_crashes_is_its_nodes_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health.sys, "executable", "/bin/false")
    with pytest.raises(Unhealthy, match=r"rank 0: ended with code 1: it said nothing"):
        check_nodes(Place(0, 1, 2, "localhost", free_port()), logs=None, level="full")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="of a machine without a GPU")
def test_gpus_that_torch_does_not_see_are_the_nodes_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would train on processors without a word."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(
        Unhealthy, match="n7 is bad: .*CUDA_VISIBLE_DEVICES: 0,1 given, but torch sees no GPU"
    ) as caught:
        check_nodes(Place(0, 1, 2, "localhost", free_port()), logs=None, level="full")
    assert caught.value.hosts == ("n7",)
    monkeypatch.setenv("MHAR_ALLOW_CPU", "1")
    check_nodes(Place(0, 1, 2, "localhost", free_port()), logs=None, level="full")[1].close()


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert level_of({}) == level_of({"MHAR_HEALTH_CHECK": ""}) == "full"
    with pytest.raises(UserError, match=r"MHAR_HEALTH_CHECK: 'some' given; allowed: full, quick, off"):
        level_of({"MHAR_HEALTH_CHECK": "some"})
    monkeypatch.setattr(health, "node_problems", lambda ranks: ["broken"])
    place = Place(0, 1, 2, "localhost", 1)
    assert check_nodes(place, logs=None, level="off")[0] == place
    with pytest.raises(Unhealthy, match="broken"):
        check_nodes(place, logs=None, level="quick")


def test_launch_node_names_the_bad_node(tmp_path: Path, nvidia_smi: Callable[..., None]) -> None:
    """From the shell: no rank starts, and what the job reads lies in the logs."""
    nvidia_smi(gpu(0, errors="7"), gpu(1))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    environment |= {
        "MHAR_RANKS_PER_NODE": "2", "MHAR_LOGS": str(tmp_path), "SLURMD_NODENAME": "n7",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    command = [str(ROOT / "launch/node"), str(ROOT / "configs/demo/mhar.yaml"), f"output_dir={tmp_path}"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3
    reason = "node n7 is bad: GPU 0 (GPU-0ab) has 7 uncorrected ECC errors since its last reset"
    assert reason in done.stderr
    assert (tmp_path / "bad-nodes").read_text() == "n7\n"
    assert (tmp_path / "node-0000.end").read_text().endswith(f" 3 {reason}\n")
    assert not list(tmp_path.glob("rank-*"))
