"""Ranks of runs in which one of them dies, stops, fails or is slow.

watch_worker.py ranks OUT CORPUS       every case of CASES: as many plain processes as it has ranks, as srun starts them
watch_worker.py rank FOLDER FAULT RANK one rank, of those that a launcher starts; FOLDER holds config.yaml

What came of it is written to OUT as JSON: of each case its ranks' exit codes, the seconds that they ended after the
fault, and what they said.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

FAULT_STEP = 3  # steps done when it happens; the checkpoint of step 2 is there
HEARTBEAT_S = 3
TIMEOUT_S = 10  # of collectives, in cases of ranks that hang
LIMIT_S = 60  # a case may take so long
# Of each: ranks, fault, the rank that has it, and the layout.
CASES = {
    "killed": (4, "kill", 2, {"pipeline": 2}),
    "first_killed": (4, "kill", 0, {"pipeline": 2}),
    "last_killed": (4, "kill", 3, {"pipeline": 4}),
    "one_of_two_killed": (2, "kill", 1, {}),
    "stopped": (4, "stop", 1, {"pipeline": 2}),
    "first_stopped": (2, "stop", 0, {"pipeline": 2}),
    "patient_then_stopped": (2, "stop after patience", 1, {"timeout_s": 2 * LIMIT_S}),
    "failed": (4, "fail", 2, {"pipeline": 2}),
    "first_failed": (2, "fail", 0, {"pipeline": 2}),
    "cut_off": (2, "cut", 1, {}),
    "wrong_input": (2, "wrong", 1, {}),
    "all_failed": (2, "diverge", 0, {}),
    "second_run_killed": (2, "second", 1, {}),
    "hung": (4, "hang", 2, {"pipeline": 2, "timeout_s": TIMEOUT_S}),
    "one_of_two_hung": (2, "hang in a step", 0, {"timeout_s": TIMEOUT_S}),
    "cut_off_from_a_slow_one": (2, "cut, and another is slow", 1, {}),
    "hung_at_the_end": (2, "hang at the end", 1, {"timeout_s": TIMEOUT_S}),
    # These runs end well.
    "slow": (4, "sleep", 2, {"pipeline": 2}),
    "slow_in_each_micro_batch": (2, "sleep in each micro-batch", 1, {"pipeline": 2, "timeout_s": HEARTBEAT_S + 1}),
    "silent": (2, "hold the lock", 1, {"timeout_s": 3 * HEARTBEAT_S}),
}
WELL = ("slow", "slow_in_each_micro_batch", "silent")
TRACKED = "first_killed"  # sends its metrics to MLflow


def write_config(folder, corpus, parallel, skip=None, **sections):
    """config.yaml of a run in ``folder``; its log is ``folder``/run/log.txt."""
    from megatron_mhar.config.load import dump_config
    from tests.conftest import tiny_run

    config = tiny_run(
        corpus, folder, parallel={"heartbeat_s": HEARTBEAT_S, **parallel}, checkpoint={"interval": 2},
        training={"micro_batch_size": 1, "steps": 6, "skip": skip or {}}, **sections,
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))


def put_in(fault, folder, name="run"):
    """Let ``fault`` happen once :data:`FAULT_STEP` steps of the run ``name`` are done."""
    from megatron_mhar.errors import UserError
    from megatron_mhar.train import loop

    Trainer = loop.Trainer
    if fault == "hang at the end":
        Trainer.release = lambda self: time.sleep(LIMIT_S)
    train_step = Trainer.train_step

    def faulty(self, batches):
        if self.steps_done == FAULT_STEP and self.config.name == name:
            (folder / "fault").write_text(str(time.time()))
            if fault in ("kill", "second"):
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stop after patience":
                with self.patience():
                    pass
            if fault in ("stop", "stop after patience"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "agent":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(LIMIT_S)
            if fault == "fail":
                raise RuntimeError("CUDA out of memory, says a test.")
            if fault == "cut":
                raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
            if fault == "wrong":
                raise UserError("corpus/train.bin: the test has taken it away")
            if fault == "hang":
                time.sleep(LIMIT_S)
            if fault == "hang in a step":  # in which the others are already
                Trainer._mean_loss = lambda *args, **keys: time.sleep(LIMIT_S)
            if fault == "sleep":
                time.sleep(3 * HEARTBEAT_S)
            if fault == "sleep in each micro-batch":  # of four: others wait for long, but for none of them too long
                forward_step = loop.forward_step
                loop.forward_step = lambda *args, **keys: [time.sleep(HEARTBEAT_S / 2), forward_step(*args, **keys)][1]
            if fault == "hold the lock":
                with self.patience():
                    ctypes.PyDLL(None).usleep(2 * HEARTBEAT_S * 1_000_000)
        return train_step(self, batches)

    Trainer.train_step = faulty


def run_rank(folder, fault, victim):
    """`mhar train` on this rank; ends the process."""
    import torch

    from megatron_mhar.cli.main import main
    from megatron_mhar.config.load import load_config

    fault, _, another = fault.partition(", and another is ")
    if os.environ["RANK"] == str(victim):
        put_in(fault, folder, "again" if fault == "second" else "run")
    elif another == "slow":
        put_in("sleep", folder)
    if fault == "second":
        from megatron_mhar import platform
        from megatron_mhar.train.loop import train

        platform.setup(0)
        torch.distributed.init_process_group("gloo")  # groups are there already, and serve both runs
        train(load_config(folder / "config.yaml", []))
        (folder / "first-run-done").write_text("")
        train(load_config(folder / "config.yaml", ["name=again"]))
    try:
        main(["train", str(folder / "config.yaml")])
    finally:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("mhar")]
        assert not left, left


def start_rank(rank, world, port, folder, fault, victim):
    """Pid of a new process that is the rank; it says what it says to ``folder``/stderr<rank>."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.environ |= {
            "RANK": f"{rank}",
            "WORLD_SIZE": f"{world}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
        }
        said = os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        run_rank(folder, fault, victim)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for(ranks, needed):
    """Exit code and end of each rank by its number; those not ended in time are killed, and left out."""
    ended, deadline = {}, time.time() + LIMIT_S
    while time.time() < deadline and not needed <= ended.keys():
        time.sleep(0.02)
        for rank, pid in ranks.items():
            if rank not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended[rank] = os.waitstatus_to_exitcode(status), time.time()
    for rank in ranks.keys() - ended.keys():
        os.kill(ranks[rank], signal.SIGKILL)
        os.waitpid(ranks[rank], 0)
    return ended


def what_came_of(folder, began, pids, fault, victim):
    """Wait for a case's ranks: their exit codes, the seconds that they ended after the fault, and what they said."""
    ended = wait_for(pids, pids.keys() - ({victim} if fault == "stop" else set()))
    fault_time = float((folder / "fault").read_text()) if (folder / "fault").exists() else began
    log = folder / ("again" if fault == "second" else "run") / "log.txt"
    return {
        "pids": list(pids.values()),
        "codes": [ended[rank][0] if rank in ended else None for rank in pids],
        "seconds": [ended[rank][1] - fault_time if rank in ended else None for rank in pids],
        "said": [(folder / f"stderr{rank}").read_text() for rank in pids],
        "log": log.read_text() if log.exists() else "",
        "first_done": (folder / "first-run-done").exists(),
    }


def run_cases(out, corpus):
    from megatron_mhar.launch.place import free_port
    from megatron_mhar.quiet import quiet_imports

    with quiet_imports():
        import megatron_mhar.train.loop  # noqa: F401  once for all ranks of all cases

    started, results = {}, {}
    # Slow ones sleep while the others are at work.
    for case in sorted(CASES, key=lambda case: case not in WELL):
        world, fault, victim, parallel = CASES[case]
        folder, port = out.parent / case, free_port()
        sections = {"tracking": {"enabled": True}} if case == TRACKED else {}
        if fault == "diverge":
            diverging = {"lr": 1e20, "min_lr": 1e20, "warmup_steps": 0, "clip_grad": 0.0}
            sections = {"optimizer": diverging, "skip": {"max_in_row": 1}}
        write_config(folder, corpus, parallel, **sections)
        began = time.time()
        started[case] = began, {r: start_rank(r, world, port, folder, fault, victim) for r in range(world)}
        if case not in WELL:
            results[case] = what_came_of(folder, *started[case], fault, victim)
    for case in WELL:
        _, fault, victim, _ = CASES[case]
        results[case] = what_came_of(out.parent / case, *started[case], fault, victim)
    out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        run_cases(Path(sys.argv[2]), sys.argv[3])
    else:
        run_rank(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
