"""Which parts of a depth history cross which link of a pipeline, for every method and layout.

Stages are numbered 0, 1, ... over the whole model; stage v runs on pipeline rank v mod P (with virtual stages a rank
has several). What the stages from v on need of those before it (``DepthTable.state_after``) reaches stage v's rank in
two ways:

    received(v)    over the link from stage v-1's rank: what was made in the last P-1 stages before v
    handed(v)      on the rank itself, from its own stage v-P: everything older, which it had then

So with the cache a source made in stage u takes the hops into u+1 ... u+P-1 and is then on every rank: it crosses each
link at most once, whatever the number of virtual stages. Without the cache everything takes every hop. Gradients take
the same hops backwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_mhar.depth.sites import EMBEDDING, DepthTable, Source


@dataclass(frozen=True)
class PipelinePlan:
    """Stages of a model over the ranks of a pipeline, and what crosses between them.

    Args:
        table: the model's sources.
        stages: sublayers of each stage, in order; the first and the last may have none (embedding and loss on stages of
            their own).
        num_ranks: P; the number of stages is a multiple of it.
        cached: whether a rank keeps what it had for its later stages.

    Raises:
        ValueError: stages, sublayers and ranks do not fit.
    """

    table: DepthTable
    stages: tuple[int, ...]
    num_ranks: int
    cached: bool = True

    def __post_init__(self) -> None:
        if not self.stages or len(self.stages) % self.num_ranks:
            raise ValueError(f"{len(self.stages)} stages given, but they must be a multiple of {self.num_ranks} ranks")
        if sum(self.stages) != self.table.num_sublayers:
            raise ValueError(
                f"stages of {', '.join(map(str, self.stages))} sublayers given, but the model has "
                f"{self.table.num_sublayers}"
            )
        if min(self.stages[1:-1], default=1) < 1:
            raise ValueError(
                f"stages of {', '.join(map(str, self.stages))} sublayers given, but only the first and the last "
                "stage may have none"
            )

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.stages)

    @property
    def num_chunks(self) -> int:
        """Stages of one rank (virtual stages)."""
        return self.num_stages // self.num_ranks

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First sublayer of each stage, and the number of sublayers as the end of the last."""
        return tuple(sum(self.stages[:stage]) for stage in range(self.num_stages + 1))

    def made_in(self, source: Source) -> int:
        """Stage in which ``source`` comes to be: the embedding in stage 0, all else at a sublayer.

        The released form's first entry is the embedding; it bears that name from the first sublayer on.
        """
        return 0 if source == EMBEDDING else bisect_right(self.starts, max(self.table.made_by(source), 0)) - 1

    def needed(self, stage: int) -> tuple[Source, ...]:
        """All that ``stage`` and the later ones need of the earlier ones."""
        return self.table.state_after(self.starts[stage] - 1) if stage > 0 else ()

    def received(self, stage: int) -> tuple[Source, ...]:
        """What crosses the link into ``stage`` for one micro-batch."""
        oldest = stage - self.num_ranks + 1 if self.cached else 0
        return tuple(source for source in self.needed(stage) if self.made_in(source) >= oldest)

    def handed(self, stage: int) -> tuple[Source, ...]:
        """What ``stage`` gets from the stage before it on the same rank."""
        received = set(self.received(stage))
        return tuple(source for source in self.needed(stage) if source not in received)

    def hop(self, stage: int) -> int:
        """Tensors `[s, b, d]` that cross the link into ``stage`` for one micro-batch, packed into one message."""
        return sum(map(self.table.num_tensors, self.received(stage)))

    def hops(self, rank: int) -> tuple[int, ...]:
        """Stages into which ``rank`` sends: its own ones' successors."""
        return tuple(range(rank + 1, self.num_stages, self.num_ranks))

    def link_tensors(self, rank: int) -> int:
        """Tensors `[s, b, d]` a micro-batch over the link from ``rank`` to the next, forward; backward is the same."""
        return sum(map(self.hop, self.hops(rank)))

    def link_messages(self, rank: int) -> int:
        """Messages a micro-batch over the link from ``rank`` to the next, forward; backward is the same."""
        return len(self.hops(rank))


def even_stages(num_sublayers: int, num_stages: int, unit: int = 1) -> tuple[int, ...]:
    """Sublayers of each stage, as even as ``unit`` allows; earlier stages take what is over.

    Args:
        unit: sublayers that stay together, 2 for whole transformer layers; not if there are too few for that.
    """
    if num_sublayers < num_stages * unit:
        unit = 1
    units, rest = divmod(num_sublayers, unit)
    each, over = divmod(units, num_stages)
    sizes = [unit * (each + (stage < over)) for stage in range(num_stages)]
    sizes[-1] += rest
    return tuple(sizes)


def check_microbatches(num_microbatches: int, ranks: int, group: int) -> None:
    """Refuse what the interleaved schedule cannot run.

    Args:
        ranks: of the pipeline.
        group: micro-batches that a rank runs of one virtual stage before it turns to the next.

    Raises:
        ValueError: says which numbers can be run.
    """
    rest = num_microbatches % group
    if not ranks <= group <= num_microbatches or 0 < rest < ranks:
        raise ValueError(
            f"{num_microbatches} micro-batches in groups of {group} given, but with virtual stages on {ranks} pipeline "
            f"ranks a group must be between {ranks} and the number of micro-batches, and the last group must not be "
            f"smaller than {ranks}"
        )


def recomputed_runs(first: int, stop: int, method: str | None, count: int | None) -> Iterator[tuple[int, int, bool]]:
    """Runs of a stage's sublayers ``first`` to ``stop - 1``, and whether the backward repeats them.

    Args:
        method: megatron-core's cut of full recomputation: "uniform", all of them in runs of ``count``; "block", the
            first ``count`` of the stage one by one; None for no full recomputation.
        count: see ``method``.

    Yields:
        First sublayer of a run, the one after its last, and whether it is repeated.
    """
    size, end = 1, first
    if method is not None:
        assert count is not None
        size, end = (count, stop) if method == "uniform" else (1, min(stop, first + count))
    while first < end:
        yield first, min(first + size, end), True
        first = min(first + size, end)
    if first < stop:
        yield first, stop, False
