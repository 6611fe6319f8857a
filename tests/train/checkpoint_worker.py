"""Runs that are saved under one layout and go on under others; and one whose writer can be held.

python -m torch.distributed.run --nproc-per-node N checkpoint_worker.py OUT CORPUS TIER
    Leaves the runs of RUNS[N] beside OUT, see run_folder; of the methods of CASES[TIER].
python checkpoint_worker.py CONFIG MARK SECONDS
    Trains CONFIG. The writer of the second checkpoint stops in the middle of its file, leaves its process id in MARK,
    and goes on after SECONDS.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.conftest import METHODS, tiny_run

PARALLEL = {
    "one": {},
    "dp2": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "tp2_pp2_vpp2": {"tensor": 2, "pipeline": 2, "virtual_stages": 2},
    "pp4_ends": {"pipeline": 4, "stage_sublayers": [0, 5, 3, 0]},
}
SAVED, STEPS = 4, 8
# By number of processes: the layout of the first steps, the layouts that go on from there. The first saves are
# asynchronous, the last ones not.
RUNS = {
    2: {"tp2": ["tp2", "pp2", "dp2"]},
    4: {"tp2": ["tp2_pp2_vpp2", "pp4_ends"], "tp2_pp2_vpp2": []},
    1: {"tp2": ["one"], "tp2_pp2_vpp2": ["one"]},
}
PAIRS = [(first, then) for runs in RUNS.values() for first, others in runs.items() for then in others]
WHOLE = "tp2"
EVALUATED = "pp2"  # the whole run, saved under another
# A gate that is open lets queries learn in so few steps.
SITES = {
    "mhar": METHODS["mhar"], "delta_block": {**METHODS["delta_block"], "gate_init": 1.0},
    "hyper_connections": METHODS["hyper_connections"],
}  # fmt: skip
CASES = {"fast": ("mhar",), "all": tuple(SITES)}


def run_folder(folder, method, first, then=None):
    """Folder of the run that begins under the layout ``first`` and goes on under ``then``."""
    return folder / f"{method}-{first}" / (then or "saved")


def run_all(folder, corpus, world, tier, together):
    """Begin and go on with the runs of RUNS[world], by ``mhar train``; ``mhar evaluate`` a whole one.

    All ranks call ``together`` before each run; it is true on the one that makes folders.
    """
    from megatron_mhar.cli.evaluate import evaluate
    from megatron_mhar.cli.train import train
    from megatron_mhar.config.load import dump_config

    def mhar_train(run, layout, *overrides):
        if together() and not run.exists():
            config = tiny_run(
                "corpus", "runs", model={"layers": "local"},
                # The epsilon keeps gradients of the size of rounding from moving weights by whole steps.
                optimizer={"ema_decay": 0.9, "eps": 1e-3, "no_weight_decay": ["embedding", "norm"], "lr": 1e-2},
                training={"micro_batch_size": 1, "steps": STEPS}, residual=SITES[method],
            )  # fmt: skip
            run.mkdir(parents=True)
            (run / "given.yaml").write_text(dump_config(config))
        together()
        given = {"data.train": [f"{corpus}/train"], "data.valid": [f"{corpus}/valid"], "output_dir": run.parent,
                 "name": run.name, **{f"parallel.{key}": value for key, value in PARALLEL[layout].items()}}  # fmt: skip
        arguments = [f"{key}={value}" for key, value in given.items()]
        train.main([str(run / "given.yaml"), *arguments, *overrides], standalone_mode=False)

    def mhar_evaluate(run, layout):
        together()
        keys = {"tensor": 1, **PARALLEL[layout]}
        arguments = [f"parallel.{key}={value}" for key, value in keys.items()]
        evaluate.main([str(run), *arguments], standalone_mode=False)

    for method in CASES[tier]:
        for first, others in RUNS[world].items():
            saved = run_folder(folder, method, first)
            if world == num_ranks(first):
                mhar_train(saved, first, f"training.stop_after={SAVED}", "checkpoint.asynchronous=true")
                if first == WHOLE:
                    mhar_train(run_folder(folder, method, "whole"), first)
                    mhar_evaluate(run_folder(folder, method, "whole"), EVALUATED)
            for then in others:
                run = run_folder(folder, method, first, then)
                if together():
                    shutil.copytree(saved, run)
                    config = run / "config.yaml"  # a copied run has another name
                    config.write_text(config.read_text().replace(f"name: {saved.name}\n", f"name: {run.name}\n"))
                mhar_train(run, then)


def num_ranks(layout):
    """Processes that runs begin on under a layout."""
    return PARALLEL[layout].get("tensor", 1) * PARALLEL[layout].get("pipeline", 1)


def layouts(out, corpus, tier):
    import torch
    from megatron.core import parallel_state

    from megatron_mhar import platform

    platform.setup(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(platform.BACKEND)

    def together():
        torch.distributed.barrier()
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        return torch.distributed.get_rank() == 0

    run_all(out.parent, corpus, torch.distributed.get_world_size(), tier, together)
    if together():
        torch.save({}, out)
    torch.distributed.destroy_process_group()


def held(config, mark, seconds):
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from megatron_mhar.config.load import load_config
    from megatron_mhar.train import loop

    write = FileSystemWriterAsync.write_preloaded_data

    def write_half(transforms, *, write_bucket, **others):
        file = Path(write_bucket[0])
        done = write(transforms, write_bucket=write_bucket, **others)
        if not file.parent.name.startswith(f"step_{SAVED // 2:08d}"):
            whole = file.read_bytes()
            os.truncate(file, len(whole) // 2)
            mark.with_suffix(".new").write_text(str(os.getpid()))
            mark.with_suffix(".new").rename(mark)
            time.sleep(seconds)
            file.write_bytes(whole)
        return done

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write_half)
    loop.train(load_config(config))


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        layouts(Path(sys.argv[1]), *sys.argv[2:])
    else:
        os.setpgrp()  # signals of a job go to all its processes
        signal.signal(signal.SIGINT, signal.default_int_handler)
        held(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
