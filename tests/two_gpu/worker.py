"""One of the two ranks: runs the phases that it is told, and lets rank 0 write down what comes of each run at once.

tests/two_gpu/run.py starts it, with everything it is told in one argument of JSON.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import itertools
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_mhar.quiet import quiet_imports

with quiet_imports():
    import torch
    from megatron.core import parallel_state

    from megatron_mhar import platform
    from megatron_mhar.bench.machine import describe_machine
    from megatron_mhar.config.load import load_config
    from megatron_mhar.config.schema import RunConfig
    from megatron_mhar.run_files import RunFiles
    from megatron_mhar.tracking.journal import load_metrics
    from megatron_mhar.train.distributed import initialize, mean_of_last_stage, on_first_rank, shut_down
    from megatron_mhar.train.loop import Trainer, train
    from megatron_mhar.train.progress import ProgressLog
    from megatron_mhar.train.run_folder import RunFolder
    from tests.conftest import write_corpus
    from tests.train import layout_worker
    from tests.two_gpu import cases
    from tests.two_gpu.cases import LONG, MOVED, ONE, PHASES, Options, Record

ROOT = Path(__file__).parents[2]
PARALLEL: dict[str, dict[str, Any]] = {ONE: {}} | {layout: layout_worker.LAYOUTS[2][layout] for layout in cases.LAYOUTS}
TIMEOUT_S = 90  # of a collective
NOT_ENDED = "it did not end: it crashed or hung"
RUN_LIMIT_S = 120  # of a run of 20 steps with all it compiles; threads are then shown and the process ends
SMALL_VOCAB = 128  # of tests.conftest.tiny_run
RANK = int(os.environ["RANK"])


def say(text: str) -> None:
    """Print on rank 0."""
    if RANK == 0:
        print(text, flush=True)


class World:
    """Process groups of this rank alone or of both, one after the other.

    Args:
        limit: timeout of a collective.
    """

    def __init__(self, limit: datetime.timedelta) -> None:
        self.limit = limit
        self.store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, is_master=RANK == 0, timeout=limit
        )
        self.numbers = itertools.count()

    def meet(self) -> None:
        """Wait for the other rank."""
        key = f"meet/{next(self.numbers)}"
        self.store.set(f"{key}/{RANK}", "here")
        self.store.wait([f"{key}/{rank}" for rank in range(2)])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Each rank for itself; both are at work."""
        torch.distributed.init_process_group(
            platform.BACKEND, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=self.limit
        )
        yield
        shut_down()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Both ranks. An error ends the process: groups in which one rank waits cannot be left."""
        store = torch.distributed.PrefixStore(f"world/{next(self.numbers)}", self.store)
        torch.distributed.init_process_group(platform.BACKEND, store=store, rank=RANK, world_size=2, timeout=self.limit)
        yield
        shut_down()


class Book:
    """Records of one phase, which rank 0 writes to its file after each run.

    Args:
        path: file of the phase; what it holds is kept.
        about: what is written beside the records.
        done: runs (layout/method) that it holds, the same on both ranks.
        commit: that the records are made of.
    """

    def __init__(self, path: Path, about: dict[str, object], done: Sequence[str], commit: str) -> None:
        self.path, self.about, self.done, self.commit = path, about, frozenset(done), commit
        self.records: dict[str, Record] = {}
        if path.exists():
            known = json.loads(path.read_text())["records"]
            self.records = {key: Record(**value) for key, value in known.items() if key in self.done}

    def write(self, layout: str, method: str, record: Record) -> None:
        """Take a record."""
        record.made = f"{datetime.datetime.now().isoformat('T', 'seconds')} {self.commit}"
        self.records[f"{layout}/{method}"] = record
        if RANK == 0:
            text = json.dumps(self.about | {"records": {key: asdict(value) for key, value in self.records.items()}})
            new = self.path.with_suffix(".new")
            new.write_text(text)
            new.replace(self.path)

    @contextmanager
    def run(self, layout: str, method: str) -> Iterator[Callable[[Record], None]]:
        """A run of both ranks: until it has given its record it counts as failed. Gives a function that takes it."""
        self.write(layout, method, Record(failed=NOT_ENDED))
        try:
            yield lambda record: self.write(layout, method, record)
        except Exception as error:
            self.write(layout, method, Record(failed=f"{type(error).__name__}: {error}"))
            raise


class Session:
    """What all phases have in common.

    Args:
        options: see there.
        scratch: folder of data, runs and reference gradients, the same for both ranks and all starts.
        done: runs of each phase that an earlier start has made.
    """

    def __init__(self, options: Options, scratch: Path, done: dict[str, list[str]]) -> None:
        self.options, self.scratch, self.done = options, scratch, done
        self.runs, self.alone = scratch / "runs", scratch / f"runs-of-rank-{RANK}"
        self.device = platform.setup(int(os.environ["LOCAL_RANK"]))
        self.world = World(datetime.timedelta(seconds=TIMEOUT_S))
        self.machine = asdict(describe_machine()) if RANK == 0 else {}
        self.phase, self.end = "", 0.0
        self.book = Book(scratch / "none", {}, [], "")

    def open(self, phase: str) -> None:
        """Begin a phase."""
        self.phase, self.end = phase, time.monotonic() + PHASES[phase].limit_s
        now = datetime.datetime.now().isoformat("T", "seconds")
        about: dict[str, object] = {
            "phase": phase,
            "about": PHASES[phase].about,
            "date": now,
            "options": {key: value for key, value in asdict(self.options).items() if key != "out"},
            "machine": self.machine,
        }
        path = Path(self.options.out) / f"{phase}.json"
        self.book = Book(path, about, self.done.get(phase, []), str(self.machine.get("commit")))
        say(f"--- {phase}: {PHASES[phase].about}")

    def vocab_size(self, phase: str) -> int:
        """Of the phase's model."""
        recipe = PHASES[phase].recipe
        if self.options.tiny or recipe is None:
            return SMALL_VOCAB
        return load_config(ROOT / "configs" / recipe / "baseline.yaml").model.vocab_size

    def corpus(self, vocab_size: int) -> Path:
        """Folder of the training and validation data for a vocabulary."""
        return self.scratch / f"corpus-{vocab_size}"

    def write_corpora(self) -> None:
        """Those of all phases."""
        if RANK == 0:
            for vocab_size in {SMALL_VOCAB, *map(self.vocab_size, self.options.phases)}:
                folder = self.corpus(vocab_size)
                if not folder.exists():
                    folder.mkdir(parents=True)
                    count = 120 if vocab_size == SMALL_VOCAB else 2000
                    write_corpus(folder, vocab_size=vocab_size, documents=(("train", count), ("valid", 40)))
        self.world.meet()

    def watch(self, steps: int = 20) -> None:
        """From now on a run has its time: after it, what all threads are doing is shown, and the process ends."""
        limit = RUN_LIMIT_S + max(0, steps - 20)
        faulthandler.dump_traceback_later(limit, exit=True)

    def late(self) -> bool:
        """Whether the phase is out of time, the same on both ranks."""
        return on_first_rank(lambda: time.monotonic() > self.end)


# --- runs ---------------------------------------------------------------------------------------------------------


def shape_config(session: Session, layout: str, method: str, **keys: object) -> RunConfig:
    """Config of a run with the model of the phase's recipe."""
    phase, options = PHASES[session.phase], session.options
    recipe = ROOT / "configs" / str(phase.recipe) / f"{method}.yaml"
    ranks = 2 // math.prod(PARALLEL[layout].get(key, 1) for key in ("tensor", "pipeline")) if layout != ONE else 1
    cut = phase.micro_batches if layout in cases.PIPELINES else 1
    values: dict[str, object] = {
        "name": f"{session.phase}-{layout}-{method}",
        "output_dir": str(session.alone if layout == ONE else session.runs),
        "data.train": [f"{session.corpus(session.vocab_size(session.phase))}/train"],
        "data.valid": [],
        "data.end_of_document": 0,
        "data.num_workers": 0,
        # An epsilon well above the gradients makes Adam go by their size: else it turns one that is nothing but
        # rounding into a whole step, and two runs part for no other reason.
        "optimizer.lr": 3e-3,
        "optimizer.eps": 1e-2,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        # The order of samples depends on it.
        "training.steps": max(options.steps, options.long_steps),
        "training.global_batch_size": phase.sequences,
        "training.micro_batch_size": phase.sequences // ranks // cut,
        "parallel.timeout_s": TIMEOUT_S,
        "tracking.enabled": False,
        **{f"parallel.{key}": value for key, value in PARALLEL[layout].items()},
        **(cases.TINY if options.tiny else {}),
        **phase.overrides,
        **keys,
    }
    if platform.HAS_GPU:  # by name: what is not there is then an error, and nothing slower is taken for it
        values |= {"model.layers": "transformer_engine"}
        values |= {} if method == "baseline" else {"residual.backend": "triton"}
    return load_config(recipe, [f"{key}={json.dumps(value)}" for key, value in values.items()])


def run_shape(session: Session, config: RunConfig, layout: str, method: str) -> Record:
    """Losses, norms, times, memory, and what was sent."""
    long = layout != ONE and (session.phase, method) == LONG
    steps = session.options.long_steps if long else session.options.steps
    session.watch(steps)
    gc.collect()
    held = 0
    if platform.HAS_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    trainer = Trainer(config, RunFolder(config), session.device, ProgressLog(None, total=steps, start=0), None)
    # Not by 0.1: in wide heads that makes softmaxes so sharp, and steps of their queries so large, that two runs on one
    # device which cut a step into other micro-batches part by a tenth of the norm within 20 steps.
    layout_worker.move_sites(trainer.models, by=0.01)
    trainer.optimizer.megatron.reload_model_params()  # it has fp32 copies of its own
    batches = trainer._batches(trainer.train_set, 0, steps * config.training.global_batch_size)
    losses: list[torch.Tensor] = []  # of the last stage
    norms, seconds = [], []
    with layout_worker.Wire() as wire:
        for _ in range(steps):
            began = time.perf_counter()
            loss, norm = trainer.train_step(batches)
            losses += [] if loss is None else [loss.clone()]  # a graph's next replay writes over it
            norms.append(norm)
            seconds.append(time.perf_counter() - began)  # the norm has waited for the device
    predicted = layout_worker.predicted_sends(trainer, config, trainer.micro_batches, False)
    own: dict[str, Any] = {
        "sent": [wire.messages, wire.bytes],
        "predicted": [steps * count for count in predicted],
        "peak": platform.peak_memory_bytes() - held,
    }
    mean = mean_of_last_stage(torch.stack(losses) if losses else None, steps).tolist()
    everyone = gather(own)
    trainer.release()
    return Record(
        losses=mean,
        norms=norms,
        seconds=seconds,
        micro_batches=trainer.micro_batches,
        tokens=config.training.global_batch_size * config.training.sequence_length,
        peak_memory_bytes=max(found["peak"] for found in everyone),
        sent=[found["sent"] for found in everyone],
        predicted=[found["predicted"] for found in everyone],
    )


def small_config(session: Session, layout: str, method: str) -> RunConfig:
    """Config of a run of tests/train/layout_worker.py, four micro-batches a step."""
    folder = session.alone if layout == ONE else session.runs
    config: RunConfig = layout_worker.layout_run(
        session.corpus(SMALL_VOCAB), folder, layout, method, PARALLEL[layout],
        training={"global_batch_size": 4, "micro_batch_size": 1},
    )  # fmt: skip
    return config


def run_small(session: Session, config: RunConfig, layout: str, method: str) -> Record:
    """Twenty steps in fp32, with every gradient of the first ones held against those on one GPU."""
    kept = session.scratch / f"gradients-{method}.pt"
    expected = None if layout == ONE else torch.load(kept, map_location=session.device, weights_only=False)
    probed = config.parallel.pipeline > 1
    found = layout_worker.run(config, expected, cases.SMALL_STEPS, probed)
    record = Record(losses=found["losses"], norms=found["norms"])
    if layout == ONE:
        torch.save({"gradients": found["gradients"][: layout_worker.STEPS]}, kept)
    else:
        record.gradient_error = max(found["errors"].values())
    if probed:  # an evaluation and a step of each rank
        for name in ("sent", "predicted"):
            sums = [[sum(column) for column in zip(*rank[name])] for rank in found["probe"]]
            setattr(record, name, sums)
    return record


def gather[T](value: T) -> list[T]:
    """``value`` of every rank."""
    everyone = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value)
    return everyone


# --- phases -------------------------------------------------------------------------------------------------------


def compare_layouts(
    session: Session,
    configure: Callable[[Session, str, str], RunConfig],
    run: Callable[[Session, RunConfig, str, str], Record],
) -> None:
    """Every method on one GPU, each rank half of them; then under every layout on both."""
    book, methods = session.book, cases.methods(session.options, session.phase)
    own: dict[str, Record] = {}
    for method in methods:
        if f"{ONE}/{method}" not in book.done:
            book.write(ONE, method, Record(failed=NOT_ENDED))
    with session.world.alone():
        for method in methods[RANK::2]:
            if f"{ONE}/{method}" not in book.done:
                session.watch()
                config = configure(session, ONE, method)
                initialize(config)
                own[method] = run(session, config, ONE, method)
    session.watch()
    with session.world.together():
        for part in gather(own):
            for method, record in part.items():
                book.write(ONE, method, record)
                say(f"{session.phase} on one GPU, {method}: {words(record, None)}")
        for layout in cases.layouts(session.options, session.phase):
            for method in methods:
                if f"{layout}/{method}" in book.done:
                    continue
                if session.late():
                    book.write(layout, method, Record(failed="left out: the phase was out of time"))
                    continue
                session.watch()
                began = time.monotonic()
                with book.run(layout, method) as take:
                    config = configure(session, layout, method)
                    initialize(config)
                    take(run(session, config, layout, method))
                tell(session, layout, method, time.monotonic() - began)
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()


def tell(session: Session, layout: str, method: str, seconds: float) -> None:
    """Print how a run went."""
    book = session.book
    record, one = book.records[f"{layout}/{method}"], book.records.get(f"{ONE}/{method}")
    wrong = cases.faults(record, one, PHASES[session.phase].tolerance, pipelined=layout in cases.PIPELINES)
    verdict = f"WRONG: {'; '.join(wrong)}" if wrong else "as it should be"
    say(f"{session.phase} {layout} {method}: {words(record, one)}; {verdict} ({seconds:.0f} s)")


def words(record: Record, one: Record | None) -> str:
    """A run in a line."""
    parts = [f"{len(record.losses)} steps, loss {record.losses[0]:.4f} to {record.losses[-1]:.4f}"]
    if one is not None and one.losses:
        far = cases.distance(record, one)
        parts += [f"off by {far.first_loss:.1e} at first, {far.loss:.1e} at most, norms {far.norm:.1e}"]
    if record.gradient_error is not None:
        parts += [f"gradients {record.gradient_error:.1e}"]
    if record.tokens_per_second and record.peak_memory_bytes is not None:
        parts += [f"{record.tokens_per_second:,.0f} tokens/s, {record.peak_memory_bytes / 2**30:.2f} GiB"]
    return ", ".join(parts)


def compare_small(session: Session) -> None:
    compare_layouts(session, small_config, run_small)


def compare_shapes(session: Session) -> None:
    compare_layouts(session, shape_config, run_shape)


def move_checkpoint(session: Session) -> None:
    """A whole run under TP2; and one that is saved in the middle and goes on under PP2."""
    book, steps, method = session.book, 8, LONG[1]
    if book.done:
        return

    def go(name: str, layout: str, stop_after: int = steps) -> None:
        given = {"name": name, "training.steps": steps, "training.stop_after": stop_after, "checkpoint.keep": 1}
        train(shape_config(session, layout, method, **given))
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()

    def journal(name: str) -> Record:
        metrics = load_metrics(RunFiles(session.runs / name).journal)
        losses, norms = ([value for _, value in metrics[key]] for key in ("train/loss", "train/grad_norm"))
        return Record(losses=losses, norms=norms)

    session.watch()
    with session.world.together():
        began = time.monotonic()
        with book.run(MOVED, method) as take:
            go("whole", "tp2_sp")
            go("moved", "tp2_sp", stop_after=steps // 2)
            go("moved", "pp2")
            if RANK == 0:
                book.write(ONE, method, journal("whole"))
                take(journal("moved"))
                tell(session, MOVED, method, time.monotonic() - began)


def befall_rank(session: Session) -> None:
    """Rank 1 is killed in a run, or hangs; this is the end of both processes, and the launcher's to judge."""
    from megatron_mhar.cli.main import main
    from tests.train import watch_worker

    fault, layout = cases.FAULTS[session.phase], cases.FAULTED
    if f"{layout}/{fault.name}" in session.book.done:
        return
    times = {"heartbeat_s": cases.HEARTBEAT_S, "timeout_s": cases.WAIT_S}
    folder, parallel = session.scratch / session.phase, PARALLEL[layout] | times
    session.watch()
    with session.world.together(), session.book.run(layout, fault.name):
        if RANK == 0:
            watch_worker.write_config(folder, session.corpus(SMALL_VOCAB), parallel, model={"layers": "local"})
        # Not by NCCL's barrier: before anything else it takes the device of the process's first group's rank, and there
        # both ranks were alone.
        session.world.meet()
        if RANK == 1:
            watch_worker.put_in(fault.fault, folder)
        main(["train", str(folder / "config.yaml")])


RUN_PHASE = {"fp32": compare_small, "checkpoint": move_checkpoint, **dict.fromkeys(cases.FAULTS, befall_rank)}


def main() -> None:
    told = json.loads(sys.argv[1])
    options, count = Options(**told["options"]), torch.cuda.device_count()
    if count < 2 and not options.tiny:
        say(f"This machine has {count} GPUs, and two are needed; --tiny tries the script on a CPU.")
        os._exit(cases.UNFIT)
    session = Session(options, Path(told["scratch"]), told["done"])
    session.watch()
    session.write_corpora()
    for phase in session.options.phases:
        session.open(phase)
        RUN_PHASE.get(phase, compare_shapes)(session)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a rank that waits for the other one would not end
    os._exit(0)  # everything is written; threads of groups that were left may still wait
