"""What crosses which link: small pipelines worked out by hand, and rules that hold for every method and layout."""

import pytest

from megatron_mhar.depth.residual import ResidualConfig
from megatron_mhar.depth.sites import EMBEDDING, DepthTable
from megatron_mhar.pipeline.plan import PipelinePlan, check_microbatches, even_stages
from tests.conftest import METHODS
from tests.depth.test_sites import written


def plan(residual, stages, ranks, cached=True):
    return PipelinePlan(DepthTable(ResidualConfig(**residual), sum(stages)), stages, ranks, cached)


def received(p):
    return [written(p.received(stage)) for stage in range(p.num_stages)]


def handed(p):
    return [written(p.handed(stage)) for stage in range(p.num_stages)]


MHAR = {"method": "mhar", "num_heads": 4}


def test_full_routing_over_two_ranks_by_hand():
    """Each hop carries what the rank has not seen: all of the stage before, and of its own what is new since."""
    p = plan(MHAR, (2, 2, 2, 2), 2)
    assert received(p) == ["", "e o0 o1", "o2 o3", "o4 o5"]
    assert handed(p) == ["", "", "e o0 o1", "e o0 o1 o2 o3"]
    # From rank 0 into stages 1 and 3, from rank 1 into stage 2.
    assert [p.link_tensors(rank) for rank in range(2)] == [5, 2]
    assert [p.link_messages(rank) for rank in range(2)] == [2, 1]


def test_without_the_cache_everything_takes_every_hop():
    p = plan(MHAR, (2, 2, 2, 2), 2, cached=False)
    assert received(p) == ["", "e o0 o1", "e o0 o1 o2 o3", "e o0 o1 o2 o3 o4 o5"]
    assert handed(p) == ["", "", "", ""]
    assert [p.link_tensors(rank) for rank in range(2)] == [10, 5]


def test_three_ranks_by_hand():
    p = plan(MHAR, (1,) * 6, 3)
    assert received(p) == ["", "e o0", "e o0 o1", "o1 o2", "o2 o3", "o3 o4"]
    assert handed(p) == ["", "", "", "e o0", "e o0 o1", "e o0 o1 o2"]


def test_a_block_that_straddles_a_boundary_takes_its_open_sum_along():
    block = {"method": "mhar_block", "block_layers": 1}
    assert received(plan(block, (3, 3), 2)) == ["", "e d0 p2"]
    assert received(plan({"method": "delta_block", "block_layers": 1}, (3, 3), 2)) == ["", "e d0 p2 s2"]
    # Without virtual stages nothing is handed over, and the last stage still needs the embedding.
    assert received(plan(block, (2, 2, 2), 3)) == ["", "e d0", "e d0 d1"]


def test_embedding_and_loss_on_stages_of_their_own():
    p = plan(MHAR, (0, 3, 3, 0), 2)
    assert received(p) == ["", "e", "o0 o1 o2", "o3 o4 o5"]
    assert handed(p) == ["", "", "e", "e o0 o1 o2"]
    assert received(plan({"method": "delta"}, (0, 2, 0), 3)) == ["", "e", "s1"]


def test_streams_of_hyper_connections_count_as_many():
    p = plan({"method": "hyper_connections", "num_streams": 3}, (0, 2, 2, 0), 4)
    assert [p.hop(stage) for stage in range(4)] == [0, 1, 3, 3]


def test_baseline_sends_its_stream():
    assert received(plan({"method": "baseline"}, (2, 2, 2), 3)) == ["", "s1", "s3"]


GRID = [
    (stages, ranks)
    for ranks in (1, 2, 3, 4)
    for chunks in (1, 2, 3)
    for stages in {even_stages(12, ranks * chunks), (0, *even_stages(12, max(1, ranks * chunks - 1)))}
    if len(stages) == ranks * chunks and min(stages[1:-1], default=1) > 0
]


@pytest.mark.parametrize("stages,ranks", GRID)
def test_every_stage_gets_all_it_needs_and_no_link_carries_a_source_twice(stages, ranks):
    for residual in METHODS.values():
        partial = {"allow_partial_block": True} if "block_layers" in residual else {}
        check_plan(plan(residual | partial, stages, ranks))


def check_plan(p):
    stages, ranks = p.stages, p.num_ranks
    had: list[set] = [set() for _ in range(ranks)]
    for stage in range(p.num_stages):
        rank, got = stage % ranks, set(p.received(stage))
        assert not got & had[rank], "a rank gets what it had"
        assert got <= had[rank - 1], "a rank sends what it has"
        assert set(p.handed(stage)) <= had[rank]
        assert got | set(p.handed(stage)) == set(p.needed(stage))
        had[rank] |= got if stage else {EMBEDDING}
        # What the stage makes: all states between its sublayers.
        for sublayer in range(p.starts[stage], p.starts[stage + 1]):
            had[rank] |= set(p.table.made(sublayer, sublayer + 1))
    if p.num_chunks == 1:
        assert received(p) == received(PipelinePlan(p.table, stages, ranks, cached=False))


@pytest.mark.parametrize("method", METHODS)
def test_the_cache_never_sends_more(method):
    for ranks, chunks in ((2, 2), (2, 4), (4, 2), (4, 3)):
        stages = even_stages(24, ranks * chunks)
        cached, uncached = (plan(METHODS[method], stages, ranks, on) for on in (True, False))
        sent = [sum(p.link_tensors(rank) for rank in range(ranks)) for p in (cached, uncached)]
        assert sent[0] <= sent[1]
        if method == "mhar":
            assert sent[0] < 0.75 * sent[1]


@pytest.mark.parametrize(
    "stages,ranks,word",
    [
        ((2, 2, 2), 2, "multiple of 2"),
        ((2, 2), 1, "has 5"),
        ((2, 0, 3), 3, "only the first and the last"),
        ((), 1, "0"),
    ],
)
def test_what_does_not_fit_is_refused(stages, ranks, word):
    table = DepthTable(ResidualConfig(), 5)
    with pytest.raises(ValueError, match=word):
        PipelinePlan(table, stages, ranks)


def test_even_stages():
    assert even_stages(24, 4, 2) == (6, 6, 6, 6)
    assert even_stages(10, 4, 2) == (4, 2, 2, 2)
    assert even_stages(9, 2, 2) == (4, 5)
    assert even_stages(8, 8, 2) == (1,) * 8


def test_microbatches_of_the_interleaved_schedule():
    for count, ranks, group in ((4, 2, 2), (7, 2, 7), (6, 4, 6), (12, 4, 8)):
        check_microbatches(count, ranks, group)
    for count, ranks, group in ((1, 2, 2), (7, 2, 2), (5, 4, 4), (8, 4, 2), (3, 4, 4)):
        with pytest.raises(ValueError, match=f"{count} micro-batches in groups of {group} given"):
            check_microbatches(count, ranks, group)
