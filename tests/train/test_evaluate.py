"""mhar evaluate: the loss that training has logged, of any checkpoint. Under another layout: see test_checkpoint."""

import json
import math
import os
import shutil

import pytest
from click.testing import CliRunner

from megatron_mhar.cli.evaluate import evaluate
from megatron_mhar.errors import UserError
from megatron_mhar.run_files import Evaluation, RunFiles
from megatron_mhar.tracking.journal import load_metrics
from tests.conftest import METHODS, tiny_run

pytestmark = pytest.mark.usefixtures("one_rank")


def mhar_evaluate(run_dir, *arguments):
    """What the command prints; its errors are raised."""
    result = CliRunner().invoke(evaluate, [str(run_dir), *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def read(run_dir, step):
    return Evaluation.model_validate_json(RunFiles(run_dir).evaluation_of(step).read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus, groups):
    """A finished run with an average, and checkpoints of the steps 4, 6 and 8."""
    from megatron_mhar.train.loop import train

    config = tiny_run(
        corpus, tmp_path_factory.mktemp("evaluate"), residual=METHODS["mhar"], optimizer={"ema_decay": 0.5, "lr": 1e-2},
        evaluation={"interval": 2}, checkpoint={"interval": 2, "keep": 3},
    )  # fmt: skip
    train(config)
    return config.run_dir


def test_the_newest_checkpoint_has_the_loss_that_was_logged(run):
    logged = dict(load_metrics(RunFiles(run).journal)["valid/loss"])
    out = mhar_evaluate(run)
    found = read(run, 8)
    assert found.average_loss == logged[8] != found.loss and found.average_perplexity == math.exp(logged[8])
    assert (found.name, found.step, found.batches, found.sequences, found.tokens) == ("run", 8, 2, 8, 256)
    lines = out.splitlines()
    assert lines[0].startswith("run, step 8: 8 sequences, 256 tokens of ") and lines[0].endswith("/valid")
    assert lines[2].split() == ["weights", f"{found.loss:.4f}", f"{math.exp(found.loss):,.2f}"]
    assert lines[3].split() == ["average", f"{found.average_loss:.4f}", f"{math.exp(logged[8]):,.2f}"]
    assert lines[4] == str(run / "evaluation" / "step_00000008.json")
    assert json.loads((run / "evaluation" / "step_00000008.json").read_text())["perplexity"] == found.perplexity


def test_a_checkpoint_is_chosen_and_nothing_else_of_the_run_is_touched(run, tmp_path):
    """Also where the run has been moved, its training data are gone, and another micro-batch is asked for."""
    moved = tmp_path / "moved run"
    shutil.copytree(run, moved)
    before = {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()}
    logged = dict(load_metrics(RunFiles(run).journal)["valid/loss"])
    mhar_evaluate(moved, "--checkpoint", 6, "data.train=[gone]")
    assert read(moved, 6).average_loss == logged[6] and read(moved, 6).name == "moved run"
    mhar_evaluate(moved, "--checkpoint", 6, "training.micro_batch_size=1")
    assert read(moved, 6).average_loss == pytest.approx(logged[6], abs=1e-6)
    for path, content in before.items():
        assert path.read_bytes() == content, path
    assert {path.parent.name for path in set(moved.rglob("*")) - before.keys() if path.is_file()} <= {
        "evaluation", "index",
    }  # fmt: skip


def test_all_samples_are_taken_once(run, corpus, tmp_path):
    """As many as fit into the tokens, whatever number is asked for at a time."""
    tokens = os.path.getsize(corpus / "valid.bin") // 2
    losses = []
    for size in (4, 1):
        mhar_evaluate(run, "--batches", "all", f"training.global_batch_size={size}", "training.micro_batch_size=1")
        found = read(run, 8)
        assert found.sequences == (tokens - 1) // 32 // size * size and found.batches == found.sequences // size
        losses.append(found.loss)
    mhar_evaluate(run, "--batches", found.batches, "training.global_batch_size=1", "training.micro_batch_size=1")
    assert read(run, 8).loss == pytest.approx(losses[1], abs=1e-6)  # one mean, and a mean of means
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    with pytest.raises(UserError, match=rf"data\.valid: {(tokens - 1) // 32} samples of 32 tokens, fewer than a glob"):
        mhar_evaluate(run, "--batches", "all", "training.global_batch_size=4096")


def test_an_unfinished_run_without_an_average(tmp_path, corpus):
    from megatron_mhar.train.loop import train

    config = tiny_run(corpus, tmp_path, training={"stop_after": 4}, checkpoint={"interval": 3})
    with pytest.raises(UserError, match="run: holds no run of mhar train"):
        mhar_evaluate(config.run_dir)
    train(config)
    logged = load_metrics(RunFiles(config.run_dir).journal)["valid/loss"]
    out = mhar_evaluate(config.run_dir)
    assert "average" not in out and logged == [(4, read(config.run_dir, 4).loss)]
    # Half-written ones, here what a kill leaves of the newest, are passed over.
    checkpoints = RunFiles(config.run_dir).checkpoints
    (checkpoints / "step_00000004").rename(checkpoints / "step_00000004.1f2e.partial")
    assert "step 3:" in mhar_evaluate(config.run_dir) and read(config.run_dir, 3).average_loss is None
    with pytest.raises(UserError, match=r"step_00000004: no complete checkpoint; there are those of step 3$"):
        mhar_evaluate(config.run_dir, "--checkpoint", 4)
    assert (checkpoints / "step_00000004.1f2e.partial").is_dir(), "it may be one that is just being written"
    (checkpoints / "step_00000003" / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"step_00000003: the checkpoint cannot be loaded \(__0_0\.distcp is missing\)"):
        mhar_evaluate(config.run_dir)
    shutil.rmtree(checkpoints / "step_00000003")
    with pytest.raises(UserError, match=r"checkpoints: no complete checkpoint; the run has saved none yet"):
        mhar_evaluate(config.run_dir)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["data.valid=[]"], r"data\.valid: no validation files"),
        (["data.valid=[gone]"], r"gone\.idx: no such file"),
        (["model.num_layers=2"], r"the checkpoint cannot be loaded \(model\.num_layers: 4 there, 2 here\)"),
        (["evaluation.batch=2"], r"unknown key; did you mean evaluation\.batches\?"),
        (["name=other"], r"command line: name=other: name is that of the run in RUN_DIR, .*; give another RUN_DIR"),
        (["output_dir=elsewhere"], r"output_dir is that of the run in RUN_DIR"),
        (["parallel.pipeline=2"], r"parallel\.pipeline: 2 given, but it must divide the number of ranks, 1"),
    ],
)
def test_what_does_not_fit_is_one_error(run, arguments, message):
    with pytest.raises(UserError, match=message):
        mhar_evaluate(run, *arguments)


@pytest.mark.parametrize("batches", ["0", "-1", "many"])
def test_a_number_of_batches_is_positive_or_all(run, batches):
    assert f"'{batches}' given; allowed: a positive whole number, or all" in mhar_evaluate(run, "--batches", batches)


def test_no_more_batches_than_there_are(run):
    with pytest.raises(UserError, match=r"--batches: 100000 given, but data\.valid has \d+ whole global batches"):
        mhar_evaluate(run, "--batches", 100000)


def test_a_checkpoint_that_the_run_removes_meanwhile_gives_way_to_the_next(run, tmp_path, monkeypatch):
    from megatron_mhar.train.checkpoint import Checkpoints

    moving = tmp_path / "moving"
    shutil.copytree(run, moving)
    load, asked = Checkpoints.load, []

    def load_late(self, step):
        asked.append(step)
        if len(asked) == 1:  # a save of the run is completed just before
            (self.folder / "step_00000008").rename(self.folder / "step_00000010")
        return load(self, step)

    monkeypatch.setattr(Checkpoints, "load", load_late)
    assert "step 10:" in mhar_evaluate(moving) and asked == [8, 10]


def test_a_place_that_cannot_be_written_is_told_before(run, tmp_path, monkeypatch):
    from megatron_mhar.train.loop import Trainer

    full = tmp_path / "full"
    shutil.copytree(run, full, ignore=shutil.ignore_patterns("evaluation"))
    (full / "evaluation" / "step_00000008.writable").mkdir(
        parents=True
    )  # a file cannot be made there, for root neither
    monkeypatch.setattr(Trainer, "evaluate", lambda *a, **k: pytest.fail("evaluated for nothing"))
    with pytest.raises(UserError, match="evaluation: "):
        mhar_evaluate(full)
