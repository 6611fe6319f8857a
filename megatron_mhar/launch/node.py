"""The ranks of one node: rank and rendezvous from the environment, a log each, signals passed on, ends explained.

    python -m megatron_mhar.launch.node CONFIG [KEY=VALUE]...      (launch/node sets the environment and calls this)

Logs lie in ``MHAR_LOGS``, or in ``logs/<time>`` of the run folder: ``rank-<rank>.log``, and of a node whose ranks have
failed ``node-<node>.end``, one line ``<seconds since 1970> <exit code> <reason>``. The first rank of all also writes to
this process's output, which makes the job's log.

SIGTERM, SIGINT and SIGUSR1 are passed on as SIGUSR1, the notice that a rank may get twice: Slurm's signals reach this
process alone or, if it is configured so, the ranks too. A second SIGTERM or SIGINT is passed on as it is.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from megatron_mhar.config.load import load_config
from megatron_mhar.errors import UserError

BAD_INPUT = 2  # exit code of mhar for what a repetition does not mend
_POLL_S = 0.1
_KILL_AFTER_S = 10  # between SIGTERM and SIGKILL for ranks that hang once another has failed
_DEFAULT_PORT = 29500  # torchrun's


@dataclass(frozen=True)
class Place:
    """Where this node stands in a run.

    Attributes:
        node: its number.
        nodes: how many there are.
        ranks: ranks on each of them.
        address: host of rank 0, where the ranks meet.
        port: free there.
    """

    node: int
    nodes: int
    ranks: int
    address: str
    port: int

    def environment(self, local_rank: int) -> dict[str, str]:
        """Variables of one rank, torch's names."""
        values = {
            "RANK": self.node * self.ranks + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.nodes * self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {key: str(value) for key, value in values.items()}


def find_place(environment: Mapping[str, str]) -> Place:
    """This node's place as Slurm says, or NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT; a lone node without them.

    Raises:
        UserError: a variable is missing or is no number, or srun started several of us on a node.
    """
    ranks = _ranks(environment)
    if "SLURM_STEP_NODELIST" in environment:
        nodes, tasks = _number(environment, "SLURM_STEP_NUM_NODES"), _number(environment, "SLURM_STEP_NUM_TASKS")
        if tasks != nodes:
            raise UserError(
                f"srun: {tasks} tasks on {nodes} nodes given, but launch/node starts the ranks of a node itself; "
                "needed is --ntasks-per-node=1"
            )
        job = _number(environment, "SLURM_JOB_ID", least=0)
        address = first_host(environment["SLURM_STEP_NODELIST"])
        return Place(_number(environment, "SLURM_NODEID", least=0), nodes, ranks, address, port_of_job(job))
    nodes = _number(environment, "NNODES", default=1)
    if nodes == 1:
        port = _number(environment, "MASTER_PORT", default=_free_port())
        return Place(0, 1, ranks, environment.get("MASTER_ADDR", "localhost"), port)
    node = _number(environment, "NODE_RANK", least=0)
    if node >= nodes:
        raise UserError(f"NODE_RANK: {node} given, but with NNODES {nodes} it must be below that")
    if not environment.get("MASTER_ADDR"):
        raise UserError(f"MASTER_ADDR: missing; with NNODES {nodes} it must name the host of node 0")
    port = _number(environment, "MASTER_PORT", default=_DEFAULT_PORT)
    return Place(node, nodes, ranks, environment["MASTER_ADDR"], port)


def port_of_job(job: int) -> int:
    """The port at which the ranks of a Slurm job meet: 20000 to 29999, below those that systems give out themselves.

    Jobs that share a node have numbers close to each other, and so other ports.
    """
    return 20000 + job % 10000


def first_host(nodelist: str) -> str:
    """First host of Slurm's short form: ``rack[2-4,7]-n[01-16],login`` -> ``rack2-n01``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert first is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _ranks(environment: Mapping[str, str]) -> int:
    """Ranks of a node: as MHAR_RANKS_PER_NODE says, else one a GPU, else one."""
    for key in ("MHAR_RANKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if environment.get(key):
            return _number(environment, key)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([name for name in visible.split(",") if name.strip()]))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 1
    return max(1, listed.count("GPU "))


def _number(environment: Mapping[str, str], key: str, *, default: int | None = None, least: int = 1) -> int:
    text = environment.get(key, "")
    if not text and default is not None:
        return default
    if not text:
        raise UserError(f"{key}: missing; needed is a whole number")
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{key}: {text!r} given, but it must be a whole number of {least} or more")
    return int(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Rank:
    """A rank's process; what it says goes to its log, and is repeated here if ``repeated``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, repeated: bool) -> None:
        self.number, self.log = int(environment["RANK"]), log
        self._file = log.open("ab")
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if repeated else self._file,
            stderr=subprocess.STDOUT,
        )
        self._copier: threading.Thread | None = None
        if self._process.stdout is not None:
            self._copier = threading.Thread(target=self._copy, args=(self._process.stdout,), daemon=True)
            self._copier.start()

    def _copy(self, source: IO[bytes]) -> None:
        for line in source:
            for target in (self._file, sys.stdout.buffer):
                try:
                    target.write(line)
                    target.flush()
                except OSError:
                    pass  # a full disk must not stop the rank, which would wait for its line to be read

    def poll(self) -> int | None:
        """Its exit code, minus the signal that killed it; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(number)

    def finish(self) -> None:
        """Read the rest of what it said."""
        if self._copier is not None:
            self._copier.join(timeout=2)  # a process that it left behind may keep the pipe open
        try:
            self._file.close()
        except OSError:
            pass

    def explain(self) -> tuple[int, str]:
        """Exit code, and why in one line.

        The reason is mhar's error message where there is one, else the last line that the rank said.
        """
        code = self.poll()
        assert code is not None
        who = f"rank {self.number} on {socket.gethostname()} (pid {self._process.pid})"
        if code == -signal.SIGUSR1:  # training itself answers the notice
            return 128 - code, f"{who} was told to stop while it did not train, and had nothing to save"
        if code < 0:
            return 128 - code, f"{who} was killed by {signal.Signals(-code).name}"
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else "it said nothing"
        if code == BAD_INPUT:
            errors = [number for number, line in enumerate(lines) if line.startswith("mhar: error: ")]
            last = " ".join(lines[errors[-1] :]).removeprefix("mhar: error: ") if errors else last
        return code, f"{who} ended with code {code}: {last[:1000]}"


class Node:
    """All ranks of this node.

    Args:
        place: of the node.
        arguments: of ``mhar train``.
        logs: folder of the logs; it is made.
        patience_s: how long the ranks may take to end by themselves once one has failed: they tell more than we know.
    """

    def __init__(self, place: Place, arguments: Sequence[str], logs: Path, *, patience_s: float) -> None:
        self.place, self.logs, self.patience_s = place, logs, patience_s
        self._command = [sys.executable, "-m", "megatron_mhar.cli.main", "train", *arguments]
        self._ranks: list[Rank] = []
        self._noticed = False

    def run(self) -> int:
        """Start the ranks, and stay until all have ended.

        Returns:
            0 if all of them ended with 0; else the code of the one that failed first, 128 + signal if it was killed.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._pass_on)
        for local_rank in range(self.place.ranks):
            environment = {**os.environ, **self._defaults(), **self.place.environment(local_rank)}
            log = self.logs / f"rank-{int(environment['RANK']):05d}.log"
            self._ranks.append(Rank(self._command, environment, log, repeated=environment["RANK"] == "0"))
        if self._noticed:  # while they were being started
            self._tell(signal.SIGUSR1)
        code = 0
        while any(rank.poll() is None for rank in self._ranks):
            failed = [rank for rank in self._ranks if rank.poll()]
            if failed:
                code = self._explain(failed)
                self._end()
                break
            time.sleep(_POLL_S)
        failed = [rank for rank in self._ranks if rank.poll()]
        if failed and not code:
            code = self._explain(failed)
        for rank in self._ranks:
            rank.finish()
        return code

    def _defaults(self) -> dict[str, str]:
        """Settings that depend on the ranks; what the environment has already stays."""
        values = {"TORCH_FR_DUMP_TEMP_FILE": str(self.logs / "nccl-trace-rank-")}
        if self.place.ranks > 1:
            # As torchrun does: else each rank starts a thread for every core of the node.
            values["OMP_NUM_THREADS"] = "1"
        return {key: value for key, value in values.items() if key not in os.environ}

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        notice = number == signal.SIGUSR1 or not self._noticed
        self._noticed = True
        self._tell(signal.SIGUSR1 if notice else number)

    def _tell(self, number: int) -> None:
        for rank in self._ranks:
            rank.signal(number)

    def _explain(self, failed: Sequence[Rank]) -> int:
        """Say which rank failed first and why, and leave it for the job."""
        for rank in failed:
            rank.finish()
        explained = [rank.explain() for rank in failed]
        # A rank that was killed or was given bad input has not failed because of another one.
        code, reason = min(explained, key=lambda each: (each[0] < 128, each[0] != BAD_INPUT))
        leave_reason(self.logs, self.place.node, code, reason)
        say(reason)
        return code

    def _end(self) -> None:
        """Wait for the ranks that are left, and end those that hang."""
        for seconds, number in ((self.patience_s, signal.SIGTERM), (_KILL_AFTER_S, signal.SIGKILL)):
            until = time.monotonic() + seconds
            while time.monotonic() < until and any(rank.poll() is None for rank in self._ranks):
                time.sleep(_POLL_S)
            for rank in self._ranks:
                if rank.poll() is None:
                    rank.signal(number)
        while any(rank.poll() is None for rank in self._ranks):
            time.sleep(_POLL_S)


def leave_reason(logs: Path, node: int, code: int, reason: str) -> None:
    """Write ``node-<node>.end``, once: the first reason stays. Where it cannot be written, the job's log has it."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"node-{node:04d}.end").open("x") as file:
            file.write(f"{time.time():.3f} {code} {' '.join(reason.split())}\n")
    except OSError:
        pass


def say(text: str) -> None:
    """A line of the job's log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run this node's ranks of ``mhar train`` with these arguments; the exit code is :meth:`Node.run`'s, or 2."""
    logs = Path(os.environ["MHAR_LOGS"]) if os.environ.get("MHAR_LOGS") else None
    try:
        if not arguments or arguments[0].startswith("-"):
            raise UserError("launch/node CONFIG [KEY=VALUE]... starts the ranks of this node; no CONFIG was given")
        config = load_config(Path(arguments[0]), arguments[1:])  # told once, not by every rank
        place = find_place(os.environ)
        logs = logs or config.run_dir / "logs" / time.strftime("%Y%m%d-%H%M%S")
        patience_s = config.parallel.heartbeat_s + 15
        return Node(place, arguments, logs, patience_s=patience_s).run()
    except UserError as error:
        node = int(os.environ.get("SLURM_NODEID") or 0)
        if node == 0:
            print(f"mhar: error: {error}", file=sys.stderr, flush=True)
        if logs is not None:
            leave_reason(logs, node, BAD_INPUT, str(error))
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
