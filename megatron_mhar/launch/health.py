"""Health of the nodes of a run, looked at before its ranks start, so that a bad node is named and not guessed at.

Every node looks at itself: GPUs (number, ECC errors, memory in use) where there is nvidia-smi, free disk for its
temporary files, whether it sees the folder of the logs. Then all meet at node 0, at the port where the ranks will meet:
whoever does not come cannot reach it, and clocks are compared. At last every rank takes part in an all-reduce of known
sum (:mod:`megatron_mhar.launch.probe`). Node 0 judges, and tells all nodes. The connections stay while the ranks run:
a node that is lost is noticed, also before its ranks have met the others.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from megatron_mhar.errors import UserError
from megatron_mhar.launch.place import Place, host_name, hosts_of
from megatron_mhar.run_files import PARTIAL, RunFiles, checkpoint_path, checkpoint_steps

Level = Literal["full", "quick", "off"]

MEET_S = 300.0  # nodes of one job start within seconds, but some may have to fetch a container's image first
_SILENT_S = 15.0  # then it is said who waits for whom
_ANSWER_S = 30.0
_PROBE_S = 300.0  # longer than the time-out of its collectives
_CLOCK_S = 5.0  # time servers keep nodes within milliseconds
_LEAST_TEMPORARY = 1 << 30  # bytes: compiled kernels of Triton and Inductor
_MOST_USED = 0.1  # of a GPU's memory, before a rank has started; what the driver itself takes is less
_QUERY = "index,uuid,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"


class Unhealthy(Exception):
    """The ranks must not start. ``hosts`` are the nodes to blame, none where that is not known."""

    def __init__(self, reason: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.hosts = tuple(hosts)


def level_of(environment: Mapping[str, str]) -> Level:
    """What MHAR_HEALTH_CHECK asks for; ``full`` by default.

    Raises:
        UserError: it is none of these.
    """
    text = environment.get("MHAR_HEALTH_CHECK") or "full"
    for level in get_args(Level):
        if text == level:
            return level
    raise UserError(f"MHAR_HEALTH_CHECK: {text!r} given; allowed: {', '.join(get_args(Level))}")


def check_nodes(place: Place, *, logs: Path | None, level: Level, files: Sequence[Path] = ()) -> tuple[Place, Meeting]:
    """Check all nodes of a run together; called by each of them.

    Args:
        place: of this node.
        logs: folder that the job has made for the logs, if it has.
        level: ``quick`` leaves the all-reduce out, which starts every rank; ``off`` does nothing.
        files: that the ranks will read.

    Returns:
        This node's place, its number that in the order of the network's topology, where Slurm knows it; and the nodes'
        meeting, which is the caller's to close. With ``off`` this node has met none.

    Raises:
        Unhealthy: a node is bad, or they do not reach each other.
        UserError: they are not started as nodes of one run.
    """
    if level == "off":
        return place, Meeting(replace(place, nodes=1))
    check_interface(os.environ.get("MHAR_INTERFACE"))
    meeting = Meeting(place)
    try:
        own = {
            "host": host_name(),
            "ranks": place.ranks,
            "problems": node_problems(place.ranks),
            "unseen": str(logs) if logs is not None and not logs.is_dir() else "",  # made by the job's script
            "unread": next((str(file) for file in files if not os.access(file, os.R_OK)), ""),
            "topology": os.environ.get("SLURM_TOPOLOGY_ADDR", ""),
        }
        verdict = meeting.exchange(own, lambda reports: judge_nodes(reports, place.nodes, meeting.where))
        hosts, order = _accept(verdict)
        # In the order of ranks; connections have the numbers that the nodes came with.
        meeting.hosts = [hosts[order.index(node)] for node in range(place.nodes)]
        place = replace(place, node=order.index(place.node))
        if level == "full" and place.nodes * place.ranks > 1:
            _accept(
                meeting.exchange(
                    {"failed": probe(place)},
                    lambda told: judge_probes([told.get(n, {}).get("failed") for n in order], hosts, place.ranks),
                )
            )
    except BaseException:
        meeting.close()
        raise
    return place, meeting


def _accept(verdict: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    if verdict.get("mistake"):
        raise UserError(verdict["mistake"])
    if verdict["reason"]:
        raise Unhealthy(verdict["reason"], verdict["bad"])
    return verdict["hosts"], verdict["order"]


# --- what a node sees of itself


def check_interface(names: str | None) -> None:
    """Refuse network interfaces, as NCCL and gloo would get them, that are not on this machine.

    Raises:
        UserError: one is not there; the error names those that are.
    """
    there = [name for _, name in socket.if_nameindex()]
    if missing_interface(names, there) is not None:
        raise UserError(
            f"MHAR_INTERFACE: {names!r} given, but {host_name()} has no such network interface; it has "
            f"{', '.join(there)}"
        )


def missing_interface(names: str | None, there: Sequence[str]) -> str | None:
    """The first of ``names`` that is none of ``there``; NCCL takes beginnings of names, and signs before them."""
    for name in (each.strip() for each in (names or "").split(",")):
        if name and name[0] not in "^=" and not any(each.startswith(name) for each in there):
            return name
    return None


def node_problems(ranks: int) -> list[str]:
    """What is wrong with this node for a run of ``ranks`` ranks here, a line each."""
    problems = gpu_problems(ranks, os.environ.get("CUDA_VISIBLE_DEVICES"))
    temporary = tempfile.gettempdir()
    free = shutil.disk_usage(temporary).free
    if free < _LEAST_TEMPORARY:
        problems.append(f"{free / 1e6:,.0f} MB are free in {temporary}, of at least {_LEAST_TEMPORARY / 1e6:,.0f}")
    return problems


def gpu_problems(ranks: int, visible: str | None) -> list[str]:
    """What nvidia-smi says against the GPUs that ``ranks`` ranks would use; nothing where it is not installed.

    Args:
        ranks: one a GPU.
        visible: CUDA_VISIBLE_DEVICES, None where it is not set.
    """
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired:
        return ["nvidia-smi does not answer: a GPU or its driver hangs"]
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["it says nothing"]
        return [f"nvidia-smi ends with code {done.returncode}: {said[-1]}"]
    rows = [[field.strip() for field in row] for row in csv.reader(done.stdout.splitlines()) if len(row) == 5]
    present = len(rows)
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        rows = [row for row in rows if row[0] in names or any(row[1].startswith(name) for name in names)]
        # Slices of a GPU have no row of their own.
        present = len(rows) + sum(name.startswith("MIG-") for name in names)
    problems = []
    if present < ranks:
        problems.append(f"nvidia-smi shows {present} GPUs of the {ranks} that the job has here")
    for index, uuid, total, used, errors in rows:
        if errors.isdecimal() and int(errors):  # "[N/A]" where it is not counted
            problems.append(f"GPU {index} ({uuid}) has {errors} uncorrected ECC errors since its last reset")
        if total.isdecimal() and used.isdecimal() and int(used) > _MOST_USED * int(total):
            problems.append(f"GPU {index} ({uuid}) has {used} of {total} MiB in use before a rank has started")
    return problems


def check_room(run_dir: Path) -> None:
    """Refuse a run whose next checkpoint would not fit: that is known before hours of training.

    Raises:
        UserError: less is free than the newest checkpoint takes.
    """
    folder = RunFiles(run_dir).checkpoints
    steps = checkpoint_steps(folder)
    if not steps:
        return
    newest = checkpoint_path(folder, steps[-1])
    need = _size(newest)
    # What a save that was ended has left goes when the run begins.
    free = shutil.disk_usage(folder).free + sum(map(_size, folder.glob(f"step_*{PARTIAL}")))
    if free < need:
        raise UserError(
            f"{folder}: {free / 1e6:,.1f} MB are free there, but the next checkpoint needs {need / 1e6:,.1f} MB, as "
            f"{newest.name} does. Once this is mended, the same command goes on from step {steps[-1]}"
        )


def _size(folder: Path) -> int:
    """Bytes of the files in a checkpoint's folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


# --- what node 0 makes of it


def judge_nodes(reports: Mapping[int, Mapping[str, Any]], nodes: int, where: str) -> dict[str, Any]:
    """Verdict over the nodes' reports on themselves.

    Args:
        reports: by node; those that did not come are missing. ``offset_s`` is a clock's lead over node 0's, ``unseen``
            the folder of the logs where a node does not see it, ``unread`` a file of the data that it cannot read.
        nodes: how many there are.
        where: host and port where they met.
    """
    if mistake := _mistake(reports, nodes):
        return _verdict({}) | {"mistake": mistake}
    found: dict[str, str] = {}
    missing = [node for node in range(nodes) if node not in reports]
    names = {node: str(reports[node]["host"]) if node in reports else _expected_host(node) for node in range(nodes)}
    if len(missing) == nodes - 1 > 1:
        found[names[0]] = f"none of the other {nodes - 1} nodes has reached {where} within {MEET_S:g} s"
        missing = []
    for node in missing:
        found[names[node]] = f"it has not reached {where} within {MEET_S:g} s"
    for node, report in reports.items():
        apart = [abs(report["offset_s"] - other["offset_s"]) for other in reports.values() if other is not report]
        problems = list(report["problems"])
        if report["unseen"]:
            problem = f"it does not see {report['unseen']}, which the job has made: a file system is not mounted here"
            problems.append(problem + (", or output_dir is on none that both nodes share" if nodes == 2 else ""))
        if report["unread"] and not all(other["unread"] for other in reports.values()):  # else mhar says what is wrong
            problems.append(
                f"it cannot read {report['unread']}, which other nodes can: a file system is not mounted here"
            )
        if sum(seconds > _CLOCK_S for seconds in apart) > len(apart) / 2:
            problems.append(f"its clock is {max(apart):,.1f} s apart from the other nodes'")
        if problems:
            found[names[node]] = "; ".join(problems)
    order = by_topology([str(reports[node]["topology"]) if node in reports else "" for node in range(nodes)])
    return _verdict(found) | {"hosts": [names[node] for node in order], "order": order}


def _mistake(reports: Mapping[int, Mapping[str, Any]], nodes: int) -> str:
    """What is wrong with how the nodes were started, and with none of them."""
    starts = sorted((each["ranks"], node, each["host"]) for node, each in reports.items())
    few, many = starts[0], starts[-1]
    if few[0] != many[0]:
        return (
            f"node {few[1]} ({few[2]}) starts {few[0]} ranks and node {many[1]} ({many[2]}) {many[0]}, but all nodes "
            "of a run have the same number: set MHAR_RANKS_PER_NODE, or use as many GPUs on each"
        )
    unseen = [report["unseen"] for report in reports.values() if report["unseen"]]
    if len(unseen) == nodes:
        return (
            f"output_dir: no node sees {unseen[0]}, which the job has made: it is not mounted in the container; "
            "MHAR_OUTPUT_DIR is, and what MHAR_MOUNTS names"
        )
    if len(unseen) == nodes - 1 > 1:
        return (
            f"output_dir: none of the other {nodes - 1} nodes sees {unseen[0]}, which the first one has made: it is on "
            "no shared file system; choose another by MHAR_OUTPUT_DIR or output_dir=..."
        )
    return ""


def judge_probes(
    failed: Sequence[Sequence[Mapping[str, Any]] | None], hosts: Sequence[str], ranks: int
) -> dict[str, Any]:
    """Verdict over the all-reduce.

    Args:
        failed: for each node in the order of ranks, what its ranks say that have failed; None if it has gone.
        hosts: names of the nodes in that order.
        ranks: on each node.
    """
    found: dict[str, str] = {}
    for host, failures in zip(hosts, failed, strict=True):
        if failures is None:
            found[host] = "it has gone during the all-reduce"
        for failure in failures or ():
            for rank in failure["accused"]:
                found.setdefault(hosts[rank // ranks], f"rank {rank}: {failure['reason']}")
    if found:
        return _verdict(found)
    told = [f"{host}: {failure['reason']}" for host, failures in zip(hosts, failed) for failure in failures or ()]
    return {"reason": told[0] if told else "", "bad": [], "hosts": [], "order": []}


def _verdict(found: Mapping[str, str]) -> dict[str, Any]:
    reason = "; ".join(f"node {host} is bad: {text}" for host, text in found.items())
    return {"reason": reason, "bad": list(found), "hosts": [], "order": []}


def _expected_host(node: int) -> str:
    """Name of a node that has not been heard, as Slurm has it."""
    with contextlib.suppress(KeyError, IndexError, ValueError):
        return hosts_of(os.environ["SLURM_STEP_NODELIST"])[node]
    return f"number {node}"


def by_topology(addresses: Sequence[str]) -> list[int]:
    """Order of nodes in which those of one switch stand together, at every level of the network.

    Args:
        addresses: SLURM_TOPOLOGY_ADDR of each node, like ``spine.leaf1.node3``; the first node stays the first.
    """
    first: dict[tuple[str, ...], int] = {}
    paths = [address.split(".")[:-1] for address in addresses]
    for node, path in enumerate(paths):
        for depth in range(len(path)):
            first.setdefault(tuple(path[: depth + 1]), node)
    keys = [[first[tuple(path[: depth + 1])] for depth in range(len(path))] for path in paths]
    return sorted(range(len(addresses)), key=lambda node: (keys[node], node))


# --- the all-reduce of known sum


def probe(place: Place) -> list[dict[str, Any]]:
    """Run this node's ranks of the probe; what those say that failed."""
    command = [sys.executable, "-m", "megatron_mhar.launch.probe"]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **place.environment(local_rank)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for local_rank in range(place.ranks)
    ]  # fmt: skip
    end = time.monotonic() + _PROBE_S
    failed = []
    for local_rank, process in enumerate(ranks):
        rank = place.node * place.ranks + local_rank
        try:
            output, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failed.append({"accused": [], "reason": f"rank {rank} has not come out of an all-reduce in {_PROBE_S:g} s"})
            continue
        if process.returncode:
            failed.append(_failure(rank, process.returncode, output))
    return failed


def _failure(rank: int, code: int, output: str) -> dict[str, Any]:
    last = (output.strip().splitlines() or ["it said nothing"])[-1]
    with contextlib.suppress(ValueError, TypeError, KeyError):
        told = json.loads(last)
        return {"accused": list(told["accused"]), "reason": str(told["reason"])}
    # It ended without an explanation: a crash of a driver or library, or the system's memory is short.
    return {"accused": [rank], "reason": f"ended with code {code}: {last[:500]}"}


# --- the nodes' conversation


class _Link:
    """A connection to another node: a JSON document a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""

    def keep(self, dead_s: int) -> None:
        """Let the connection break once the other machine has been dead or out of reach for ``dead_s``."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", dead_s // 2), ("TCP_KEEPINTVL", dead_s // 6), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # not on every system
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Mapping[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> Any:
        end = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            self.socket.settimeout(max(0.001, end - time.monotonic()))
            data = self.socket.recv(1 << 16)
            if not data:
                raise OSError("the connection has been closed")
            self._received += data
        return self._message()

    def news(self) -> Any:
        """What has been received whole by now, None if nothing has."""
        self.socket.setblocking(False)
        try:
            while b"\n" not in self._received:
                data = self.socket.recv(1 << 16)
                if not data:
                    raise OSError("the connection has been closed")
                self._received += data
        except BlockingIOError:
            return None
        return self._message()

    def _message(self) -> Any:
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        self.socket.close()


class Meeting:
    """The nodes of a run, each with a connection to node 0; a lone node meets itself. A context manager closes it.

    Args:
        place: of this node.
        timeout_s: how long node 0 waits for the others, and they for it.

    Attributes:
        where: address and port of node 0.
        hosts: of the nodes, by the number that they came with; empty until they are known.

    Raises:
        Unhealthy: node 0 cannot be reached, or cannot listen.
        UserError: two nodes have the same number.
    """

    def __init__(self, place: Place, *, timeout_s: float = MEET_S) -> None:
        self.place = place
        self.where = f"{place.address}:{place.port}"
        self.hosts: list[str] = []
        self._links: dict[int, _Link] = {}
        self._ended: dict[int, int | None] = {}
        end = time.monotonic() + timeout_s
        if place.nodes > 1:
            self._listen(end) if place.node == 0 else self._connect(end)

    def exchange(self, own: Mapping[str, Any], judge: Callable[[dict[int, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Tell node 0 something, and hear its verdict, which is the same on every node.

        Args:
            own: what this node has to say.
            judge: called by node 0 with what each node says; one that cannot be heard is missing. ``offset_s`` is added
                to each: by how much that node's clock is ahead of node 0's.

        Raises:
            Unhealthy: node 0 does not answer.
        """
        if self.place.node:
            try:
                self._links[0].receive(_PROBE_S + MEET_S)  # asked for it
                self._links[0].send({**own, "time": time.time()})
                verdict: dict[str, Any] = self._links[0].receive(_PROBE_S + MEET_S)
                return verdict
            except (OSError, ValueError) as error:
                raise Unhealthy(f"{self.where}: the first node does not answer any more: {error}") from None
        messages: dict[int, Any] = {0: {**own, "offset_s": 0.0}}
        for node, link in self._links.items():
            with contextlib.suppress(OSError, ValueError):
                asked = time.time()
                link.send({})
                message = link.receive(_PROBE_S + _ANSWER_S)
                # The answer was written in the middle of this, as far as can be told.
                offset_s = message["time"] - (asked + time.time()) / 2
                messages[node] = {**message, "offset_s": offset_s}
        verdict = judge(messages)
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(verdict)
        return verdict

    def keep(self, dead_s: int) -> None:
        """Take a node for lost once its machine has been dead or out of reach for ``dead_s``."""
        for link in self._links.values():
            link.keep(dead_s)

    def ended(self) -> Mapping[int, int | None]:
        """Nodes that have left, by the number that they came with, and the code they left with; None for a lost one.

        Node 0 knows of every node, the others know of node 0.
        """
        for node, link in list(self._links.items()):
            try:
                news = link.news()
                if news is None:
                    continue
                code = int(news["left"])
            except (OSError, ValueError, KeyError, TypeError):
                code = None
            self._ended[node] = code
            self._links.pop(node).close()
        return self._ended

    def leave(self, code: int) -> None:
        """Tell the others that the ranks of this node end with ``code``; what it is first told holds."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send({"left": code})

    def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.close()

    def _listen(self, end: float) -> None:
        """Node 0: wait for the others, those of this job alone."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            server = socket.create_server(("", self.place.port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            host, why = host_name(), os.strerror(error.errno or 0)
            reason = f"node {host} is bad: port {self.place.port} cannot be opened there ({why})"
            if not _job():
                reason += "; if another run, or another NODE_RANK=0, has it: set another MASTER_PORT on every node"
            raise Unhealthy(reason, [host]) from None
        silent = time.monotonic() + _SILENT_S
        with server:  # closed before the verdict: the ranks will listen there
            while len(self._links) < self.place.nodes - 1 and (left := end - time.monotonic()) > 0:
                if time.monotonic() > silent:
                    silent = end
                    missing = [number for number in range(1, self.place.nodes) if number not in self._links]
                    say(f"waiting at {self.where} for {_numbers(missing)} of {self.place.nodes}, {left:.0f} s more")
                server.settimeout(max(0.1, min(left, silent - time.monotonic())))
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    link = _Link(server.accept()[0])
                    hello = link.receive(min(left, _ANSWER_S))
                    if hello["job"] != _job() or not 0 < hello["node"] < self.place.nodes:
                        link.close()
                    elif hello["node"] in self._links:
                        raise UserError(f"NODE_RANK: {hello['node']} given on two nodes; each has its own number")
                    else:
                        self._links[hello["node"]] = link

    def _connect(self, end: float) -> None:
        silent = time.monotonic() + _SILENT_S
        while True:
            try:
                link = _Link(socket.create_connection((self.place.address, self.place.port), timeout=_ANSWER_S))
                link.send({"job": _job(), "node": self.place.node})
            except OSError as error:
                # A name that is nobody's stays so; but in a job it is Slurm's word, and the node may be booting.
                unknown = isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME and not _job()
                if (now := time.monotonic()) > (min(silent, end) if unknown else end):
                    raise Unhealthy(f"{host_name()} does not reach {self.where}: {error}") from None
                if now > silent and not _job():  # of a job the first node says it
                    silent = end
                    say(f"{host_name()} does not reach {self.where} yet ({error}), tries {end - now:.0f} s more")
                time.sleep(0.2)
                continue
            self._links[0] = link
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _job() -> str:
    return os.environ.get("SLURM_JOB_ID", "")


def _numbers(nodes: Sequence[int]) -> str:
    shown = ", ".join(map(str, nodes[:5]))
    return f"node{'s' if len(nodes) > 1 else ''} {shown}{' ...' if len(nodes) > 5 else ''}"


def say(text: str) -> None:
    """A line of the job's log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)
