"""Steps that are skipped: which, what of them is seen, and what they change. Under other layouts: see test_layouts."""

import math
import re
import statistics
from functools import partial

import pytest

from megatron_mhar.config.schema import SkipConfig
from megatron_mhar.errors import UserError
from megatron_mhar.run_files import RunFiles, checkpoint_steps
from megatron_mhar.tracking.journal import load_metrics
from megatron_mhar.train.skip import Skips
from tests.conftest import METHODS, tiny_run
from tests.train.poison import poisoned


def train(config):
    from megatron_mhar.train.loop import train

    return train(config), load_metrics(RunFiles(config.run_dir).journal)


def test_what_is_not_finite_is_never_accepted():
    skips = Skips(SkipConfig(max_in_row=2))
    assert [skips.accepts(norm) for norm in (1.0, math.nan, 1e9, math.inf)] == [True, False, True, False]
    assert (skips.in_row, skips.total, skips.exhausted) == (1, 2, False)
    assert not skips.accepts(math.nan) and skips.exhausted
    assert skips.why == "loss or gradients are not finite"
    assert skips.accepts(1.0) and (skips.in_row, skips.why) == (0, "")


def test_a_spike_is_judged_by_the_median_of_the_steps_made():
    skips = Skips(SkipConfig(spike_factor=3, spike_window=4))
    assert all(skips.accepts(norm) for norm in (1.0, 50.0, 2.0))  # too few to tell
    assert skips.accepts(3.0)
    assert not skips.accepts(7.51) and skips.why == "the gradient norm is over 3 times 2.5, the median of the last 4"
    assert skips.accepts(7.5), "the spike is not in the median"
    assert not skips.accepts(3 * statistics.median([50, 2, 3, 7.5]) + 0.1), "the first step is out of the window"


def test_a_rise_of_the_loss_is_judged_by_the_median_of_the_steps_made():
    skips = Skips(SkipConfig(loss_rise=0.5, spike_window=3))
    assert all(skips.accepts(1.0, loss) for loss in (9.0, 3.0, 2.0))  # too few to tell
    assert (
        not skips.accepts(1.0, 3.51) and skips.why == "the loss is over 3, the median of the last 3, by more than 0.5"
    )
    assert not skips.accepts(1.0, math.nan)
    other = Skips(skips.settings)
    other.load_state(skips.state())
    assert other.accepts(1.0, 3.5) and not other.accepts(1.0, 3.51), "the median of 3, 2 and 3.5"
    other.load_state({"in_row": 0, "total": 0, "norms": [1.0]})  # of a checkpoint without losses
    assert other.accepts(1.0, 100.0)


@pytest.mark.usefixtures("one_rank")
def test_a_step_whose_loss_rises_is_skipped(tmp_path, corpus):
    config = tiny_run(corpus, tmp_path, training={"skip": {"loss_rise": 2, "spike_window": 3}, "log_interval": 4})
    with poisoned({5: "rise"}) as unmoved:
        summary, metrics = train(config)
    assert unmoved == [5] and summary.skipped_steps == 1
    assert math.isfinite(dict(metrics["train/grad_norm"])[5]), "it is the loss that tells"
    assert "the median of the last 3, by more than 2: loss 9." in RunFiles(config.run_dir).log.read_text()


def test_decisions_go_on_from_a_state():
    norms = [1.0 + step % 7 * 0.3 + 9.0 * (step % 5 == 4) for step in range(40)]
    whole = Skips(SkipConfig(spike_factor=3, spike_window=6))
    expected = [whole.accepts(norm) for norm in norms]
    assert 3 < expected.count(False) < 10
    first, second = (Skips(SkipConfig(spike_factor=3, spike_window=6)) for _ in range(2))
    found = [first.accepts(norm) for norm in norms[:20]]
    second.load_state(first.state())
    assert found + [second.accepts(norm) for norm in norms[20:]] == expected
    assert second.state() == whole.state()


STEPS = {3: "nan", 5: "spike", 6: "loss"}


@pytest.mark.usefixtures("one_rank")
def test_a_skipped_step_takes_its_samples_and_nothing_else(tmp_path, corpus):
    config = tiny_run(
        corpus, tmp_path, residual=METHODS["mhar"], optimizer={"ema_decay": 0.9},
        training={"skip": {"spike_factor": 5, "spike_window": 3}, "log_interval": 4},
    )  # fmt: skip
    with poisoned(STEPS) as unmoved:
        summary, metrics = train(config)
    assert unmoved == list(STEPS) and summary.skipped_steps == 3
    assert metrics["train/skipped_steps"] == [(4, 1), (8, 3)]
    losses, norms = (dict(metrics[name]) for name in ("train/loss", "train/grad_norm"))
    assert math.isfinite(losses[3]) and math.isnan(norms[3]) and losses[6] == math.inf and math.isnan(norms[6])
    assert norms[5] > 5 * max(norms[1], norms[2], norms[4]) and sorted(losses) == list(range(1, 9))
    lines = [line.partition(": skipped, ")[2] for line in RunFiles(config.run_dir).log.read_text().splitlines()]
    first, second, third = filter(None, lines)
    assert first == (
        f"loss or gradients are not finite: loss {losses[3]:.4f}, gradient norm nan, samples 8 to 11; 1 in a row, 1 of "
        "the run"
    )
    median = statistics.median(norms[step] for step in (1, 2, 4))
    assert second.startswith(f"the gradient norm is over 5 times {median:.4g}, the median of the last 3: loss ")
    assert "loss inf, gradient norm nan, samples 20 to 23; 2 in a row, 3 of the run" in third

    # The schedule stands still: eight steps end where five would be.
    whole, other = train(tiny_run(corpus, tmp_path, name="whole", optimizer={"ema_decay": 0.9}))
    rates = [rate for _, rate in other["train/lr"]]
    assert dict(metrics["train/lr"]) == {4: rates[2], 8: rates[4]} and whole.skipped_steps == 0


@pytest.mark.usefixtures("one_rank")
def test_a_spike_is_a_step_like_any_other_unless_asked_for(tmp_path, corpus):
    with poisoned({5: "spike"}) as unmoved:
        summary, _ = train(tiny_run(corpus, tmp_path))
    assert unmoved == [] and summary.skipped_steps == 0


@pytest.mark.usefixtures("one_rank")
def test_too_many_in_a_row_stop_the_run_and_the_samples_are_named(tmp_path, corpus):
    def config(**training):
        return tiny_run(corpus, tmp_path, checkpoint={"interval": 4}, training={"skip": {"max_in_row": 2}, **training})

    message = re.compile(
        r"step 7: skipped, loss or gradients are not finite: loss \d\.\d{4}, gradient norm nan, samples 24 to 27; "
        r"2 in a row, 3 of the run\. So many in a row stop the run \(training\.skip\.max_in_row\): see samples 20 to "
        r"27\. The newest checkpoint is of step 4$"
    )
    with poisoned({2: "nan", 6: "nan", 7: "nan"}) as unmoved:
        with pytest.raises(UserError, match=message):
            train(config())
        assert unmoved == [2, 6, 7]
        metrics = load_metrics(RunFiles(config().run_dir).journal)
        assert [step for step, _ in metrics["train/loss"]] == list(range(1, 8))
        with pytest.raises(UserError, match=message):  # the checkpoint knows of the second step
            train(config())
        assert checkpoint_steps(RunFiles(config().run_dir).checkpoints) == [4]
        # The user has seen the samples, and wants to go on past them.
        summary, metrics = train(config(skip={"max_in_row": 3}))
    assert summary.skipped_steps == 3 and [step for step, _ in metrics["train/loss"]] == list(range(1, 9))


@pytest.mark.usefixtures("one_rank")
def test_a_run_that_diverges_is_stopped(tmp_path, corpus):
    """The first step throws the weights away, and nothing is finite from then on."""
    config = tiny_run(
        corpus, tmp_path, optimizer={"lr": 1e20, "min_lr": 1e20, "clip_grad": 0.0, "warmup_steps": 0,
                                     "schedule": "constant"}, training={"skip": {"max_in_row": 3}},
    )  # fmt: skip
    with pytest.raises(UserError, match=r"3 in a row.*The newest checkpoint is of step 0$"):
        train(config)


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_before_a_row_of_skipped_steps_stay(tmp_path, corpus):
    """The weights may have been lost before the first skipped step: no save in the row, and none removes older ones."""
    config = partial(tiny_run, corpus, tmp_path, checkpoint={"interval": 2, "keep": 1})
    skip = {"max_in_row": 4}
    with poisoned({3: "nan", 4: "nan", 5: "nan", 6: "nan"}), pytest.raises(UserError, match=r"is of step 2$"):
        train(config(name="stopped", training={"skip": skip}))
    assert checkpoint_steps(RunFiles(config(name="stopped").run_dir).checkpoints) == [2]
    with poisoned({3: "nan", 4: "nan", 5: "nan"}):
        train(config(name="paused", training={"skip": skip, "stop_after": 5}))
        assert checkpoint_steps(RunFiles(config(name="paused").run_dir).checkpoints) == [2, 5]
        train(config(name="paused", training={"skip": skip}))
    assert checkpoint_steps(RunFiles(config(name="paused").run_dir).checkpoints) == [8]
