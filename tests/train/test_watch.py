"""A rank that dies, stops or fails ends the others with an error that names it; one that is slow does not."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_mhar.config.load import load_config
from megatron_mhar.config.schema import ParallelConfig
from megatron_mhar.errors import UserError
from megatron_mhar.launch.place import free_port
from megatron_mhar.run_files import RunFiles
from megatron_mhar.tracking.journal import load_metrics
from megatron_mhar.train import watch
from megatron_mhar.train.watch import (
    Beat,
    Process,
    Silence,
    Watch,
    _first_watched,
    _is_of_communication,
    _process_status,
)
from tests.launch import ROOT
from tests.train.watch_worker import CASES, FAULT_STEP, HEARTBEAT_S, LIMIT_S, TIMEOUT_S, TRACKED, WELL, write_config

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
GOES_ON = "The newest complete checkpoint is of step 2: the same command goes on from there"
SEEN = r"; it was last seen in megatron_mhar\.[\w.]+, line \d+"


@pytest.fixture(scope="module")
def results(tmp_path_factory, corpus):
    """What came of every case: one start of Python, from which all ranks are forked."""
    out = tmp_path_factory.mktemp("watch") / "out.json"
    command = [sys.executable, str(ROOT / "tests/train/watch_worker.py"), "ranks", str(out), str(corpus)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S * len(CASES))
    assert done.returncode == 0, done.stderr[-4000:]
    return {"folder": out.parent, **json.loads(out.read_text())}


def expect(result, victim, what, *, codes, within_s, survivors=None):
    """The survivors have ended with ``codes`` in time, and each has named the rank once, the run's log as well."""
    host, pid = re.escape(socket.gethostname()), result["pids"][victim]
    line = rf"rank {victim} on host {host} \(pid {pid}\) {what}\. {re.escape(GOES_ON)}\n"
    for rank in survivors or [rank for rank in range(len(result["pids"])) if rank != victim]:
        said = result["said"][rank]
        assert len(re.findall(line, said)) == 1, f"rank {rank} said:\n{said}"
        assert said.count("The newest complete checkpoint") == 1, f"rank {rank} named another too:\n{said}"
        assert result["codes"][rank] == codes, f"rank {rank} said:\n{said}"
        assert result["seconds"][rank] < within_s
    # A rank that hangs can still write its log, which the next one writes too.
    assert len(re.findall(line, result["log"])) == (2 if victim == 0 and "hangs" in what else 1), result["log"]


@pytest.mark.parametrize("case", ["killed", "first_killed", "last_killed", "one_of_two_killed", "second_run_killed"])
def test_a_killed_rank_is_named_by_all_others(results, case):
    """Its process is seen to be gone, well before its silence would tell."""
    _, _, victim, _ = CASES[case]
    expect(results[case], victim, rf"has died, after step {FAULT_STEP}{SEEN}", codes=1, within_s=10)
    assert results[case]["codes"][victim] == -9


def test_one_mlflow_run_over_a_kill_and_another_number_of_ranks(results, one_rank):
    """The rank that sends the metrics is killed, of four; one alone goes on, and does a step again."""
    import mlflow

    from megatron_mhar.train.loop import train

    folder = results["folder"] / TRACKED
    config = load_config(folder / "config.yaml", ["parallel.pipeline=1"])
    before = load_metrics(RunFiles(config.run_dir).journal)
    assert [step for step, _ in before["train/loss"]] == list(range(1, FAULT_STEP + 1))
    assert train(config).steps == 6
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("megatron_mhar").experiment_id])
    assert run.info.status == "FINISHED"
    journal = load_metrics(RunFiles(config.run_dir).journal)
    assert [step for step, _ in journal["train/loss"]] == list(range(1, 7)) and journal.keys() >= before.keys()
    for name, values in journal.items():
        points = sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))
        assert [step for step, _ in points] == [step for step, _ in values], name
        if name == "train/loss":
            assert [value for _, value in points] == pytest.approx([value for _, value in values], abs=1e-5)


@pytest.mark.parametrize("case", ["stopped", "patient_then_stopped"])
def test_a_stopped_rank_is_named_once_its_silence_is_long_enough(results, case):
    """Its last word, that it may be silent, counts only as long as it is so."""
    what = rf"has not been heard from for \d+ s, after step {FAULT_STEP}{SEEN}"
    expect(results[case], 1, what, codes=1, within_s=HEARTBEAT_S + 15)
    assert min(s for s in results[case]["seconds"] if s is not None) > HEARTBEAT_S - 1


def test_a_stopped_rank_that_keeps_the_store_is_named_too(results):
    what = rf"has not answered for \d+ s: it or its machine is gone, after step {FAULT_STEP}{SEEN}"
    expect(results["first_stopped"], 0, what, codes=1, within_s=HEARTBEAT_S + 15)


@pytest.mark.parametrize("case", ["hung", "one_of_two_hung"])
def test_a_rank_that_hangs_is_named_and_not_those_that_have_waited_for_it(results, case):
    """Its heart beats on; those that wait see it, before a collective's own time-out ends them."""
    world, _, victim, _ = CASES[case]
    what = rf"hangs: rank \d has waited \d+ s for it, in megatron_mhar\.\S+, line \d+, after step {FAULT_STEP}{SEEN}"
    everyone = list(range(world))
    expect(results[case], victim, what, codes=1, within_s=TIMEOUT_S + 2 * HEARTBEAT_S + 10, survivors=everyone)
    assert all("failed after step" not in said for said in results[case]["said"])


@pytest.mark.parametrize("case", ["failed", "first_failed"])
def test_a_rank_that_fails_gives_its_reason(results, case):
    _, _, victim, _ = CASES[case]
    what = (
        rf"failed after step {FAULT_STEP}, in megatron_mhar\.train\.loop\.run, line \d+: "
        "RuntimeError: CUDA out of memory, says a test"
    )
    expect(results[case], victim, what, codes=1, within_s=15)
    assert results[case]["said"][victim].endswith("RuntimeError: CUDA out of memory, says a test.\n")


def test_a_rank_that_is_cut_off_from_the_living_says_so_after_waiting_for_a_dead_one(results):
    what = rf"failed after step {FAULT_STEP}, in [\w.]+, line \d+: RuntimeError: \[gloo.*Connection closed by peer.*:1"
    expect(results["cut_off"], 1, what, codes=1, within_s=HEARTBEAT_S + 20)
    assert results["cut_off"]["seconds"][1] > HEARTBEAT_S


def test_a_slow_rank_has_no_part_in_another_s_broken_connection(results):
    what = rf"failed after step {FAULT_STEP}, in [\w.]+, line \d+: RuntimeError: \[gloo.*Connection closed by peer.*:1"
    expect(results["cut_off_from_a_slow_one"], 1, what, codes=1, within_s=HEARTBEAT_S + 20)


def test_who_waits_is_known_by_the_call_that_a_thread_is_in():
    def inside(call, *arguments):
        """Whether a thread waits that is within ``call``: looked at from a thread of its own."""
        thread = threading.Thread(target=call, args=arguments, daemon=True)
        thread.start()
        time.sleep(0.2)
        found = watch._is_waiting(sys._current_frames()[thread.ident])
        return found

    lock = threading.Lock()
    lock.acquire()

    class Handle:
        wait, read = lock.acquire, lock.acquire

    def waits(handle, limit):
        handle.wait(True, limit.max)

    def reads(handle, limit):
        handle.read(True, limit.max)

    def reads_as_float(handle, limit):
        handle.float().read("cpu", limit.max)

    limit = SimpleNamespace(max=5.0)
    assert inside(waits, Handle, limit) and not inside(reads, Handle, limit)
    other = SimpleNamespace(float=lambda: SimpleNamespace(read=lambda place, most: lock.acquire(True, most)))
    assert not inside(reads_as_float, other, limit), "a method of that name, and text, are no calls that wait"
    assert not watch._is_waiting(None)


def test_wrong_input_of_one_rank_is_its_message(results):
    what = rf"failed after step {FAULT_STEP}, in [\w.]+, line \d+: corpus/train\.bin: the test has taken it away"
    expect(results["wrong_input"], 1, what, codes=1, within_s=15)
    assert results["wrong_input"]["said"][1] == "mhar: error: corpus/train.bin: the test has taken it away\n"
    assert results["wrong_input"]["codes"][1] == 2


def test_an_error_that_all_ranks_come_to_is_told_by_each_as_its_own(results):
    for code, said in zip(results["all_failed"]["codes"], results["all_failed"]["said"], strict=True):
        assert code == 2 and said.count("mhar: error: step 2: skipped, loss or gradients are not finite: loss ") == 1
        assert "rank" not in said.replace("on this rank", "").replace("on 2 ranks", "")


@pytest.mark.parametrize("case", WELL)
def test_a_slow_rank_is_not_taken_for_dead(results, case):
    """Its main thread slept three times the silence of a dead rank; no thread is left, which the worker checks.

    Or others waited longer for it than they wait for one message, or it was silent and had said so before.
    """
    slow, least = results[case], {"silent": 2, "slow_in_each_micro_batch": 2}.get(case, 3) * HEARTBEAT_S
    assert slow["codes"] == [0] * CASES[case][0] and min(slow["seconds"]) > least
    assert "step 6/6" in slow["log"]
    assert not any(slow["said"][1:]) and "hangs" not in slow["log"] and "heard from" not in slow["log"]


def test_a_rank_that_hangs_when_the_others_have_ended_says_so_itself(results):
    """Rank 0 keeps the store for ``timeout_s`` longer."""
    _, said = results["hung_at_the_end"]["said"]
    assert results["hung_at_the_end"]["codes"] == [0, 1]
    assert re.search(rf"rank 1 on host \S+ \(pid \d+\) hangs: rank 0 has ended, after step 6{SEEN}", said)


def test_the_second_run_in_the_same_groups_followed_a_whole_first_one(results):
    assert results["second_run_killed"]["first_done"]


@pytest.mark.parametrize("fault", ["kill", "agent"])
def test_under_torchrun(tmp_path, corpus, fault):
    """torchrun sends the others SIGTERM, else a wish to save and stop; when it is killed itself, all ranks say so."""
    folder = tmp_path / "torchrun"
    write_config(folder, corpus, {})
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        str(ROOT / "tests/train/watch_worker.py"), "rank", str(folder), fault, "1",
    ]  # fmt: skip
    # Ranks write on when the agent is gone: the pipe ends with the last of them.
    done = subprocess.run(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    if fault == "kill":
        who, speakers = rf"rank 1 on host \S+ \(pid \d+\) has died, after step {FAULT_STEP}{SEEN}", 1
    else:
        who, speakers = r"torchrun's agent on \S+, through which the ranks meet, does not answer any more", 2
    line = rf"{who}\. The newest complete checkpoint is of step \d: the same command goes on from there\n"
    assert done.returncode == (1 if fault == "kill" else -9)
    assert len(re.findall(line, done.stdout)) == speakers, done.stdout[-6000:]
    assert len(re.findall(line, (folder / "run" / "log.txt").read_text())) == 1


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_silence_is_the_time_that_a_counter_stood_still_while_looked_at():
    clock = Clock()
    silence, found = Silence(5, clock), []
    for now, value in ((0, None), (5, None), (10, 1), (15, 1), (20, 1), (25, 2), (30, 2)):
        clock.now = now
        found.append(silence.look(value))
    assert found == [0, 5, 0, 5, 10, 0, 5]
    clock.now = 10_000  # suspended with everyone else, and first to wake up
    assert silence.look(2) == 5 + 10
    clock.now += 5
    assert silence.look(3) == 0


def test_a_process_is_gone_when_its_number_is_free_or_another_s():
    this = Process.this()
    assert this.namespace and this.pid == os.getpid() and not this.is_gone(this)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        other = replace(this, pid=child.pid, started=_process_status(child.pid)[1])
        assert not other.is_gone(this)
        assert replace(other, started=this.started + "0").is_gone(this)
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert other.is_gone(this), "killed, and not yet waited for"
    child.communicate()
    assert other.is_gone(this)


def test_a_process_that_cannot_be_seen_is_not_gone(monkeypatch):
    this = Process.this()
    free = replace(this, pid=2**22 + 1)  # above the largest there can be
    assert free.is_gone(this)
    assert not replace(free, namespace="another").is_gone(this) and not replace(free, namespace="").is_gone(this)
    assert not free.is_gone(replace(this, namespace=""))

    def too_many_files(self):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("pathlib.Path.read_text", too_many_files)
    assert not free.is_gone(this)


def test_every_rank_is_watched_and_watches_three_at_most(monkeypatch):
    world, machine = 24, 8
    watchers = {rank: set() for rank in range(world)}
    for rank in range(world):
        monkeypatch.setenv("LOCAL_RANK", str(rank % machine))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(machine))
        watched = _first_watched(rank, world, keeper=0)
        assert len(watched) <= 3 and rank not in watched
        for other in watched:
            watchers[other].add(rank)
    assert watchers.pop(0) == set(range(1, world))
    # By the one before it, and by one that can see its process.
    assert all(rank - 1 in found and any(w // machine == rank // machine for w in found)
               for rank, found in watchers.items())  # fmt: skip


@pytest.mark.parametrize("local_rank, local_world", [("", ""), ("3", "2"), ("5", "8"), ("0", "8")])
def test_a_launcher_that_says_nothing_of_machines_leaves_the_next_rank(monkeypatch, local_rank, local_world):
    """Also one whose words do not fit: rank 2 of 4 is not the fifth of its machine, nor one of eight."""
    for key, value in (("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_world)):
        monkeypatch.setenv(key, value) if value else monkeypatch.delenv(key, raising=False)
    assert _first_watched(2, 4, keeper=None) == {3}


def test_errors_of_communication_are_known_also_behind_another():
    closed = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"
    )
    assert _is_of_communication(closed)
    assert _is_of_communication(torch.distributed.DistBackendError("NCCL error"))
    try:
        try:
            raise closed
        except RuntimeError as error:
            raise UserError("step_00000002: the checkpoint cannot be loaded") from error
    except UserError as error:
        assert _is_of_communication(error)
    assert not _is_of_communication(RuntimeError("CUDA out of memory"))
    assert not _is_of_communication(UserError("data.train: no such file"))


def test_ranks_that_do_not_start_are_named(monkeypatch):
    from megatron_mhar.train import distributed

    port = free_port()
    rank = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    code = "from megatron_mhar.train import distributed; distributed._meet(30)"
    # The second one comes later, and would wait longer.
    second = subprocess.Popen([sys.executable, "-c", code], env=os.environ | rank | {"RANK": "1"}, cwd=ROOT,
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
    for key, value in (rank | {"RANK": "0"}).items():
        monkeypatch.setenv(key, value)
    missing = (
        rf"of 4 ranks 2 \(2, 3\) have not come to localhost:{port} within \d+ s \(parallel.join_s\): they hang, or"
    )
    with pytest.raises(torch.distributed.DistStoreError, match=missing):
        distributed._meet(30)
    assert re.search(missing, second.communicate(timeout=60)[1])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(
        torch.distributed.DistStoreError, match=r"rank 1 does not reach rank 0; it has not come to \S+ wi"
    ):
        distributed._meet(1)


def test_one_rank_has_no_thread(one_rank, tmp_path):
    before = threading.active_count()
    with Watch(RunFiles(tmp_path), ParallelConfig(heartbeat_s=1)):
        assert threading.active_count() == before


def test_ranks_that_met_through_a_file_are_told_that_they_are_not_watched(one_rank, tmp_path, monkeypatch, caplog):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    monkeypatch.setattr(watch, "_default_store", lambda: store)
    watched = Watch(RunFiles(tmp_path), ParallelConfig(heartbeat_s=1, timeout_s=7))
    watched.world = 2
    before = threading.active_count()
    with watched:
        assert threading.active_count() == before
    assert "the ranks met through a FileStore" in caplog.text and "after 7 s" in caplog.text


def test_a_first_beat_is_heard_at_once_lest_a_rank_be_lost_without_a_name(one_rank, tmp_path, monkeypatch):
    """Rank 0 comes later than rank 1, which would look again after 10 s."""
    store = torch.distributed.TCPStore("localhost", free_port(), is_master=True)
    monkeypatch.setattr(watch, "_default_store", lambda: store)
    monkeypatch.setattr(watch, "on_first_rank", lambda action: "prefix")
    watched = Watch(RunFiles(tmp_path), ParallelConfig(heartbeat_s=60))
    watched.rank, watched.world, watched._keeps_store = 1, 2, False
    first = Beat(0, Process.this(), 0, 0, 0, 0, 0.0, "", waits=False, patient=False, ended=False)
    with watched:
        time.sleep(0.3)
        assert watched._heard == {}
        store.set("mhar/watch/prefix/beat/0", first.dump())
        for _ in range(100):
            if watched._heard:
                break
            time.sleep(0.05)
        assert watched._heard == {0: first}
        rounds = watched._rounds
        time.sleep(0.3)
        assert watched._rounds <= rounds + 1, "once all are there it looks as often as it beats"


class TestWhoHangs:
    """Rank 0 of four has waited 7 s in vain, the others are as the beats say that are given."""

    WAITS, WORKS = {"waits": True}, {"place": "megatron_mhar.data.dataset.read, line 1"}

    @pytest.fixture
    def named(self, one_rank, tmp_path, monkeypatch):
        """Looks at one dict of fields a rank and time; gives the rank that is named, and the text."""

        def look(*looks, seconds=7.0, own=lambda number: {}):
            store = torch.distributed.HashStore()
            watched = Watch(RunFiles(tmp_path), ParallelConfig(heartbeat_s=60, timeout_s=7))
            watched.world = 4
            place = "megatron_mhar.train.loop.run, line 2"
            known = Beat(0, watched._process, 9, 3, 5, 7, 1.0, place, waits=True, patient=False, ended=False)
            for number, beats in enumerate(looks):
                watched._stalled = replace(known, number=number, **own(number)), seconds
                for rank, fields in enumerate(beats, 1):
                    beat = replace(known, **{"rank": rank, "number": number, "waits": False} | fields)
                    store.set(f"beat/{rank}", beat.dump())
                watched._look_at = 0.0
                watched._look_for_hung(store)
            return watched._verdict

        return look

    def test_one_that_works_on_at_the_same_place(self, named):
        rank, text = named(*[(self.WAITS, self.WORKS, self.WAITS)] * 2)
        assert rank == 2 and "rank 2 on host" in text and self.WORKS["place"] in text
        assert "hangs: rank 0 has waited 7 s for it, in megatron_mhar.train.loop.run, line 2, after step 3" in text

    @pytest.mark.parametrize(
        "moved", [{"passes": 6}, {"messages": 8}, {"step": 4}, {"place": "x"}, {"processor_s": 1.02}, {"number": 0}]
    )
    def test_none_that_moves_or_has_not_beaten_since(self, named, moved):
        """At the same line of another micro-batch, say, of a long evaluation, or in a long computation."""
        assert named((self.WAITS, self.WORKS, self.WAITS), (self.WAITS, self.WORKS | moved, self.WAITS)) is None

    def test_none_where_it_is_not_clear(self, named):
        works, waits = self.WORKS, self.WAITS
        assert named(*[(waits, waits, waits)] * 3) is None, "all wait"
        assert named(*[(works, works, works)] * 3) is None, "most do not"
        assert named(*[(waits, works, waits)]) is None, "seen once"
        assert named(*[(waits, works, waits)] * 3, own=lambda number: {"waits": False}) is None, "it sleeps itself"
        assert named(*[(waits, works, waits)] * 3, seconds=6.9) is None, "it has not waited long enough"
        assert named(*[(waits, works | {"ended": True}, waits)] * 3) is None, "it has left"

    def test_later_looks_find_it_too(self, named):
        elsewhere = self.WORKS | {"place": "elsewhere"}
        beats = [(self.WAITS, each, self.WAITS) for each in (elsewhere, self.WORKS, self.WORKS)]
        assert named(*beats)[0] == 2

    def test_ranks_whose_devices_take_no_more_work_are_not_it_and_look_too(self, named):
        """They are in a launch, and in no call that is known to wait, but they spin."""

        def spins(number):
            return {"waits": False, "processor_s": 10.0 * number}

        assert named(*[(spins(number), self.WORKS, spins(number)) for number in range(2)], own=spins)[0] == 2

    def test_several_are_all_named(self, named):
        rank, text = named(*[(self.WORKS, self.WORKS, self.WAITS)] * 2)
        assert rank == 1 and "hangs: rank 0 has waited 7 s for it, and for rank 2, in " in text

    def test_where_none_stands_out_it_is_said_once(self, named, caplog):
        all_wait = [(self.WAITS, self.WAITS, self.WAITS)] * 4
        assert named(*all_wait, seconds=66.0) is None and caplog.text == ""
        assert named(*all_wait, seconds=68.0) is None
        assert caplog.text.count("rank 0 has waited 68 s for others, in megatron_mhar.train.loop.run, line 2, and") == 1

    def test_a_stall_that_is_over_is_forgotten(self, named, one_rank, tmp_path):
        watched = Watch(RunFiles(tmp_path), ParallelConfig(heartbeat_s=60, timeout_s=7))
        watched._looks, watched._seen, watched._look_at, watched._said_unclear = True, {1: None}, 5.0, True
        watched._stalled = None, 6.9
        watched._look_for_hung(None)
        assert (watched._looks, watched._seen, watched._look_at, watched._said_unclear) == (None, {}, 0.0, False)

    def test_four_ranks_look_at_most(self, named, monkeypatch):
        monkeypatch.setattr(watch, "_LOOKERS", 0)
        assert named(*[(self.WAITS, self.WORKS, self.WAITS)] * 3) is None
