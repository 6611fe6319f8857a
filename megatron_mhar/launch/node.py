"""The ranks of one node: rank and rendezvous from the environment, a log each, signals passed on, ends explained.

    python -m megatron_mhar.launch.node CONFIG [KEY=VALUE]...      (launch/node sets the environment and calls this)
    python -m megatron_mhar.launch.node evaluate RUN_DIR [ARGUMENT]...

Before the ranks start, the nodes are checked (:mod:`megatron_mhar.launch.health`). Logs lie in ``MHAR_LOGS``, or in
``logs/<time>`` of the run folder: ``rank-<rank>.log``, and of a node whose ranks have failed ``node-<node>.end``, one
line ``<seconds since 1970> <exit code> <reason>``; ``bad-nodes`` has the names of nodes found bad, a line each. The
first rank of all also writes to this process's output, which makes the job's log.

SIGTERM, SIGINT and SIGUSR1 are passed on as SIGUSR1, the notice that a rank may get twice: Slurm's signals reach this
process alone or, if it is configured so, the ranks too. A second SIGTERM or SIGINT is passed on as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO

from megatron_mhar.config.load import load_config
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError
from megatron_mhar.launch.health import Meeting, Unhealthy, check_nodes, check_room, level_of, say
from megatron_mhar.launch.place import Place, find_place, host_name
from megatron_mhar.run_files import RunFiles

BAD_INPUT = 2  # exit code of mhar for what a repetition does not mend
UNHEALTHY = 3
_LOST = 128 + signal.SIGKILL  # exit code where another node is lost: as if all there had been killed
_POLL_S = 0.1
_SAVE_S = 300  # for ranks that may be saving
_ROOM = 4096  # bytes of a reason
_KILL_AFTER_S = 10  # between SIGTERM and SIGKILL for ranks that hang once another has failed
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_launcher() -> None:
    """Called in a rank before its program: if this process is killed, the rank is told to save and stop.

    It would hold the run's folder and port, and a new start would fail because of that.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Rank:
    """A rank's process; what it says goes to its log, and once :meth:`repeat` is called to our output if ``repeated``.

    Start all ranks from one thread, and before there is another.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, repeated: bool) -> None:
        self.number, self.log = int(environment["RANK"]), log
        self._file = log.open("ab")
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if repeated else self._file,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_launcher,
        )
        self._copier: threading.Thread | None = None

    def repeat(self) -> None:
        """Begin to repeat what it says."""
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

    @property
    def who(self) -> str:
        """For people."""
        return f"rank {self.number} on {host_name()} (pid {self._process.pid})"

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
        code, who = self.poll(), self.who
        assert code is not None
        if code == -signal.SIGUSR1:  # training itself answers the notice
            return 128 - code, f"{who} was told to stop while it did not train, and had nothing to save"
        if code < 0:
            # NCCL's watchdog ends a process whose message was not answered in time, and leaves what each rank did.
            traces = self.log.parent / "nccl-trace-rank-"
            told = f"; what NCCL did is in {traces}*" if any(traces.parent.glob(f"{traces.name}*")) else ""
            return (
                128 - code,
                f"{who} was killed by {signal.Signals(-code).name}{told if code == -signal.SIGABRT else ''}",
            )
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
        arguments: of ``mhar``.
        logs: folder of the logs; it is made.
        meeting: with the other nodes; by default there are none.
        patience_s: how long the ranks may take to end by themselves once one has failed: they tell more than we know.
        linger_s: how long they may go on once one has ended well. No rank watches another when the run is over.
    """

    def __init__(
        self, place: Place, arguments: Sequence[str], logs: Path, meeting: Meeting | None = None, *,
        patience_s: float, linger_s: float,
    ) -> None:  # fmt: skip
        self.place, self.logs, self.patience_s, self.linger_s = place, logs, patience_s, linger_s
        self.meeting = meeting or Meeting(replace(place, nodes=1))
        self._command = [sys.executable, "-m", "megatron_mhar.cli.main", *arguments]
        self._ranks: list[Rank] = []
        self._noticed = False

    def run(self) -> int:
        """Start the ranks, and stay until all have ended.

        Returns:
            0 if all of them ended with 0; else the code of the one that failed first, 128 + signal if it was killed.
            Where another node is lost, or its ranks have failed, those here are ended: it is that node's code.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._pass_on)
        for local_rank in range(self.place.ranks):
            environment = {**os.environ, **self._defaults(), **self.place.environment(local_rank)}
            log = self.logs / f"rank-{int(environment['RANK']):05d}.log"
            self._ranks.append(Rank(self._command, environment, log, repeated=environment["RANK"] == "0"))
        for rank in self._ranks:
            rank.repeat()
        if self._noticed:  # while they were being started
            self._tell(signal.SIGUSR1)
        code, over, explained = 0, None, False  # when the first one ended well
        while left := [rank for rank in self._ranks if rank.poll() is None]:
            failed = [rank for rank in self._ranks if rank.poll()]
            elsewhere = self.meeting.ended()
            patience_s = self.patience_s
            if failed:
                code, explained = self._explain(failed), True
            elif None in elsewhere.values():
                code, patience_s = self._tell_of_lost(elsewhere), _SAVE_S
            elif any(elsewhere.values()) and not self._noticed:  # who was told to stop may end with any code
                code = self._tell_of_failed(elsewhere)
            elif over is not None and time.monotonic() - over > self.linger_s:
                code, patience_s = self._tell_of_hung(left), 0
            elif over is None and (0 in elsewhere.values() or len(left) < len(self._ranks)):
                over = time.monotonic()
            if code:
                self.meeting.leave(code)
                self._end(patience_s)
                break
            time.sleep(_POLL_S)
        failed = [rank for rank in self._ranks if rank.poll()]
        # Bad input is told also where another node's ranks were the first to find it: there, on another screen.
        if failed and not explained and (not code or any(rank.poll() == BAD_INPUT for rank in failed)):
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

    def _tell_of_lost(self, elsewhere: Mapping[int, int | None]) -> int:
        """Say which nodes are lost, leave it for the job, and tell the ranks to stop; the exit code.

        Those that train may be saving already, if only that node's launch/node is gone. Others end at once.
        """
        lost = [self.meeting.hosts[node] for node, code in elsewhere.items() if code is None]
        reason = f"node {' and '.join(lost)} is lost: its launch/node has ended without a word, or is out of reach"
        leave_reason(self.logs, self.place.node, _LOST, reason)
        say(reason)
        self._tell(signal.SIGUSR1)
        return _LOST

    def _tell_of_failed(self, elsewhere: Mapping[int, int | None]) -> int:
        """Say on which node ranks have failed, which has left the reason itself; the exit code."""
        failed = [(code != BAD_INPUT, node, code) for node, code in elsewhere.items() if code]
        _, node, code = min(failed)
        say(f"the ranks on {self.meeting.hosts[node]} have failed, with code {code}; those on {host_name()} are ended")
        return code

    def _tell_of_hung(self, hung: Sequence[Rank]) -> int:
        """Say which ranks do not end, and leave it for the job; the exit code."""
        code = 128 + signal.SIGKILL
        reason = (
            f"{' and '.join(rank.who for rank in hung)} did not end within {self.linger_s:g} s of another rank, which "
            "ended well; killed"
        )
        leave_reason(self.logs, self.place.node, code, reason)
        say(reason)
        return code

    def _end(self, patience_s: float) -> None:
        """Wait for the ranks that are left, and end those that hang."""
        for seconds, number in ((patience_s, signal.SIGTERM), (_KILL_AFTER_S, signal.SIGKILL)):
            until = time.monotonic() + seconds
            while time.monotonic() < until and any(rank.poll() is None for rank in self._ranks):
                time.sleep(_POLL_S)
            for rank in self._ranks:
                if rank.poll() is None:
                    rank.signal(number)
        while any(rank.poll() is None for rank in self._ranks):
            time.sleep(_POLL_S)


def leave_reason(logs: Path, node: int, code: int, reason: str) -> None:
    """Write ``node-<node>.end``, once: the first reason stays.

    On a full disk it takes the room that :func:`reserve_reason` has kept. Where the logs cannot be written otherwise it
    is left in this machine's folder for temporary files, as ``mhar-<name of the logs' folder>``, where the job's script
    looks too; in a container that folder may be another one.
    """
    line = f"{time.time():.3f} {code} {' '.join(reason.split())}".encode()[: _ROOM - 1] + b"\n"
    for folder in (logs, Path(tempfile.gettempdir()) / f"mhar-{logs.name}"):
        file, room = folder / f"node-{node:04d}.end", _room(folder, node)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if file.exists():
                return
            if room.exists():
                with room.open("r+b") as kept:
                    kept.write(line)
                    kept.truncate()
                room.rename(file)
            else:
                file.write_bytes(line)
            return
        except OSError:
            with contextlib.suppress(OSError):
                file.unlink()  # a full disk has taken its name alone


@contextlib.contextmanager
def reserve_reason(logs: Path, node: int) -> Iterator[None]:
    """Within the context there is room on the disk of the logs, which are made, for what :func:`leave_reason` writes.

    Raises:
        OSError: the folder of the logs cannot be made.
    """
    logs.mkdir(parents=True, exist_ok=True)
    room = _room(logs, node)
    with contextlib.suppress(OSError):  # then it is left elsewhere
        room.write_text(" " * _ROOM)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            room.unlink(missing_ok=True)


def _own_logs(folder: Path) -> Path:
    """The folder, made.

    Raises:
        UserError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: logs cannot be written there ({error.strerror}); choose another folder by output_dir=..."
        ) from None
    return folder


def _room(logs: Path, node: int) -> Path:
    return logs / f".node-{node:04d}"


def leave_bad_nodes(logs: Path, hosts: Sequence[str]) -> None:
    """Write ``bad-nodes``, for the job to do without them. All nodes write the same."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        partial = logs / f"bad-nodes.{host_name()}"
        partial.write_text("".join(f"{host}\n" for host in hosts))
        partial.replace(logs / "bad-nodes")
    except OSError:
        pass


def main(arguments: Sequence[str]) -> int:
    """Run this node's ranks; the exit code is :meth:`Node.run`'s, 2 for bad input, 3 where nodes are not healthy."""
    logs = Path(os.environ["MHAR_LOGS"]) if os.environ.get("MHAR_LOGS") else None
    # Slurm's nodes have one log, in which one of them says what is wrong with all; started by hand, each has its own.
    number = os.environ.get("SLURM_NODEID", "")
    node = int(number) if number.isdecimal() else 0
    try:
        config, run_dir, command = _read(arguments)
        level = level_of(os.environ)
        place = find_place(os.environ)
        if level != "off" and place.node == 0 and command[0] == "train":
            check_room(run_dir)
        # An evaluation's command line may name other data.
        data = (*config.data.train, *config.data.valid) if command[0] == "train" else ()
        files = [Path(f"{prefix}{ending}") for prefix in data for ending in (".idx", ".bin")]
        place, meeting = check_nodes(place, logs=logs, level=level, files=files)
        if logs is None:
            prefix = "" if command[0] == "train" else f"{command[0]}-"  # what becomes of an evaluation is not the run's
            logs = _own_logs(run_dir / "logs" / time.strftime(f"{prefix}%Y%m%d-%H%M%S"))
        patience_s = config.parallel.heartbeat_s + 15
        linger_s = patience_s + config.tracking.drain_timeout_s
        meeting.keep(max(30, config.parallel.heartbeat_s))
        code = 1
        with meeting:
            try:
                with reserve_reason(logs, place.node):
                    code = Node(place, command, logs, meeting, patience_s=patience_s, linger_s=linger_s).run()
            except OSError as error:  # of this node, it may be: another start may be on another one
                reason = f"launch/node on {host_name()} cannot start ranks: {error}"
                leave_reason(logs, place.node, code, reason)
                say(reason)
            finally:
                meeting.leave(code)
        return code
    except UserError as error:
        if node == 0:
            print(f"mhar: error: {error}", file=sys.stderr, flush=True)
        if logs is not None:
            leave_reason(logs, node, BAD_INPUT, str(error))
        return BAD_INPUT
    except Unhealthy as error:
        if node == 0:
            say(str(error))
        if logs is not None:
            if error.hosts:
                leave_bad_nodes(logs, error.hosts)
            leave_reason(logs, node, UNHEALTHY, str(error))
        return UNHEALTHY
    except KeyboardInterrupt:  # before there are ranks, who are told otherwise
        say("interrupted, before the ranks were started")
        return 128 + signal.SIGINT


def _read(arguments: Sequence[str]) -> tuple[RunConfig, Path, list[str]]:
    """Config of the run, read here so that what is wrong with it is told once; its folder; the arguments of mhar."""
    if arguments[:1] == ["evaluate"] and len(arguments) > 1:
        run_dir = Path(arguments[1])
        return load_config(RunFiles(run_dir).config), run_dir, list(arguments)
    if not arguments or arguments[0].startswith("-") or arguments[0] == "evaluate":
        raise UserError(
            "launch/node CONFIG [KEY=VALUE]... starts the ranks of this node, launch/node evaluate RUN_DIR those of an "
            f"evaluation; {' '.join(arguments) or 'nothing'} given"
        )
    config = load_config(Path(arguments[0]), arguments[1:])
    return config, config.run_dir, ["train", *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
