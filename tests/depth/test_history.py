"""The depth history gives each site the values that the definitions say, and holds nothing longer than it must."""

import pytest
import torch

from megatron_mhar.depth.history import DepthHistory
from megatron_mhar.depth.residual import ResidualConfig
from megatron_mhar.depth.sites import EMBEDDING, DepthTable

NULL = torch.full((2,), -1.0)


def powers(count):
    """Embedding 1 and outputs 2, 4, 8, ...: every sum of them is unlike every other."""
    return [torch.full((1, 1, 2), float(2**i)) for i in range(count + 1)]


def run(layers=3, **residual):
    """Values that each site reads, the streams before each sublayer, and what is left at the end."""
    table = DepthTable(ResidualConfig(**residual), 2 * layers)
    embedding, *outputs = powers(table.num_sublayers)
    history = DepthHistory(table, embedding)
    seen, streams = [], []
    for output in outputs:
        if history.stream is not None:
            streams.append(history.stream[0, 0, 0].item())
        if table.num_sites:
            seen.append([s.flatten()[0].item() for s in history.sources(NULL)])
        history.append(output)
    if table.has_final_site:
        seen.append([s.flatten()[0].item() for s in history.sources(NULL)])
    return seen, streams, history


def test_full():
    seen, streams, history = run(method="mhar")
    assert seen == [[2.0**i for i in range(n)] for n in range(1, 8)]
    assert streams == [] and history.stream is None
    assert history.held == ()  # the final site was the last to read them


def test_block():
    seen, _, history = run(method="mhar_block", block_layers=1)
    assert seen == [[1], [1, 2], [1, 6], [1, 6, 8], [1, 6, 24], [1, 6, 24, 32], [1, 6, 24, 96]]
    assert history.held == ()


def test_partial_last_block():
    seen, _, _ = run(method="attnres_block", block_layers=2, allow_partial_block=True)
    assert seen[4:] == [[1, 30], [1, 30, 32], [1, 30, 96]]


def test_delta():
    seen, streams, history = run(method="delta")
    assert seen == [[-1.0, *(2.0**i for i in range(n))] for n in range(1, 7)]
    assert streams == [1, 3, 7, 15, 31, 63]
    assert history.output().flatten()[0] == 127


def test_delta_block_of_the_paper():
    seen, streams, history = run(method="delta_block", block_layers=1)
    assert seen == [[-1, 1], [-1, 1], [-1, 1, 6], [-1, 1, 6], [-1, 1, 6, 24], [-1, 1, 6, 24]]
    assert streams == [1, 3, 7, 15, 31, 63]
    assert history.output().flatten()[0] == 127


def test_delta_block_as_released():
    """Entries are the stream less the entry before: e, d_0, e + d_1, d_0 + d_2."""
    seen, streams, _ = run(layers=4, method="delta_block", block_layers=1, block_form="released")
    e, d0, d1, d2 = 1, 2 + 4, 8 + 16, 32 + 64
    entries = [e, d0, e + d1, d0 + d2]
    assert seen == [[-1, *entries[:n]] for n in (0, 1, 1, 2, 2, 3, 3, 4)]
    assert streams[:3] == [1, 3, 7]


def test_baseline_adds_to_its_stream():
    _, streams, history = run(method="baseline")
    assert streams == [1, 3, 7, 15, 31, 63] and history.output().flatten()[0] == 127


EVERY = [
    dict(method="baseline"),
    dict(method="mhar"),
    dict(method="mhar_block", block_layers=1),
    dict(method="attnres_block", block_layers=2, allow_partial_block=True),
    dict(method="delta"),
    dict(method="delta_block", block_layers=1),
    dict(method="delta_block", block_layers=3),
    dict(method="delta_block", block_layers=1, block_form="released"),
]


@pytest.mark.parametrize("residual", EVERY)
def test_held_sources_are_those_of_the_state(residual):
    table = DepthTable(ResidualConfig(**residual), 6)
    embedding, *outputs = powers(6)
    history = DepthHistory(table, embedding)
    for sublayer, output in enumerate(outputs):
        if table.num_sites:
            history.sources(NULL)
        history.append(output)
        state = history.state()
        assert tuple(state) == table.state_after(sublayer)
        assert set(history.held) == {name for name in state if name in table.last_read}


@pytest.mark.parametrize("residual", EVERY)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_history_cut_in_pieces_reads_the_same(residual, size):
    """Each piece gets of the state what its sublayers use, and gives what it has made."""
    table = DepthTable(ResidualConfig(**residual), 6)
    embedding, *outputs = powers(6)

    def sublayers(history, first, stop):
        for output in outputs[first:stop]:
            if history.stream is not None:
                seen.append(history.stream)
            if table.num_sites:
                seen.extend(history.sources(NULL))
            history.append(output)

    seen = whole = []
    sublayers(DepthHistory(table, embedding), 0, 6)
    state, seen = {EMBEDDING: embedding}, []
    for first in range(0, 6, size):
        stop = min(first + size, 6)
        history = DepthHistory.after(table, first - 1, {name: state[name] for name in table.used_by(first, stop)})
        sublayers(history, first, stop)
        known = state | history.state(table.made(first, stop))
        state = {name: known[name] for name in table.state_after(stop - 1)}
    assert len(seen) == len(whole) and all(torch.equal(a, b) for a, b in zip(seen, whole))
    last = DepthHistory.after(table, 5, state)
    assert torch.equal(last.sources()[-1] if table.has_final_site else last.output(), expected_end(table, residual))


def expected_end(table, residual):
    _, _, history = run(**residual)
    return history.output() if table.keeps_stream else powers(6)[-1] if not table.block_sublayers else last_block(table)


def last_block(table):
    first = table.num_sublayers - (table.num_sublayers % table.block_sublayers or table.block_sublayers)
    return sum(powers(6)[first + 1 :])


def test_sources_are_not_written_to():
    """Appending, reading and summing blocks leave every tensor as it was given."""
    for residual in (dict(method="mhar_block", block_layers=1), dict(method="delta_block", block_layers=1)):
        table = DepthTable(ResidualConfig(**residual), 6)
        given = powers(6)
        before = [x.clone() for x in given]
        history = DepthHistory(table, given[0])
        for output in given[1:]:
            history.sources(NULL)
            history.append(output)
        assert all(torch.equal(a, b) for a, b in zip(given, before))


def test_two_histories_know_nothing_of_each_other():
    table = DepthTable(ResidualConfig(method="mhar"), 4)
    first, second = DepthHistory(table, torch.zeros(1, 1, 2)), DepthHistory(table, torch.ones(1, 1, 2))
    first.sources()
    first.append(torch.zeros(1, 1, 2))
    assert first.next_site == 1 and second.next_site == 0
    assert len(second.sources()) == 1 and len(first.sources()) == 2


def test_a_missing_null_source_is_named():
    history = DepthHistory(DepthTable(ResidualConfig(method="delta"), 4), torch.zeros(1, 1, 2))
    with pytest.raises(AssertionError, match="null source"):
        history.sources()
