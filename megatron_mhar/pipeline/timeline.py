"""What each rank of a pipeline does when: the order of megatron-core's schedules, and the length of a step.

Imports neither torch nor megatron-core, so that layouts can be planned anywhere; a test holds the order against
megatron-core's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Pass(NamedTuple):
    """The forward or the backward of one micro-batch through one stage."""

    backward: bool
    microbatch: int
    stage: int


def passes(rank: int, *, ranks: int, chunks: int, microbatches: int, group: int) -> list[Pass]:
    """What ``rank`` runs in a step, in order: 1F1B, interleaved where a rank has several stages.

    A rank runs ``group`` micro-batches of one of its stages before it turns to the next. It begins with forwards alone,
    as many as the ranks after it need to get to work (megatron-core's ``get_pp_rank_microbatches``), goes on with a
    forward and a backward in turn, and ends with backwards alone.

    Args:
        ranks: of the pipeline.
        chunks: stages of each rank (virtual stages).
        microbatches: of the step.
        group: micro-batches; not read where ``chunks`` is 1.
    """
    size = group if chunks > 1 else microbatches
    table = [
        (microbatch, chunk)
        for start in range(0, microbatches, size)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + size, microbatches))
    ]
    forward = [Pass(False, microbatch, chunk * ranks + rank) for microbatch, chunk in table]
    backward = [Pass(True, microbatch, (chunks - 1 - chunk) * ranks + rank) for microbatch, chunk in table]
    behind = ranks - 1 - rank
    alone = min(len(table), behind if chunks == 1 else 2 * behind + (chunks - 1) * group)
    in_turn = [each for pair in zip(forward[alone:], backward, strict=False) for each in pair]
    return [*forward[:alone], *in_turn, *backward[len(table) - alone :]]


def step_seconds(
    orders: Sequence[Sequence[Pass]],
    seconds: Callable[[Pass], float],
    message: Callable[[Pass], float] = lambda _: 0.0,
    *,
    overlap: bool = False,
) -> float:
    """Time from the first pass to the end of the last, each rank running its passes in order as soon as it can.

    Args:
        orders: passes of each rank, see :func:`passes`.
        seconds: how long a pass takes.
        message: how long what a pass sends on takes over its link.
        overlap: messages pass while their ranks compute, one at a time in each direction between two ranks. Without it
            a rank computes nothing while it sends or receives.

    Raises:
        ValueError: the orders wait for each other, or for a pass that none of them holds.
    """
    ranks, last = len(orders), max(each.stage for order in orders for each in order)
    free = [0.0] * ranks  # when a rank has done all that it has begun
    wire: dict[tuple[int, int], float] = {}
    came: dict[Pass, tuple[float, float]] = {}  # pass: when what it waits for is there, and how long receiving takes
    following = [0] * ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while following[rank] < len(order):
                this = order[following[rank]]
                first = this.stage == (last if this.backward else 0)
                if not first and this not in came:
                    break
                there, receiving = (0.0, 0.0) if first else came.pop(this)
                end = max(free[rank], there) + receiving + seconds(this)
                free[rank] = end
                if this.stage != (0 if this.backward else last):
                    target = this._replace(stage=this.stage + (-1 if this.backward else 1))
                    length = message(this)
                    if overlap:
                        way = (rank, target.stage % ranks)
                        wire[way] = max(end, wire.get(way, 0.0)) + length
                        came[target] = (wire[way], 0.0)
                    else:
                        free[rank] += length
                        came[target] = (end, length)
                following[rank] += 1
                moved = True
    if came or any(done < len(order) for done, order in zip(following, orders, strict=True)):
        raise ValueError("the ranks' passes wait for each other: this is no order that a schedule can run")
    return max(free)
