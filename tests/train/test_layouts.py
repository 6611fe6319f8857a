"""Every parallel layout trains as one process does: one launch for each world size serves all tests.

With ``--tier all`` every method runs under every layout; the fast tier has all methods under tensor and data
parallelism, and under pipelines those whose histories differ most.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.launch import launch
from tests.train.layout_worker import BATCHES, LAYOUTS, LONG, RESUMED, SKIPPED, STEPS, runs, worlds

# The first test waits for all launches.
pytestmark = pytest.mark.timeout(2400)


def parallel(tier):
    return [layout for world in worlds(tier) if world > 1 for layout in LAYOUTS[world]]


@pytest.fixture(scope="module")
def results(tmp_path_factory, corpus, request):
    tier = request.config.getoption("--tier")
    folder = tmp_path_factory.mktemp("layouts")
    reference = folder / "world1.pt"
    found = {}
    for world in worlds(tier):
        out = folder / f"world{world}.pt"
        found |= launch("train/layout_worker.py", world, out, str(corpus), str(reference), tier, timeout_s=1200)
    return found


def pytest_generate_tests(metafunc):
    if "run" in metafunc.fixturenames:
        tier = metafunc.config.getoption("--tier")
        metafunc.parametrize("layout,run", [(layout, run) for layout in parallel(tier) for run in runs(layout, tier)])


def test_training_equals_one_process(results, layout, run):
    assert_equals_one_process(results["one", *run], results[layout, *run])


def assert_equals_one_process(one, other):
    """Losses, norms, evaluation with entropy and gates, and the gradient of every parameter, over all steps."""
    assert len(one["losses"]) >= STEPS and min(map(abs, np.diff(one["losses"]))) > 1e-4
    assert other["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert other["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert other["valid"] == pytest.approx(one["valid"], abs=1e-5)
    assert other["routing"] == pytest.approx(one["routing"], abs=1e-5)
    # Of each parameter the largest error relative to its gradient's largest entry (or to 0.1, if that is smaller).
    assert set(other["errors"]) == set(one["gradients"][0])
    wrong = {name: error for name, error in other["errors"].items() if error > 1e-5}
    assert not wrong


def pipelines(results):
    return {key: result["probe"] for key, result in results.items() if "probe" in result}


def test_bytes_and_messages_on_the_wire_are_those_of_the_plan(results):
    for key, ranks in pipelines(results).items():
        for rank in ranks:
            assert rank["sent"] == rank["predicted"], key
        assert sum(messages for rank in ranks for messages, _ in rank["sent"]) > 0


def test_the_cache_sends_less_and_changes_nothing(results):
    for method in ("mhar", "delta_block"):
        cached, uncached = (results[layout, method, True, "4x1"] for layout in ("pp2_vpp2", "pp2_vpp2_uncached"))
        sent = [sum(size for rank in r["probe"] for _, size in rank["predicted"]) for r in (cached, uncached)]
        assert sent[0] < 0.7 * sent[1]
        # The forward is the same, bit for bit; gradients of a source are added in another order.
        assert cached["losses"][0] == uncached["losses"][0]
        assert cached["losses"] == pytest.approx(uncached["losses"], abs=1e-6)


def test_evaluation_keeps_no_graph(results):
    for key, ranks in pipelines(results).items():
        assert not any(graph for rank in ranks for graph in rank["graph_forward_only"]), key
        assert any(graph for rank in ranks for graph in rank["graph"])


def test_a_source_is_the_same_at_every_site_of_every_stage(results):
    """One value a micro-batch, by checksum, over all sites of all pipeline ranks."""
    checked = 0
    for (layout, method, _, batch), ranks in pipelines(results).items():
        if "tp2" in layout or "dp2" in layout:
            continue  # ranks with other slices or samples
        sums: dict[str, set[int]] = {}
        for rank in ranks:
            for name, values in rank["checksums"].items():
                sums.setdefault(name, set()).update(values)
        for name, values in sums.items():
            assert len(values) == BATCHES[batch][0] // BATCHES[batch][1], (layout, method, name)
            checked += 1
    assert checked > 50


def test_nothing_of_a_history_is_left_after_a_step(results):
    for key, ranks in pipelines(results).items():
        for rank in ranks:
            assert not any(rank["waiting"]) and rank["left"] == 0, key
        # Tensors are counted for one method. Under sequence parallelism they are shorter than the counted shape.
        assert key[1] != "mhar" or "sp" in key[0] or max(rank["alive"] for rank in ranks) > 0


@pytest.mark.parametrize("layout", RESUMED)
def test_stopped_and_resumed_equals_uninterrupted(results, layout):
    """bf16, bit for bit, with steps that are skipped before and after the checkpoint.

    With overlap the weights of other ranks arrive no sooner than the next forward.
    """
    (whole, *_), (parts, *_) = results["resumed", layout].values()
    assert whole.keys() == parts.keys()
    for metric in ("train/loss", "train/grad_norm", "train/lr", "train/skipped_steps", "valid/loss"):
        assert str(parts[metric]) == str(whole[metric]), metric  # nan is nan
    assert len(whole["train/loss"]) == 8 and whole["train/skipped_steps"][-1] == (8, len(SKIPPED))


@pytest.mark.parametrize("layout", RESUMED)
def test_what_one_rank_spoils_is_skipped_by_all(results, layout):
    """Weights, moments, average and schedule of every rank stay as they were, and the others' steps are as before."""
    for journal, summary, unmoved in results["resumed", layout].values():
        assert all(steps == list(SKIPPED) for steps in unmoved) and summary.skipped_steps == len(SKIPPED)
        assert len(unmoved) == (1 if layout == "one" else 2)
        one = results["resumed", "one"]["whole"][0]
        made = [step for step in range(1, 9) if step not in SKIPPED]
        losses, expected = (dict(each["train/loss"]) for each in (journal, one))
        assert [losses[step] for step in made] == pytest.approx([expected[step] for step in made], abs=0.02)  # bf16
        norms = dict(journal["train/grad_norm"])
        assert np.isnan([norms[2], norms[3]]).all() and min(norms[5], norms[7]) > 4 * norms[4]
        # Tensor-parallel ranks have one loss in truth, and the first one's is told.
        assert np.isfinite(losses[3]) == (layout == "tp2")


def test_twenty_steps_of_every_layout(results, request):
    for layout in parallel(request.config.getoption("--tier")):
        losses = results[layout, "mhar", True, "4x1"]["losses"]
        assert len(losses) == LONG and np.isfinite(losses).all() and losses[-1] < losses[0]


def test_the_number_of_parameters_does_not_depend_on_the_layout(results):
    counts = {key[1]: value["whole"][1].parameters for key, value in results.items() if key[0] == "resumed"}
    assert len(counts) == 5 and len(set(counts.values())) == 1, counts


def test_the_gradients_compared_are_not_zero(results):
    """Of all parameters, only those of a site with a single source (and released null ones) stay without."""
    for key, result in results.items():
        if key[0] == "one":
            quiet = {n for n, g in result["gradients"][-1].items() if g.abs().max() < 1e-7}
            assert all(n.startswith("decoder.layers.0.site.") for n in quiet), (key, quiet)
