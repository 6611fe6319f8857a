"""Which source each site reads: tables written by hand, for every method and block size of a six-layer model.

e the embedding, n a null source, o the output of a sublayer, d the sum of a block, p the open sum up to a sublayer, x
an entry of the released form, s the stream after a sublayer.
"""

import pytest

from megatron_mhar.depth.residual import ResidualConfig
from megatron_mhar.depth.sites import DepthTable

LETTERS = {"embedding": "e", "null": "n", "output": "o", "block": "d", "open": "p", "entry": "x", "stream": "s"}


def written(sources):
    return " ".join(LETTERS[s.kind] + ("" if s.kind in ("embedding", "null") else str(s.number)) for s in sources)


def table(layers=3, **residual):
    return DepthTable(ResidualConfig(**residual), 2 * layers)


FULL = ["e", "e o0", "e o0 o1", "e o0 o1 o2", "e o0 o1 o2 o3", "e o0 o1 o2 o3 o4", "e o0 o1 o2 o3 o4 o5"]
BLOCK_1 = ["e", "e p0", "e d0", "e d0 p2", "e d0 d1", "e d0 d1 p4", "e d0 d1 d2"]
BLOCK_3 = ["e", "e p0", "e p1", "e p2", "e p3", "e p4", "e d0"]
# Two layers a block, three layers: the last block holds one.
BLOCK_2_PARTIAL = ["e", "e p0", "e p1", "e p2", "e d0", "e d0 p4", "e d0 d1"]
DELTA = ["n e", "n e o0", "n e o0 o1", "n e o0 o1 o2", "n e o0 o1 o2 o3", "n e o0 o1 o2 o3 o4"]
DELTA_BLOCK_1 = ["n e", "n e", "n e d0", "n e d0", "n e d0 d1", "n e d0 d1"]
DELTA_BLOCK_3 = ["n e"] * 6
RELEASED_1 = ["n", "n x0", "n x0", "n x0 x1", "n x0 x1", "n x0 x1 x2"]
RELEASED_3 = ["n", "n x0", "n x0", "n x0", "n x0", "n x0"]

CASES = [
    (dict(method="baseline"), []),
    (dict(method="hyper_connections"), []),
    (dict(method="attnres"), FULL),
    (dict(method="mhar", num_heads=8), FULL),
    *[
        (dict(method=method, block_layers=size, allow_partial_block=size == 2), expected)
        for method in ("attnres_block", "mhar_block")
        for size, expected in ((1, BLOCK_1), (2, BLOCK_2_PARTIAL), (3, BLOCK_3))
    ],
    (dict(method="delta", num_heads=4), DELTA),
    (dict(method="delta", null_source=False), [line.removeprefix("n ") for line in DELTA]),
    (dict(method="delta_block", block_layers=1), DELTA_BLOCK_1),
    (dict(method="delta_block", block_layers=1, null_source=False), [x.removeprefix("n ") for x in DELTA_BLOCK_1]),
    (dict(method="delta_block", block_layers=2, allow_partial_block=True), ["n e"] * 4 + ["n e d0"] * 2),
    (dict(method="delta_block", block_layers=3), DELTA_BLOCK_3),
    (dict(method="delta_block", block_layers=1, block_form="released"), RELEASED_1),
    (dict(method="delta_block", block_layers=3, block_form="released"), RELEASED_3),
]


@pytest.mark.parametrize("residual,expected", CASES)
def test_sources_of_every_site(residual, expected):
    assert [written(s) for s in table(**residual).reads] == expected


def test_eight_billion_parameter_recipe_has_nine_sources_and_a_null():
    """L = 32, B = 4: the embedding and at most seven closed blocks before the last, with the null source nine."""
    reads = table(32, method="delta_block", num_heads=8, block_layers=4).reads
    assert len(reads) == 64
    assert written(reads[-1]) == "n e d0 d1 d2 d3 d4 d5 d6"
    assert max(map(len, reads)) == 9


@pytest.mark.parametrize("residual", [case[0] for case in CASES])
def test_no_site_reads_what_is_not_there_yet(residual):
    t = table(**residual)
    for site, sources in enumerate(t.reads):
        assert all(t.made_by(s) < site for s in sources)
        assert len(set(sources)) == len(sources)


@pytest.mark.parametrize("residual", [case[0] for case in CASES])
def test_the_state_holds_what_a_later_site_reads_and_no_other_source(residual):
    t = table(**residual)
    for sublayer in range(t.num_sublayers):
        expected = {
            s for later in t.reads[sublayer + 1 :] for s in later if s.kind != "null" and t.made_by(s) <= sublayer
        }
        state = t.state_after(sublayer)
        assert {s for s in state if s in t.last_read} == expected
        assert all(s.kind in ("open", "stream") and s.number == sublayer for s in set(state) - expected)


STATES = [
    (dict(method="baseline"), ["e", "s0", "s1", "s2", "s3", "s4", "s5"]),
    (dict(method="hyper_connections"), ["e", "s0", "s1", "s2", "s3", "s4", "s5"]),
    (dict(method="mhar"), ["e", "e o0", "e o0 o1", "e o0 o1 o2", "e o0 o1 o2 o3", FULL[5], FULL[6]]),
    (
        dict(method="mhar_block", block_layers=1),
        ["e", "e p0", "e d0", "e d0 p2", "e d0 d1", "e d0 d1 p4", "e d0 d1 d2"],
    ),
    (dict(method="delta"), ["e", "e o0 s0", "e o0 o1 s1", "e o0 o1 o2 s2", "e o0 o1 o2 o3 s3", FULL[5] + " s4", "s5"]),
    # The open sum is read by no site, and becomes d at the block's end; the last block's is read by none.
    (
        dict(method="delta_block", block_layers=1),
        ["e", "e p0 s0", "e d0 s1", "e d0 p2 s2", "e d0 d1 s3", "e d0 d1 p4 s4", "s5"],
    ),
    (
        dict(method="delta_block", block_layers=1, block_form="released"),
        ["e", "x0 s0", "x0 x1 s1", "x0 x1 s2", "x0 x1 x2 s3", "x0 x1 x2 s4", "s5"],
    ),
]


@pytest.mark.parametrize("residual,expected", STATES)
def test_state_between_sublayers_by_hand(residual, expected):
    t = table(**residual)
    assert [written(t.state_after(sublayer)) for sublayer in range(-1, 6)] == expected


@pytest.mark.parametrize("residual", [case[0] for case in CASES])
def test_sublayers_use_of_the_state_what_they_read(residual):
    t = table(**residual)
    for first in range(t.num_sublayers):
        for stop in range(first + 1, t.num_sublayers + 1):
            used, state = t.used_by(first, stop), t.state_after(first - 1)
            assert set(used) <= set(state)
            read = {s for site in t.reads[first:stop] for s in site if s.kind != "null" and t.made_by(s) < first}
            assert read - set(used) <= ({s for s in read if first == 0}), (first, stop)


def test_hyper_connections_streams_are_several_tensors():
    assert [table(method="hyper_connections", num_streams=3).num_tensors(s) for s in (
        table(method="hyper_connections").state_after(-1) + table(method="hyper_connections").state_after(2)
    )] == [1, 3]  # fmt: skip
