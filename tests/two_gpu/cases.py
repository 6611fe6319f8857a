"""What is run on two GPUs and what is asked of it. No torch: the launcher reads this, and starts the ranks at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

METHODS = ("baseline", "mhar", "mhar_block", "delta_block")
COMPARED = ("tp2_sp", "pp2", "pp2_vpp2", "dp2_overlap")  # as tests/train/layout_worker.py has them
GRAPHED = ("tp2_sp", "dp2")  # those whose messages a CUDA graph can hold
LAYOUTS = tuple(dict.fromkeys(COMPARED + GRAPHED))
PIPELINES = ("pp2", "pp2_vpp2")
ONE = "one"  # one GPU, with which all layouts are compared
MOVED = "tp2_sp_then_pp2"  # saved under the one, gone on under the other
LONG = "350m", "mhar"  # phase and method that makes Options.long_steps steps under every layout
SMALL_STEPS = 20  # of the fp32 phase, whose learning-rate schedule is made for them
UNFIT = 2  # exit code of a rank on a machine that cannot run it
HEARTBEAT_S = 10
WAIT_S = 15  # parallel.timeout_s of the run in which a rank hangs


@dataclass(frozen=True)
class Tolerance:
    """Largest distance from the run on one GPU.

    Attributes:
        first_loss: of the first step's loss: one forward of the same weights.
        loss: of any other step's.
        norm: of a step's gradient norm, relative.
        gradient: of each parameter, relative to its largest entry; None if they are not compared.
    """

    first_loss: float
    loss: float
    norm: float
    gradient: float | None = None


# A sum is cut in two and added again: rounding of fp32.
FP32 = Tolerance(1e-5, 1e-5, 1e-5, 1e-5)
# Pipelines and data parallelism keep the first forward as it is; tensor parallelism rounds each half of a sum to 8
# bits. With 12 layers of width 512 on CPU ranks that moved the first loss by 3e-4, those of 20 steps (8.4 to 6.6) by
# 3e-3 and their norms by 7e-3. Here are up to 36 layers, and other kernels for other shapes; a wrong or missing source,
# message or gradient moves all three by far more, or fails in fp32.
BF16 = Tolerance(2e-3, 2e-2, 3e-2)
# Each half of a tensor, and each micro-batch, has a scale of its own: products are rounded anew to 3 bits.
FP8 = Tolerance(2e-2, 1e-1, 1e-1)


@dataclass(frozen=True)
class Phase:
    """A part of the whole, by itself worth a start of two processes.

    Attributes:
        about: what it is, for people.
        limit_s: seconds that it may take; what has not begun by then is left out, and said to be.
        tolerance: see there.
        recipe: folder in configs/ that the model is from; None for a small one of its own.
        overrides: further keys of the config.
        sequences: of 1,024 tokens or so in a step, over all ranks. With 32 a step at 1B is bound by the devices and not
            by launches, so that its speeds tell of both.
        micro_batches: a step in which pipelines cut its sequences; a rank of other layouts has one. Four fill both
            schedules, and cost the most.
        needs_gpu: whether a CPU cannot run it.
        methods: those of METHODS that it runs.
        layouts: those of LAYOUTS that it runs them under.
    """

    about: str
    limit_s: int
    tolerance: Tolerance
    recipe: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    sequences: int = 8
    micro_batches: int = 2
    needs_gpu: bool = False
    methods: tuple[str, ...] = METHODS
    layouts: tuple[str, ...] = COMPARED


@dataclass(frozen=True)
class Fault:
    """What befalls rank 1 of a run, which is the end of both processes; its files lie in a folder named as the phase.

    Attributes:
        name: of its record.
        fault: as tests/train/watch_worker.py has it.
        said: pattern of what the run's log must say of rank 1.
        code: exit code of rank 1.
        within_s: seconds that rank 0 may take from the fault to its end.
    """

    name: str
    fault: str
    said: str
    code: int
    within_s: float


FAULTED = "pp2"  # the layout of those runs
FAULTS = {
    # Its process is seen to be gone before its silence tells.
    "kill": Fault("rank 1 killed", "kill", "has died", -9, HEARTBEAT_S),
    "hang": Fault(
        "rank 1 hangs", "hang in a step", r"hangs: rank 0 has waited \d+ s for it", 1, WAIT_S + 2 * HEARTBEAT_S
    ),
}

IN_FP8 = {"training.precision": "fp8", "training.fp8.recipe": "tensorwise"}  # a scale of each tensor

PHASES = {
    "fp32": Phase("four layers of width 64, fp32, local layers", 150, FP32),
    "checkpoint": Phase("100M shape, bf16: saved under TP2, gone on with under PP2", 120, BF16, "100m"),
    "350m": Phase("350M shape, bf16", 320, BF16, "350m", micro_batches=4),
    "1b": Phase("1B shape, bf16", 420, BF16, "1b", sequences=32),
    "fp8_350m": Phase("350M shape, FP8", 240, FP8, "350m", IN_FP8, micro_batches=4, needs_gpu=True),
    "fp8": Phase("1B shape, FP8", 400, FP8, "1b", IN_FP8, sequences=32, needs_gpu=True),
    "graph": Phase(
        "350M shape, bf16, forward and backward of a step as one CUDA graph",
        150,
        BF16,
        "350m",
        {"training.cuda_graph": "full_iteration"},
        needs_gpu=True,
        methods=("mhar", "delta_block"),
        layouts=GRAPHED,
    ),
    "kill": Phase("a rank is killed", 90, FP32),
    "hang": Phase("a rank hangs", 120, FP32),
}

# A model that a CPU trains: whole blocks of every recipe over four stages.
TINY = {
    "model.num_layers": 12,
    "model.hidden_size": 64,
    "model.num_attention_heads": 4,
    "model.num_query_groups": 2,
    "model.ffn_hidden_size": 96,
    "model.vocab_size": 128,
    "training.sequence_length": 32,
}


@dataclass(frozen=True)
class Options:
    """What is asked for on the command line, see tests/two_gpu/run.py."""

    out: str
    phases: tuple[str, ...] = tuple(PHASES)
    layouts: tuple[str, ...] = LAYOUTS
    methods: tuple[str, ...] = METHODS
    steps: int = 20
    long_steps: int = 100
    tiny: bool = False


def expected(options: Options, phase: str) -> list[str]:
    """Names (layout/method) of the records that a phase must have."""
    if phase in FAULTS:
        return [f"{FAULTED}/{FAULTS[phase].name}"]
    if phase == "checkpoint":
        return [f"{MOVED}/{LONG[1]}"]
    return [f"{layout}/{method}" for layout in layouts(options, phase) for method in methods(options, phase)]


def methods(options: Options, phase: str) -> tuple[str, ...]:
    """Those of the phase that are asked for."""
    return tuple(method for method in PHASES[phase].methods if method in options.methods)


def layouts(options: Options, phase: str) -> tuple[str, ...]:
    """Those of the phase that are asked for."""
    return tuple(layout for layout in PHASES[phase].layouts if layout in options.layouts)


@dataclass
class Record:
    """What came of one method under one layout, over all ranks.

    Attributes:
        losses: of each step.
        norms: gradient norm of each step.
        seconds: of each step.
        micro_batches: of a rank in a step.
        tokens: of a step over all ranks.
        peak_memory_bytes: of the fullest rank, without what it held before.
        sent: messages and bytes that each rank sent to other pipeline ranks, over all steps.
        predicted: the same, as the plan says.
        gradient_error: see Tolerance.
        note: what else is to be told.
        made: when, and of which commit: a phase's file may be filled in parts.
        failed: why there is no result; empty if there is one.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    micro_batches: int = 1
    tokens: int = 0
    peak_memory_bytes: int | None = None
    sent: list[list[int]] = field(default_factory=list)
    predicted: list[list[int]] = field(default_factory=list)
    gradient_error: float | None = None
    note: str = ""
    made: str = ""
    failed: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks, by the median step of the second half: the first ones compile."""
        late = sorted(self.seconds[len(self.seconds) // 2 :])
        return self.tokens / late[len(late) // 2] if late else None


@dataclass(frozen=True)
class Distance:
    """How far a run is from the one on one GPU, in the terms of Tolerance."""

    first_loss: float
    loss: float
    norm: float


def distance(record: Record, one: Record) -> Distance:
    """Of all steps that both runs made."""
    losses = [abs(a - b) for a, b in zip(record.losses, one.losses, strict=False)]
    norms = [abs(a - b) / b for a, b in zip(record.norms, one.norms, strict=False)]
    return Distance(losses[0], max(losses), max(norms))


def faults(record: Record, one: Record | None, tolerance: Tolerance, *, pipelined: bool) -> list[str]:
    """What is wrong with a run; nothing if it is as it should be.

    Args:
        one: the run of the same method on one GPU.
        pipelined: whether the layout has a link over which something must have been sent.
    """
    if record.failed:
        return [record.failed]
    if one is None or one.failed or not one.losses:
        return ["there is no run on one GPU to compare it with"]
    if not all(map(math.isfinite, record.losses + record.norms)):
        return ["losses or gradient norms are not finite"]
    if len(record.losses) < len(one.losses):
        return [f"{len(record.losses)} steps made, but {len(one.losses)} on one GPU"]
    found, far = [], distance(record, one)
    for what in ("first_loss", "loss", "norm"):
        off, allowed = getattr(far, what), getattr(tolerance, what)
        if not off <= allowed:
            found.append(f"{what.replace('_', ' ')} off by {off:.2g}, allowed {allowed:g}")
    moved = max(one.losses) - min(one.losses)
    if moved < 5 * tolerance.loss:
        found.append(f"the losses move by {moved:.2g} only: too little to tell a difference of {tolerance.loss:g}")
    if tolerance.gradient is not None and not (record.gradient_error or 0.0) <= tolerance.gradient:
        found.append(f"a gradient is off by {record.gradient_error:.2g}, allowed {tolerance.gradient:g}")
    if record.sent != record.predicted:
        found.append(f"sent (messages, bytes) {record.sent}, but the plan says {record.predicted}")
    if pipelined and not sum(messages for messages, _ in record.sent):
        found.append("nothing was sent between stages")
    return found
