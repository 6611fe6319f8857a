"""Ranks watch one another: when one dies, the others end with an error that names it instead of waiting for it.

Every rank beats: a thread of its own writes, some times within ``parallel.heartbeat_s``, who and where it is to the
store through which the ranks met. It reads the beats of at most three others, whatever the number of ranks: of the
next rank, of the next one on its own machine, whose process it can look for, and of rank 0 where that keeps the store.
The first to miss one writes a verdict; everyone reads it, says it, and ends. A rank that fails by an exception writes
the verdict on itself. One that hangs goes on beating: a rank that has waited ``parallel.timeout_s`` for others looks at
all beats for the one that keeps them waiting. That is told from the beats, and not from a collective's own time-out,
since NCCL answers that by aborting the ranks that have waited.

A rank whose main thread is slow goes on beating. What can keep the beating thread from running is a process that is
stopped, or one long call that holds Python's lock; for those there is :meth:`Watch.patience`.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import json
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch
from rich.console import Console
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_mhar.config.schema import ParallelConfig
from megatron_mhar.errors import UserError
from megatron_mhar.run_files import GOES_ON, STARTS_ANEW, RunFiles, checkpoint_steps
from megatron_mhar.train.distributed import agent_keeps_store, on_first_rank

logger = logging.getLogger("megatron_mhar")

EXIT_CODE = 1
_BEATS = 6  # within heartbeat_s
_POLL_S = 0.05  # for what comes soon: the others' first beats, and their leave
_PACKAGE = __name__.partition(".")[0] + "."
# Calls in which a thread waits for a message or, by that, for the device, on the line that it is in: methods and
# functions, of which float() is one that a tensor's method of that name is not.
_WAITING = ("wait", "item", "tolist", "cpu", "synchronize", "_cuda_synchronize", "run_backward")
_WAITS: dict[str, tuple[str, ...]] = dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD"), _WAITING)
_WAITS |= dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME"), ("float", *_WAITING))
_STILL_S = 0.01  # of processor time between two looks: a thread that sleeps takes less, one that is at work more
_LOOKERS = 4  # of the ranks that wait in vain


@dataclass(frozen=True)
class Process:
    """A process, so that others of its machine can tell whether it is still there.

    Attributes:
        host: name of its machine.
        pid: its number.
        started: when, in clock ticks since the machine started; numbers are given again, this is not.
        namespace: where the number holds: machine, its start, and namespace; empty where the system does not say.
    """

    host: str
    pid: int
    started: str
    namespace: str

    @classmethod
    def this(cls) -> Self:
        """The process that asks."""
        pid, started, namespace = os.getpid(), "", ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            own, numbered = _process_status("self"), _process_status(pid)
            if own is not None and own == numbered:  # else /proc is that of another namespace
                started, namespace = own[1], f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
        return cls(socket.gethostname(), pid, started, namespace)

    def is_gone(self, onlooker: Process) -> bool:
        """Whether ``onlooker`` can see that the process is no more; False also where it cannot see it."""
        if not self.namespace or self.namespace != onlooker.namespace:
            return False
        try:
            status = _process_status(self.pid)
        except OSError:  # too many open files, say: that tells nothing of the other
            return False
        return status is None or status[0] in "ZX" or status[1] != self.started


def _process_status(pid: int | str) -> tuple[str, str] | None:
    """State letter and start in clock ticks of a process, None if there is none.

    Raises:
        OSError: the system does not say.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        if not Path("/proc/self/stat").exists():
            raise
        return None
    fields = text.rpartition(")")[2].split()  # behind the name, which may hold anything
    return fields[0], fields[19]


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        rank: the rank.
        process: its process.
        number: counts its beats.
        step: steps done.
        passes: runs of the schedule and forwards of micro-batches begun, in training and in evaluation.
        messages: collectives of all ranks together begun.
        processor_s: processor time of its main thread. One that waits for room in the device's queue spins.
        place: function and line of ours that its main thread is in.
        waits: whether its main thread waits for other ranks, or has lost touch with one.
        patient: whether it may be silent for long.
        ended: whether it has left; no beat follows.
    """

    rank: int
    process: Process
    number: int
    step: int
    passes: int
    messages: int
    processor_s: float
    place: str
    waits: bool
    patient: bool
    ended: bool

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: bytes) -> Self:
        """From what :meth:`dump` gave."""
        fields = json.loads(text)
        return cls(**fields | {"process": Process(**fields["process"])})

    def who(self) -> str:
        """The rank, for a message."""
        return f"rank {self.rank} on host {self.process.host} (pid {self.process.pid})"

    def at(self) -> tuple[int, int, int, str]:
        """What does not change while the main thread stays where it is: in one wait, say, and not in several."""
        return self.step, self.passes, self.messages, self.place

    def hangs_since(self, before: Beat) -> bool:
        """Whether the main thread has been asleep since ``before``, and not because it waits for other ranks."""
        asleep = self.processor_s - before.processor_s < _STILL_S and self.number > before.number
        return asleep and not (self.waits or self.ended) and self.at() == before.at()


class Silence:
    """How long a value has stood still for someone who looks at it about every ``interval_s`` seconds.

    Time in which the onlooker did not run is not counted: who was suspended with all others wakes up to no alarm.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = 2 * interval_s, clock
        self._looked = clock()
        self._value: object = None
        self._seconds = 0.0

    def look(self, value: object) -> float:
        """Seconds since it was first seen to be ``value``; None stands for one that is not there yet."""
        now = self._clock()
        self._seconds = self._seconds + min(now - self._looked, self._longest) if value == self._value else 0.0
        self._looked, self._value = now, value
        return self._seconds


class Watch(AbstractContextManager["Watch"]):
    """Within the context this rank beats and watches; all ranks must enter it.

    If another rank is lost, an error that names it is logged and the process ends with :data:`EXIT_CODE`: the main
    thread may be in a call that never returns. An exception that leaves the context is told to the other ranks; one of
    torch.distributed's is often another rank's death, and so held back until it is clear that no rank is missing.

    One process alone has nothing to watch. Ranks that met through another store than torch's TCPStore are not watched,
    and rank 0 says so.

    Args:
        files: of the run; its newest complete checkpoint is told, and its log written to where rank 0 cannot.
        parallel: of its config: after ``heartbeat_s`` of silence a rank is taken for dead, after ``join_s`` one
            that was never heard; after ``timeout_s`` of waiting this one looks for the rank that it waits for.
    """

    def __init__(self, files: RunFiles, parallel: ParallelConfig) -> None:
        self.files, self.parallel, self.heartbeat_s = files, parallel, parallel.heartbeat_s
        self.interval_s = self.heartbeat_s / _BEATS
        # Steps done and passes begun so far, see Beat; whoever counts them puts better functions here.
        self.steps_done: Callable[[], int] = lambda: 0
        self.passes: Callable[[], int] = lambda: 0
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._process = Process.this()
        self._keeps_store = self.rank == 0 and not agent_keeps_store()
        self._heard: dict[int, Beat] = {}
        self._silences: dict[int, Silence] = {}
        self._numbers = itertools.count()
        self._rounds = 0
        self._verdict: tuple[int | None, str] | None = None  # rank, if it is one, and what is said of it
        self._broken: DistError | None = None
        self._failure: BaseException | None = None
        self._unneeded = threading.Event()  # the store that this rank keeps, by the others
        self._out = threading.Event()  # the main thread has come out of the context, by itself
        self._helpless = False  # but another rank's end may be why
        self._stall = Silence(self.interval_s)  # of the main thread, at one place
        self._stalled: tuple[Beat, float]  # where, and for how many seconds
        self._looks: bool | None = None  # whether this rank is one of those that look, once it has stalled
        self._look_at = 0.0  # when to look again
        self._seen: dict[int, Beat] = {}  # others, at the last look of this stall
        self._said_unclear = False
        self._patient, self._told = False, threading.Event()  # whether it may be silent, and that this is told
        self._leaving = False
        self._beat_now = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self.world == 1:
            return self
        if not _is_tcp(store := _default_store()):
            if self.rank == 0:
                logger.warning(
                    "the ranks met through a %s: one that dies is not named, its silence ends the others after %g s",
                    type(store).__name__, self.parallel.timeout_s,
                )  # fmt: skip
            return self
        self._main = threading.get_ident()
        # A store may outlive a run and, with torchrun, its ranks; agents count restarts each for itself.
        prefix = f"mhar/watch/{on_first_rank(lambda: uuid.uuid4().hex)}"
        for rank in _first_watched(self.rank, self.world, keeper=None if agent_keeps_store() else 0):
            self._watch(rank)
        for target, arguments in ((self._beat_and_listen, (store, prefix)), (self._judge, ())):
            thread = threading.Thread(target=target, args=arguments, name=f"mhar{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the others; the rank that keeps the store stays until they know. A second call does nothing."""
        if not self._threads:
            return
        beating, judging = self._threads
        self._threads = []
        if error is not None and _is_of_communication(error):
            with _unsignalled():
                self._helpless = True
                self._out.set()
                judging.join(self.heartbeat_s + _BEATS * self.interval_s)  # ends the process if one is missing
            self._helpless = False
        self._failure = error
        self._out.set()
        self._leaving = True
        self._beat_now.set()
        # The store may be lost: then there is nobody to tell.
        beating.join(3 * self.interval_s + (self.parallel.timeout_s if self._keeps_store else 0))
        judging.join()

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Within the context this rank may be silent for ``timeout_s``, as long as others wait for a message anyway.

        It is for calls that hold Python's lock for long: numpy's shuffle, the end of torch's profiler.
        """
        self._be_patient(True)
        try:
            yield
        finally:
            self._be_patient(False)  # at once: if this rank is stopped before it is told, it counts as silent for long

    def _be_patient(self, patient: bool) -> None:
        """Tell the others that this rank may be silent, or that it may not any more."""
        self._told.clear()
        self._patient = patient
        if self._threads:
            self._beat_now.set()
            self._told.wait(self.heartbeat_s)  # without the store there is nobody to tell

    # The beating thread: everything that asks the store, which may never answer.

    def _beat_and_listen(self, default: Store, prefix: str) -> None:
        try:
            # A connection of its own: a main thread that waits for a key keeps the other one to itself.
            store = PrefixStore(prefix, default.clone())  # type: ignore[attr-defined]
            while True:
                self._beat_now.clear()
                leaving = self._leaving
                self._beat(store, ended=leaving)
                self._listen(store)
                self._rounds += 1
                if leaving or self._verdict is not None:
                    self._take_leave(store)
                    return
                met = self._silences.keys() <= self._heard.keys()  # who is lost before that could not be named
                self._beat_now.wait(self.interval_s if met else min(_POLL_S, self.interval_s))
        except DistError as error:
            self._broken = error
        except Exception:
            logger.warning("the watch over other ranks has ended:\n%s", traceback.format_exc())
            self._out.set()

    def _beat(self, store: Store, *, ended: bool) -> None:
        frame = sys._current_frames().get(self._main)
        waits = self._helpless or _is_waiting(frame)
        beat = Beat(
            self.rank, self._process, next(self._numbers), self.steps_done(), self.passes(), _messages(),
            _processor_s(self._main), _place(_frames_of(frame)), waits, self._patient, ended,
        )  # fmt: skip
        self._stalled = beat, self._stall.look(beat.at())
        if self._failure is not None:
            self._accuse(store, self.rank, _failure_text(beat, self._failure))
        store.set(f"beat/{self.rank}", beat.dump())
        if beat.patient == self._patient:
            self._told.set()

    def _listen(self, store: Store) -> None:
        if self._verdict is None and store.check(["verdict"]):
            self._read_verdict(store.get("verdict"))
        if self._verdict is not None:
            return
        for rank in list(self._silences):
            beat = self._hear(store, rank)
            if beat is not None and not beat.ended and beat.process.is_gone(self._process):
                beat = self._hear(store, rank) or beat  # its last word may have come in between
                if not beat.ended:
                    self._accuse(store, rank, self._lost(beat, "has died"))
            seconds = self._silences[rank].look(beat.number if beat is not None else None)
            if beat is None:
                if seconds > self.parallel.join_s:
                    self._accuse(store, rank, f"rank {rank} has not been heard from at all for {seconds:.0f} s")
            elif beat.ended:
                del self._silences[rank]
                self._watch(rank + 1)
            elif seconds > (max(self.heartbeat_s, self.parallel.timeout_s) if beat.patient else self.heartbeat_s):
                self._accuse(store, rank, self._lost(beat, f"has not been heard from for {seconds:.0f} s"))

        if self._verdict is None:
            self._look_for_hung(store)

    def _look_for_hung(self, store: Store) -> None:
        """Name the ranks for which this one waits in vain, if they stand out.

        That takes two looks at the beats of all ranks: who hangs goes on beating, and sleeps where it does not wait for
        others. A few of those that do not get on look, until they have found it or torch's own time-out ends them; if
        it is rather most ranks that sleep so, they wait in a way that is not known here.
        """
        own, seconds = self._stalled
        if seconds < self.parallel.timeout_s:
            self._looks, self._seen, self._look_at, self._said_unclear = None, {}, 0.0, False
            return
        if self._looks is None:
            self._looks = store.add(f"stall/{own.at()}", 1) <= _LOOKERS
        if not self._looks or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + 2 * self.interval_s
        heard = (self._hear(store, rank) for rank in range(self.world) if rank != self.rank)
        before, self._seen = self._seen, {self.rank: own} | {beat.rank: beat for beat in heard if beat is not None}
        hung = [beat for beat in self._seen.values() if beat.rank in before and beat.hangs_since(before[beat.rank])]
        waited = f"has waited {seconds:.0f} s for"
        if any(beat.rank == self.rank for beat in hung):
            return
        if hung and len(hung) <= self.world / 2:
            others = f", and for rank {', '.join(str(beat.rank) for beat in hung[1:])}" if len(hung) > 1 else ""
            text = f"hangs: rank {self.rank} {waited} it{others}, in {own.place}"
            self._accuse(store, hung[0].rank, self._lost(hung[0], text))
        elif seconds > self.parallel.timeout_s + self.heartbeat_s and not self._said_unclear:
            self._said_unclear = True
            logger.warning(
                "rank %d %s others, in %s, and none stands out: a device or a link hangs, or ranks wait for different "
                "messages. Torch's time-out will end the run", self.rank, waited, own.place,
            )  # fmt: skip

    def _hear(self, store: Store, rank: int) -> Beat | None:
        key = f"beat/{rank}"
        if rank not in self._heard and not store.check([key]):
            return None
        self._heard[rank] = Beat.load(store.get(key))
        return self._heard[rank]

    def _watch(self, rank: int) -> None:
        """Watch ``rank``, or the next one after it that has not ended."""
        for candidate in range(rank, rank + self.world):
            candidate %= self.world
            if candidate == self.rank:
                return
            if candidate not in self._heard or not self._heard[candidate].ended:
                self._silences.setdefault(candidate, Silence(self.interval_s))
                return

    def _accuse(self, store: Store, rank: int, text: str) -> None:
        """Write the verdict; if there is one already, it stays."""
        own = json.dumps([rank, text])
        verdict = store.compare_set("verdict", "", own)
        if rank != self.rank and verdict == own.encode():
            store.add("gone", 1)  # in its place
        self._read_verdict(verdict)

    def _read_verdict(self, verdict: bytes) -> None:
        rank, text = json.loads(verdict)
        self._verdict = rank, text

    def _take_leave(self, store: Store) -> None:
        """Say that this rank asks the store for nothing more; if it keeps the store, wait until all have said so."""
        store.add("gone", 1)
        go_at = math.inf
        while self._keeps_store and store.add("gone", 0) < self.world and time.monotonic() < go_at:
            # Whoever is dead too says nothing.
            limit = 3 * self.interval_s if self._verdict is not None else self.parallel.timeout_s
            go_at = min(go_at, time.monotonic() + limit)
            time.sleep(_POLL_S)
            self._listen(store)
        self._unneeded.set()

    # The judging thread: asks nobody, and ends the process.

    def _judge(self) -> None:
        tick = self.interval_s / 2
        silence = Silence(tick)
        while True:
            if self._out.wait(tick) and not self._helpless:
                return
            if self._helpless:
                time.sleep(tick)
            if self._verdict is None:
                quiet = silence.look(self._rounds)
                if self._broken is None and quiet < self.heartbeat_s:
                    continue
                self._verdict = self._store_lost(quiet)
            if self._keeps_store:
                self._unneeded.wait(4 * self.interval_s)  # lest the others take this rank for the first to die
            # An error that all ranks come to is each one's own to tell.
            if not self._helpless and self._out.wait(self.interval_s) and not self._helpless:
                return
            self._end(*self._verdict)

    def _store_lost(self, quiet: float) -> tuple[int | None, str]:
        since = "does not answer any more" if self._broken else f"has not answered for {quiet:.0f} s"
        where = os.environ.get("MASTER_ADDR", "an unknown host")
        if agent_keeps_store():
            return None, f"torchrun's agent on {where}, through which the ranks meet, {since}"
        keeper = self._heard.get(0)
        if keeper is None:
            return 0, f"rank 0 on {where}, through which the ranks meet, {since}"
        if keeper.ended:
            return self.rank, self._lost(self._stalled[0], "hangs: rank 0 has ended")
        if keeper.process.is_gone(self._process):
            return 0, self._lost(keeper, "has died")
        return 0, self._lost(keeper, f"{since}: it or its machine is gone")

    def _lost(self, beat: Beat, what: str) -> str:
        # Ranks go from step to step together: this one's count is as good, and newer than the other's last word.
        seen = f"; it was last seen in {beat.place}" if beat.place else ""
        return f"{beat.who()} {what}, {_when(max(beat.step, self.steps_done()))}{seen}"

    def _end(self, rank: int | None, text: str) -> None:
        """Say it and end the process; neither may wait for the main thread, or for a file system that is gone too."""
        for child in multiprocessing.active_children():  # a writer left over could disturb the next start
            child.kill()
        speaker = threading.Thread(target=self._speak, args=(rank, text), daemon=True)
        speaker.start()
        speaker.join(max(1.0, self.interval_s))
        if speaker.is_alive():
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())
        os._exit(EXIT_CODE)

    def _speak(self, rank: int | None, text: str) -> None:
        Console(stderr=True).show_cursor()  # a bar has hidden it
        steps = checkpoint_steps(self.files.checkpoints)
        rest = (
            f"The newest complete checkpoint is of step {steps[-1]}: {GOES_ON} from there"
            if steps
            else f"There is no complete checkpoint yet: {STARTS_ANEW}"
        )
        logger.error("%s. %s", text, rest)
        if rank == 0 and self.rank == 1 and self.files.log.parent.is_dir():  # the log was rank 0's to write
            with contextlib.suppress(OSError), self.files.log.open("a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}. {rest}\n")
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()


def _first_watched(rank: int, world: int, *, keeper: int | None) -> set[int]:
    """Ranks to watch: the next, the next on this machine as its launcher says, and the keeper of the store."""
    watched = {(rank + 1) % world}
    local, local_world = (int(os.environ.get(key, "-1")) for key in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    first = rank - local
    if 0 <= local < local_world and 0 <= first and first + local_world <= world:
        watched.add(first + (local + 1) % local_world)
    if keeper is not None:
        watched.add(keeper)
    return watched - {rank}


def _default_store() -> Store:
    # torch has no public way to the store of the default group.
    return torch.distributed.distributed_c10d._get_default_store()


def _is_tcp(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def _is_of_communication(error: BaseException) -> bool:
    """Whether an error comes out of talking to other ranks, also where it was raised again as another one."""
    seen: BaseException | None = error
    while seen is not None:
        # gloo raises plain RuntimeErrors, which name the file of its source.
        if isinstance(seen, DistError) or (isinstance(seen, RuntimeError) and "gloo/" in str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextmanager
def _unsignalled() -> Iterator[None]:
    """Within the context the signals of a launcher that has seen a rank die do not end this process without a word."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _frames_of(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _place(frames: Iterator[tuple[FrameType, int]]) -> str:
    """The first of ``frames``, innermost first, that is of this package; empty if none is."""
    for frame, line in frames:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_PACKAGE) and module != __name__:
            return f"{module}.{frame.f_code.co_name}, line {line}"
    return ""


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether a thread's innermost call is one of torch.distributed, or may wait for a message or the device."""
    if frame is None:
        return False
    module = frame.f_globals.get("__name__", "")
    if module.startswith("torch.distributed"):
        return not module.startswith("torch.distributed.checkpoint")  # which waits for disks
    # What is called is no frame, being none of Python's; by bytecode, since the source's file may lie on a lost disk.
    here = (each for each in dis.get_instructions(frame.f_code)
            if each.positions is not None and each.positions.lineno == frame.f_lineno)  # fmt: skip
    return any(each.argval in _WAITS.get(each.opname, ()) for each in here)


def _messages() -> int:
    """Collectives of the default group that this process has begun."""
    # torch has no public way to it either.
    group = torch.distributed.distributed_c10d._get_default_group()
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _processor_s(thread: int) -> float:
    """Processor time of a thread, 0 where the system does not say."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _when(step: int) -> str:
    return f"after step {step}" if step else "before the first step"


def _failure_text(beat: Beat, error: BaseException) -> str:
    place = _place(reversed(list(traceback.walk_tb(error.__traceback__))))
    reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    reason = " ".join(reason.split()).rstrip(":.")
    return f"{beat.who()} failed {_when(beat.step)}{f', in {place}' if place else ''}: {reason[:1000]}"
