"""The profiler switch: a trace with the names of sites and sublayers, of the steps and ranks that are asked for."""

import json

import pytest
from pydantic import ValidationError

from megatron_mhar.errors import UserError
from megatron_mhar.run_files import RunFiles
from tests.conftest import METHODS, tiny_run

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_trace_names_sites_and_sublayers(tmp_path, corpus):
    from megatron_mhar.train.loop import train

    config = tiny_run(
        corpus, tmp_path, residual=METHODS["mhar"], model={"num_layers": 2, "layers": "local"}, data={"valid": []},
        training={"steps": 4, "global_batch_size": 2}, profile={"start_step": 2, "steps": 2},
    )  # fmt: skip
    train(config)
    (trace,) = (config.run_dir / "profile").iterdir()
    assert trace.name == "steps_2-3_rank_0.json"
    events = json.loads(trace.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in found]
    expected = ["site 0", "sublayer 0 attention", "sublayer 1 MLP", "site 3", "sublayer 3 MLP", "site 4 final"]
    expected += [f"{name} backward" for name in expected]
    assert {name: names.count(name) for name in expected} == dict.fromkeys(expected, 2)  # one micro-batch a step
    # Backwards follow one another, from the last to the first, and what they compute is within their ranges.
    backwards = sorted((event for event in found if "backward" in event["name"]), key=lambda event: event["ts"])
    order = ["site 4 final", *(f"{what} {n}" for n in (3, 2, 1, 0) for what in ("sublayer", "site"))] * 2
    assert len(backwards) == len(order)
    for event, following, name in zip(backwards, [*backwards[1:], None], order):
        assert event["name"].startswith(name)
        end = event["ts"] + event["dur"]
        assert following is None or end <= following["ts"]
        inside = [other["name"] for other in events if event["ts"] <= other.get("ts", 0) < end]
        assert inside.count("aten::mm") >= (4 if name.startswith("sublayer") else 0)
        assert any("backward" in other.lower() for other in inside if other != event["name"])


@pytest.mark.parametrize("method", ["baseline", "delta_block"])
def test_recomputed_sublayers_have_ranges_within_their_backwards(tmp_path, corpus, method):
    from megatron_mhar.train.loop import train

    config = tiny_run(
        corpus, tmp_path, residual=METHODS[method], model={"num_layers": 2, "layers": "local"}, data={"valid": []},
        training={"steps": 3, "recompute": "full"}, profile={"start_step": 2, "steps": 1},
    )  # fmt: skip
    train(config)
    (trace,) = (config.run_dir / "profile").iterdir()
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]  # a GPU has them once more
    for number, kind in enumerate(("attention", "MLP") * 2):
        name = f"sublayer {number} {kind}"
        assert (names.count(name), names.count(f"{name} backward")) == (4, 2)  # two micro-batches


def test_other_ranks_and_other_steps_are_left_alone(tmp_path, monkeypatch):
    """No range is set up before the steps that are asked for, nor after them, nor on other ranks."""
    from contextlib import contextmanager

    from megatron_mhar.config.schema import ProfileConfig
    from megatron_mhar.train import profile

    events = []

    @contextmanager
    def ranges(models):
        events.append("on")
        yield
        events.append("off")

    monkeypatch.setattr(profile, "ranges", ranges)
    for rank, settings in ((1, {"start_step": 2}), (0, {}), (0, {"start_step": 2, "steps": 1}), (1, {"start_step": 9})):
        with profile.StepProfiler(ProfileConfig(tool="nsys", **settings), [], tmp_path, rank) as profiler:
            for step in range(1, 5):
                profiler.begin_step(step)
                events.append(step)
    off = [1, 2, 3, 4]
    assert events == [*off, *off, 1, "on", 2, "off", 3, 4, *off]
    assert not list(tmp_path.iterdir())


def test_a_profile_that_cannot_be_written_costs_no_run(tmp_path, corpus):
    from megatron_mhar.train.loop import train

    config = tiny_run(
        corpus, tmp_path, model={"num_layers": 1}, data={"valid": []}, profile={"start_step": 2, "steps": 1},
        training={"steps": 4, "global_batch_size": 2},
    )  # fmt: skip
    config.run_dir.mkdir()
    (config.run_dir / "profile").write_text("in the way")
    assert train(config).steps == 4
    assert "the profile cannot be written" in RunFiles(config.run_dir).log.read_text()


def test_a_window_ends_where_it_was_to_end_after_a_restart_too(tmp_path):
    from megatron_mhar.config.schema import ProfileConfig
    from megatron_mhar.train.profile import StepProfiler

    with StepProfiler(ProfileConfig(start_step=3, steps=4), [], tmp_path, 0) as profiler:
        for step in range(5, 9):
            profiler.begin_step(step)
    assert [path.name for path in tmp_path.iterdir()] == ["steps_5-6_rank_0.json"]


def test_a_window_or_rank_that_is_never_reached_is_refused(tmp_path, corpus):
    from megatron_mhar.config.layout import check_layout

    with pytest.raises(ValidationError, match=r"9 given, but the run ends at step 8"):
        tiny_run(corpus, tmp_path, profile={"start_step": 9})
    with pytest.raises(UserError, match=r"profile\.ranks: 7 given, but the run has ranks 0 to 1"):
        check_layout(tiny_run(corpus, tmp_path, profile={"start_step": 1, "ranks": [0, 7]}), 2)
