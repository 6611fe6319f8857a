"""Order of passes and length of steps, by hand and against megatron-core's own schedule tables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_mhar.pipeline.timeline import Pass, passes, step_seconds

# pipeline ranks, virtual stages, micro-batches, group
LAYOUTS = [
    (1, 1, 1, 1), (1, 1, 5, 1), (2, 1, 1, 1), (4, 1, 2, 1), (4, 1, 9, 1),
    (2, 2, 2, 2), (2, 4, 6, 2), (4, 2, 8, 4), (4, 3, 8, 4), (2, 2, 7, 7), (4, 2, 11, 7), (3, 2, 7, 4),
]  # fmt: skip


def orders(ranks, chunks, microbatches, group):
    return [passes(rank, ranks=ranks, chunks=chunks, microbatches=microbatches, group=group) for rank in range(ranks)]


def written(order):
    return " ".join(f"{'b' if each.backward else 'f'}{each.microbatch}.{each.stage}" for each in order)


def seconds(each):
    return 2.0 if each.backward else 1.0


def test_1f1b_by_hand():
    first, second = orders(2, 1, 3, 1)
    assert written(first) == "f0.0 f1.0 b0.0 f2.0 b1.0 b2.0"
    assert written(second) == "f0.1 b0.1 f1.1 b1.1 f2.1 b2.1"


def test_interleaved_by_hand():
    first, second = orders(2, 2, 2, 2)
    assert written(first) == "f0.0 f1.0 f0.2 f1.2 b0.2 b1.2 b0.0 b1.0"
    assert written(second) == "f0.1 f1.1 f0.3 b0.3 f1.3 b1.3 b0.1 b1.1"


@pytest.mark.parametrize(("ranks", "chunks", "microbatches", "group"), LAYOUTS)
def test_order_is_that_of_megatron_core(ranks, chunks, microbatches, group):
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    size = group if chunks > 1 else microbatches
    table = get_schedule_table(microbatches, chunks, size)
    for rank, order in enumerate(orders(ranks, chunks, microbatches, group)):
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        _, _, alone, rest = get_pp_rank_microbatches(microbatches, chunks, size, p2p_communicator=communicator)
        forward = [(each.microbatch, each.stage // ranks) for each in order if not each.backward]
        backward = [(each.microbatch, chunks - 1 - each.stage // ranks) for each in order if each.backward]
        assert forward == backward == table
        assert {each.stage % ranks for each in order} == {rank}
        assert [each.backward for each in order] == [False] * alone + [False, True] * rest + [True] * alone


@pytest.mark.parametrize(("ranks", "chunks", "microbatches", "group"), LAYOUTS)
def test_even_stages_have_the_textbook_bubble(ranks, chunks, microbatches, group):
    """(P - 1) / V passes of a rank, where the micro-batches fill whole groups of P."""
    length = step_seconds(orders(ranks, chunks, microbatches, group), seconds)
    ideal = 3 * (chunks * microbatches + ranks - 1)
    if chunks == 1 or (group == ranks and microbatches % ranks == 0):
        assert length == ideal
    else:
        assert length >= ideal


def test_messages_by_hand():
    both = orders(2, 1, 2, 1)
    assert step_seconds(both, seconds) == 9
    # Rank 0: f 0-1 and 1-2, rank 1: f 1.5-2.5, b -4.5, f -5.5, b -7.5, rank 0: b 5-7, b 8-10.
    assert step_seconds(both, seconds, lambda _: 0.5, overlap=True) == 10
    # Rank 0: f 0-1, send -1.5, f -2.5, send -3; rank 1: receive 1-1.5, f -2.5, b -4.5, send -5, receive -5.5, f -6.5,
    # b -8.5; rank 0: receive 4.5-5, b -7, receive 8.5-9, b -11.
    assert step_seconds(both, seconds, lambda _: 0.5) == 11


def test_messages_of_a_link_pass_one_after_the_other():
    # Forwards leave at 1 and 2 and come at 4 and 7, backwards leave at 7 and 10 and come at 10 and 13.
    assert step_seconds(orders(2, 1, 2, 1), seconds, lambda _: 3.0, overlap=True) == 15


@pytest.mark.parametrize(("ranks", "chunks", "microbatches", "group"), [each for each in LAYOUTS if each[0] > 1])
def test_overlap_never_costs(ranks, chunks, microbatches, group):
    all_orders = orders(ranks, chunks, microbatches, group)
    for length in (0.1, 1.0, 5.0):
        free = step_seconds(all_orders, seconds)
        overlapped = step_seconds(all_orders, seconds, lambda _, length=length: length, overlap=True)
        blocking = step_seconds(all_orders, seconds, lambda _, length=length: length)
        assert free < overlapped
        if (
            length < 1
        ):  # where messages are longer than passes, the wire sets the pace of one and the ranks of the other
            assert overlapped <= blocking


def test_orders_that_wait_for_each_other_are_refused():
    first, second = orders(2, 1, 1, 1)
    with pytest.raises(ValueError, match="wait for each other"):
        step_seconds([first[::-1], second], seconds)
    with pytest.raises(ValueError, match="wait for each other"):
        step_seconds([first, [*second, Pass(False, 1, 1)]], seconds)
