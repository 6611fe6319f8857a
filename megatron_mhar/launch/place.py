"""Where a node stands in a run: its number, the others, and where the ranks meet, from the environment."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_mhar.errors import UserError

_DEFAULT_PORT = 29500  # torchrun's
_LAST_PORT = 65535


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
        hosts = environment["SLURM_STEP_NODELIST"]
        try:
            address = hosts_of(hosts)[0]
        except (ValueError, IndexError):
            raise UserError(f"SLURM_STEP_NODELIST: {hosts!r} given, but it must name hosts as Slurm does") from None
        return Place(_number(environment, "SLURM_NODEID", least=0), nodes, ranks, address, port_of_job(job))
    nodes = _number(environment, "NNODES", default=1)
    if nodes == 1:
        port = _number(environment, "MASTER_PORT", default=free_port(), most=_LAST_PORT)
        return Place(0, 1, ranks, environment.get("MASTER_ADDR", "localhost"), port)
    node = _number(environment, "NODE_RANK", least=0)
    if node >= nodes:
        raise UserError(f"NODE_RANK: {node} given, but with NNODES {nodes} it must be below that")
    if not environment.get("MASTER_ADDR"):
        raise UserError(f"MASTER_ADDR: missing; with NNODES {nodes} it must name the host of node 0")
    port = _number(environment, "MASTER_PORT", default=_DEFAULT_PORT, most=_LAST_PORT)
    return Place(node, nodes, ranks, environment["MASTER_ADDR"], port)


def port_of_job(job: int) -> int:
    """The port at which the ranks of a Slurm job meet: 20000 to 29999, below those that systems give out themselves.

    Jobs that share a node have numbers close to each other, and so other ports.
    """
    return 20000 + job % 10000


def hosts_of(nodelist: str) -> list[str]:
    """Hosts of Slurm's short form, ``rack[2-3]-n[09-10],login``; a container has no scontrol to ask.

    Raises:
        ValueError: it is none.
    """
    if nodelist.count("[") != nodelist.count("]"):
        raise ValueError(nodelist)
    found = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names = [""]
        for number, piece in enumerate(re.split(r"\[([^\]]*)\]", part)):
            choices = [piece] if number % 2 == 0 else [each for run in piece.split(",") for each in _numbers(run)]
            names = [name + choice for name in names for choice in choices]
        found += names
    return found


def _numbers(run: str) -> list[str]:
    """``09-11`` -> 09, 10, 11; a number alone is itself."""
    first, _, last = run.partition("-")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]


def _ranks(environment: Mapping[str, str]) -> int:
    """Ranks of a node: as MHAR_RANKS_PER_NODE says, else one a GPU, else one."""
    given, gpus = environment.get("MHAR_RANKS_PER_NODE"), environment.get("SLURM_GPUS_ON_NODE")
    if given:
        ranks = _number(environment, "MHAR_RANKS_PER_NODE")
        if gpus and ranks > _number(environment, "SLURM_GPUS_ON_NODE"):
            raise UserError(f"MHAR_RANKS_PER_NODE: {ranks} given, but the job has {gpus} GPUs a node, one a rank")
        return ranks
    if gpus:
        return _number(environment, "SLURM_GPUS_ON_NODE")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([name for name in visible.split(",") if name.strip()]))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 1
    return max(1, listed.count("GPU "))


def _number(
    environment: Mapping[str, str], key: str, *, default: int | None = None, least: int = 1, most: int | None = None
) -> int:
    text = environment.get(key, "")
    if not text and default is not None:
        return default
    if not text:
        raise UserError(f"{key}: missing; needed is a whole number")
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise UserError(f"{key}: {text!r} given, but it must be a whole number of {allowed}")
    return int(text)


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def host_name() -> str:
    """Name of this machine, as Slurm calls it where it has started this process."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
