"""``mhar bench step``: training steps of the real trainer on random tokens, methods beside each other in one run."""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_mhar import platform
from megatron_mhar.bench.machine import Machine, describe_machine
from megatron_mhar.bench.reads import Case, WrongResult, check_case, fused, plain
from megatron_mhar.bench.timing import Timing, free
from megatron_mhar.config.load import load_config
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.depth.sites import DepthTable
from megatron_mhar.errors import UserError
from megatron_mhar.model.build import check_layers, norms_at_sites, resolve_layers
from megatron_mhar.routing import resolve_backend
from megatron_mhar.train.distributed import (
    check_layout,
    initialize,
    mean_of_last_stage,
    on_first_rank,
    rank,
    shut_down,
    world_size,
)
from megatron_mhar.train.loop import Trainer
from megatron_mhar.train.progress import ProgressLog
from megatron_mhar.train.run_folder import RunFolder

VERSION = 1  # of the JSON
WARM_UP = 6  # steps: kernels are compiled, memory is found, graphs are captured
BATCHES = 2  # global batches on the device, read in turns


@dataclass(frozen=True)
class Variant:
    """A config as it is measured, and the overrides by which it differs from its file."""

    label: str
    path: Path
    overrides: tuple[str, ...]
    config: RunConfig


@dataclass(frozen=True)
class StepResult:
    """One config.

    Attributes:
        tokens_per_second: of all ranks together, by the median step.
        step: times of the steps of all rounds.
        rounds_ms: median step of each round: drift shows here.
        peak_bytes: of the fullest rank; None on a CPU.
        losses: of the first steps.
        over_first, memory_over_first: tokens/s and peak memory, relative to the first result of the same micro-batch.
        failed: why no speed is told.
    """

    label: str
    method: str
    num_heads: int
    precision: str
    micro_batch_size: int
    sequence_length: int
    micro_batches: int
    ranks: int
    layers: str
    routing_backend: str
    overrides: tuple[str, ...]
    routing_errors: dict[str, float]
    losses: tuple[float, ...] = ()
    step: Timing | None = None
    rounds_ms: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    over_first: float | None = None
    memory_over_first: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class StepReport:
    """The JSON of ``mhar bench step``."""

    version: int
    kind: str
    machine: Machine
    results: tuple[StepResult, ...]

    @property
    def failed(self) -> bool:
        """Whether any config failed."""
        return any(result.failed for result in self.results)


def variants(
    paths: Sequence[Path],
    overrides: Sequence[str],
    *,
    methods: Sequence[str] = (),
    precisions: Sequence[str] = (),
    micro_batches: Sequence[int] = (),
    steps: int,
    ranks: int = 1,
) -> list[list[Variant]]:
    """Configs to measure: a list for each micro-batch size, in which the first one is what the others relate to.

    Args:
        paths: config files.
        overrides: of all of them.
        methods: names of files beside the one of ``paths``, which are measured in place of it.
        precisions: values of training.precision.
        micro_batches: values of training.micro_batch_size; a step is then one micro-batch a data-parallel rank, unless
            an override gives the global batch.
        steps: that a model will do in all.
        ranks: processes.

    Raises:
        UserError: a file is missing, or a config is refused.
    """
    if methods:
        if len(paths) != 1:
            raise UserError(f"--methods: names files beside one CONFIG, but {len(paths)} configs are given")
        paths = [paths[0].with_name(f"{method}.yaml") for method in methods]
    # A learning rate that has only begun to rise: random tokens are nothing to learn from.
    settings = [
        f"training.steps={steps}", f"optimizer.warmup_steps={steps - 1}", "optimizer.schedule=cosine",
        "optimizer.decay_steps=null", "optimizer.wsd_decay_steps=null", "training.stop_after=null", "data.valid=[]",
        "training.skip.spike_factor=null",
        "data.train_weights=null", "data.num_workers=0", "tracking.enabled=false",
    ]  # fmt: skip
    groups = []
    for size in micro_batches or (None,):
        group = []
        for path, precision in itertools.product(paths, precisions or (None,)):
            own = [f"training.precision={precision}"] * (precision is not None)
            if size is not None:
                own.append(f"training.micro_batch_size={size}")
                parallel = load_config(path, overrides).parallel
                data = ranks // (parallel.tensor * parallel.pipeline * parallel.context) or 1
                own.append(f"training.global_batch_size={size * data}")
            given = (*own, *overrides)
            label = path.stem if precision is None else f"{path.stem} {precision}"
            group.append(Variant(label, path, given, load_config(path, (*given, *settings))))
        groups.append(group)
    return groups


def bench_step(
    paths: Sequence[Path],
    overrides: Sequence[str],
    *,
    methods: Sequence[str] = (),
    precisions: Sequence[str] = (),
    micro_batches: Sequence[int] = (),
    steps: int,
    rounds: int,
    tell: Callable[[Machine | Sequence[StepResult]], None],
) -> StepReport | None:
    """Measure configs in turns; called by every rank.

    In each of ``rounds`` rounds every config's model is built, warmed up, timed over ``steps`` steps and let go again:
    memory is each one's own, and drift of the machine meets all.

    Args:
        tell: called on rank 0 with the machine at first, and with the results of each micro-batch size.

    Returns:
        The report on rank 0, None on others.

    Raises:
        UserError: see :func:`variants`; a config cannot run here.
    """
    groups = variants(
        paths, overrides, methods=methods, precisions=precisions, micro_batches=micro_batches,
        steps=WARM_UP + steps, ranks=world_size(),
    )  # fmt: skip
    everyone = [variant for group in groups for variant in group]
    for variant in everyone:
        check_layout(variant.config, world_size())
        check_layers(variant.config)
    alone = not torch.distributed.is_initialized()
    device = initialize(everyone[0].config)
    try:
        first = rank() == 0
        machine = describe_machine()
        if first:
            tell(machine)
        results: list[StepResult] = []
        for group in groups:
            found = _relate([_measure(turns, steps) for turns in _in_turns(group, device, steps, rounds)])
            if first:
                tell(found)
            results += found
        return StepReport(VERSION, "step", machine, tuple(results)) if first else None
    finally:
        if alone:
            shut_down()


@dataclass
class _Turns:
    """What the rounds of one variant have found so far."""

    variant: Variant
    routing_errors: dict[str, float]
    losses: tuple[float, ...] = ()
    rounds: tuple[list[float], ...] = ()  # milliseconds of the steps of each
    peak: int = 0
    micro_batches: int = 0
    failed: str | None = None


def _in_turns(group: Sequence[Variant], device: torch.device, steps: int, rounds: int) -> list[_Turns]:
    found = []
    for variant in group:
        turns = _Turns(variant, {})
        with _failure(turns):
            turns.routing_errors = _check_routing(variant.config, device)
        found.append(turns)
    for _ in range(rounds):
        for turns in found:
            if turns.failed is None:
                with _failure(turns):
                    _one_round(turns, device, steps)
                free()
    return found


@contextmanager
def _failure(turns: _Turns) -> Iterator[None]:
    """Within the context an error is the variant's end and not the run's; of several ranks it ends all."""
    try:
        yield
    except (RuntimeError, ValueError, WrongResult) as error:
        if world_size() > 1:
            raise
        turns.failed = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def routing_case(config: RunConfig) -> Case | None:
    """The reads of one micro-batch as a rank has them, of the whole model's sites; None without sites."""
    table = DepthTable(config.residual, len(config.model.layer_pattern))
    if not table.num_sites:
        return None
    parallel, training = config.parallel, config.training
    pieces = parallel.context * (parallel.tensor if parallel.sequence else 1)
    dtype = torch.float32 if training.precision == "fp32" else torch.bfloat16
    tokens = training.micro_batch_size * training.sequence_length // pieces
    return Case(table, config.model.hidden_size, tokens, dtype, normed=norms_at_sites(config))


def _check_routing(config: RunConfig, device: torch.device) -> dict[str, float]:
    """Errors of the run's routing at its own shape, the whole model's sites on one rank; see :mod:`bench.reads`."""
    case = routing_case(config)
    backend = resolve_backend(config.residual.backend, device)
    if case is None or backend == "reference":
        return {}
    errors = check_case(case, fused if backend == "triton" else plain, device)
    free()
    return errors


def _one_round(turns: _Turns, device: torch.device, steps: int) -> None:
    """Build, warm up, time and let go."""
    config = turns.variant.config
    if platform.HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    with ProgressLog(None, total=1, start=0) as progress, ExitStack() as stack:
        with random_corpus(config) as ready:
            trainer = Trainer(ready, RunFolder(ready), device, progress, None)
            stack.callback(trainer.release)
            count = BATCHES * config.training.global_batch_size
            batches: Iterator[Any] = itertools.cycle(list(trainer._batches(trainer.train_set, 0, count)))
        turns.micro_batches = trainer.micro_batches
        losses, times = [], []
        for number in range(WARM_UP + steps):
            _barrier()
            start = time.perf_counter()
            loss, norm = trainer.train_step(batches)
            platform.synchronize()
            milliseconds = 1e3 * (time.perf_counter() - start)
            if number < WARM_UP:
                losses.append(float(mean_of_last_stage(None if loss is None else loss.reshape(1).clone(), 1)))
                if not (math.isfinite(losses[-1]) and math.isfinite(norm)):
                    raise WrongResult(f"step {number + 1}: loss {losses[-1]}, gradient norm {norm}")
            else:
                times.append(milliseconds)
        if trainer.skips.total:  # a step without its update is no step
            raise WrongResult(f"{trainer.skips.total} steps were skipped: {trainer.skips.why}")
    turns.losses = turns.losses or tuple(losses)
    turns.rounds += (times,)
    turns.peak = max(turns.peak, platform.peak_memory_bytes())


def _barrier() -> None:
    platform.synchronize()
    if torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()


@contextmanager
def random_corpus(config: RunConfig) -> Iterator[RunConfig]:
    """The config with a corpus of random tokens, in a folder in output_dir that is there within the context.

    All ranks read it: output_dir must be one folder for them, as it must be for a run.
    """

    def make() -> str:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="bench-", dir=config.output_dir)
        random = np.random.default_rng(0)
        vocabulary = config.model.vocab_size
        kind = np.uint16 if vocabulary < 2**16 else np.int32
        builder: Any = IndexedDatasetBuilder(f"{folder}/tokens.bin", dtype=kind)
        length = config.training.sequence_length + 1
        for _ in range(BATCHES * config.training.global_batch_size):
            builder.add_item(torch.from_numpy(random.integers(0, vocabulary, length)))
            builder.end_document()
        builder.finalize(f"{folder}/tokens.idx")
        return folder

    folder = on_first_rank(make)
    try:
        data = config.data.model_copy(update={"train": (f"{folder}/tokens",)})
        yield config.model_copy(update={"data": data, "output_dir": Path(folder)})
    finally:
        _barrier()
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _measure(turns: _Turns, steps: int) -> StepResult:
    """Result of all rounds; called by every rank."""
    config, training = turns.variant.config, turns.variant.config.training
    times = [milliseconds for one in turns.rounds for milliseconds in one]
    peak = torch.tensor([turns.peak], dtype=torch.float64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    step = Timing.of(times) if times and turns.failed is None else None
    tokens = training.global_batch_size * training.sequence_length
    return StepResult(
        label=turns.variant.label,
        method=config.residual.method,
        num_heads=config.residual.num_heads,
        precision=training.precision,
        micro_batch_size=training.micro_batch_size,
        sequence_length=training.sequence_length,
        micro_batches=turns.micro_batches,
        ranks=torch.distributed.get_world_size(),
        layers=resolve_layers(config.model.layers),
        routing_backend=resolve_backend(config.residual.backend, torch.device("cuda" if platform.HAS_GPU else "cpu")),
        overrides=turns.variant.overrides,
        routing_errors=turns.routing_errors,
        losses=turns.losses,
        step=step,
        rounds_ms=tuple(Timing.of(one).median_ms for one in turns.rounds),
        tokens_per_second=None if step is None else 1e3 * tokens / step.median_ms,
        peak_bytes=int(peak.item()) if platform.HAS_GPU and step is not None else None,
        failed=turns.failed,
    )


def _relate(results: Sequence[StepResult]) -> list[StepResult]:
    """With speed and memory relative to the first one's."""
    first = results[0]
    related = []
    for result in results:
        speed = memory = None
        if result.tokens_per_second is not None and first.tokens_per_second is not None:
            speed = result.tokens_per_second / first.tokens_per_second
        if result.peak_bytes and first.peak_bytes:
            memory = result.peak_bytes / first.peak_bytes
        related.append(StepResult(**(vars(result) | {"over_first": speed, "memory_over_first": memory})))
    return related
