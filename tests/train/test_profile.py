"""The profiler switch: a trace with the names of sites and sublayers, of the steps and ranks that are asked for."""

import json

import pytest

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
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    expected = ["site 0", "sublayer 0 attention", "sublayer 1 MLP", "site 3", "sublayer 3 MLP", "site 4 final"]
    assert {name: names.count(name) for name in expected} == dict.fromkeys(expected, 2)  # one micro-batch a step


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
