"""Stopping and going on is as if nothing had happened; and what a run leaves behind when something does."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from megatron_mhar.errors import UserError
from megatron_mhar.run_files import RoutingMap, RunFiles, RunSummary
from megatron_mhar.tracking.journal import load_metrics
from tests.conftest import METHODS, tiny_run
from tests.launch import ROOT
from tests.model.test_stack import transformer_engine_runs

pytestmark = pytest.mark.usefixtures("one_rank")


def train(config):
    from megatron_mhar.train.loop import train

    return train(config)


def final_state(config):
    """Every tensor of the newest checkpoint: weights, moments, average, schedule."""
    from megatron.core import dist_checkpointing

    from megatron_mhar.train.checkpoint import checkpoint_path, checkpoint_steps

    folder = RunFiles(config.run_dir).checkpoints
    path = checkpoint_path(folder, checkpoint_steps(folder)[-1])
    tensors = dist_checkpointing.load_plain_tensors(str(path))
    common = dist_checkpointing.load_common_state_dict(str(path))
    return dict(leaves(tensors)), common


def leaves(tree, prefix=""):
    """Tensors of nested dicts and lists, with the path that leads to them."""
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
    elif isinstance(tree, dict | list):
        for key, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(branch, f"{prefix}/{key}")


EXACT = [(method, {"precision": "fp32"}) for method in METHODS]
EXACT += [(method, {"precision": "bf16"}) for method in ("mhar", "delta_block")]
if transformer_engine_runs():
    EXACT += [("mhar", {"precision": "fp8", "fp8": {"recipe": recipe}}) for recipe in ("tensorwise", "delayed")]


@pytest.mark.parametrize("method,training", EXACT)
def test_stopped_and_resumed_equals_uninterrupted(tmp_path, corpus, method, training):
    """Bit for bit, with optimizer state and weight average, over a stop between two evaluations."""
    settings = dict(residual=METHODS[method], optimizer={"ema_decay": 0.9, "z_loss": 1e-4})
    whole = tiny_run(corpus, tmp_path, name="whole", training=training, **settings)
    train(whole)
    for stop_after in (3, None):
        parts = tiny_run(corpus, tmp_path, name="parts", training=training | {"stop_after": stop_after}, **settings)
        summary = train(parts)
        assert (summary is None) == (stop_after is not None)
    expected, found = load_metrics(RunFiles(whole.run_dir).journal), load_metrics(RunFiles(parts.run_dir).journal)
    for metric in ("train/loss", "train/grad_norm", "train/lr", "valid/loss"):
        assert found[metric] == expected[metric], metric
    assert len(expected["train/loss"]) == 8 and len(expected["valid/loss"]) == 2
    (tensors, common), (others, other_common) = final_state(whole), final_state(parts)
    assert tensors.keys() == others.keys()
    assert sum("average" in key for key in tensors) == sum("exp_avg_sq" in key for key in tensors) > 10
    for key, tensor in tensors.items():
        assert torch.equal(tensor, others[key]), key
    assert common["scheduler"] == other_common["scheduler"]
    assert common["progress"] == other_common["progress"]
    assert (common["progress"]["step"], common["progress"]["samples"]) == (8, 32)


def test_a_finished_run_is_recognised_and_described(tmp_path, corpus):
    config = tiny_run(corpus, tmp_path, residual=METHODS["mhar"])
    summary = train(config)
    files = RunFiles(config.run_dir)
    assert RunSummary.read(files.summary) == summary
    curve = [value for _, value in load_metrics(files.journal)["valid/loss"]]
    assert summary.valid_loss_last == curve[-1] and summary.valid_loss == pytest.approx(sum(curve) / 2)
    assert (summary.method, summary.num_heads, summary.steps) == ("mhar", 4, 8)
    assert summary.routing_backend == ("triton" if torch.cuda.is_available() else "torch")
    assert summary.tokens_per_second > 0
    routing = RoutingMap.read(files.routing)
    assert routing.weights.shape == (9, 4, 9)
    assert routing.weights.sum(-1) == pytest.approx(1, abs=1e-5)
    before = files.summary.stat().st_mtime_ns
    assert train(config) == summary
    assert files.summary.stat().st_mtime_ns == before


def test_another_config_does_not_go_on_in_the_folder(tmp_path, corpus):
    train(tiny_run(corpus, tmp_path, training={"stop_after": 1}))
    with pytest.raises(UserError, match=r"optimizer\.lr: 0\.003 there, 0\.004 given"):
        train(tiny_run(corpus, tmp_path, optimizer={"lr": 4e-3}))
    # What does not change the mathematics may change.
    train(tiny_run(corpus, tmp_path, training={"stop_after": 2, "log_interval": 4, "micro_batch_size": 1}))


def test_old_checkpoints_go_and_a_half_written_one_is_not_taken(tmp_path, corpus):
    from megatron_mhar.train.checkpoint import checkpoint_steps

    config = tiny_run(corpus, tmp_path, training={"stop_after": 5}, checkpoint={"interval": 1, "keep": 2})
    train(config)
    folder = RunFiles(config.run_dir).checkpoints
    assert checkpoint_steps(folder) == [4, 5]
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000004", "step_00000005"]
    (folder / "step_00000005").rename(folder / "step_00000005.partial")  # as a kill during the save leaves it
    train(tiny_run(corpus, tmp_path, training={"stop_after": 5}, checkpoint={"interval": 1, "keep": 2}))
    assert checkpoint_steps(folder) == [4, 5]
    steps = [s for s, _ in load_metrics(RunFiles(config.run_dir).journal)["train/loss"]]
    assert steps == [1, 2, 3, 4, 5]


def test_a_damaged_checkpoint_is_named(tmp_path, corpus):
    config = tiny_run(corpus, tmp_path, training={"stop_after": 2})
    train(config)
    folder = RunFiles(config.run_dir).checkpoints / "step_00000002"
    for shard in folder.glob("*.distcp"):
        os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(UserError, match="step_00000002: the checkpoint cannot be loaded"):
        train(tiny_run(corpus, tmp_path))


def test_two_processes_do_not_train_in_one_folder(tmp_path, corpus):
    from megatron_mhar.train.run_folder import RunFolder

    config = tiny_run(corpus, tmp_path)
    folder = RunFolder(config)
    folder.prepare()
    with folder.locked(), pytest.raises(UserError, match="another process is training in this folder"):
        train(config)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_same_command_goes_on(tmp_path, corpus, number):
    config = tiny_run(corpus, tmp_path, training={"steps": 400}, evaluation={"interval": 400})
    from megatron_mhar.config.load import dump_config
    from megatron_mhar.train.checkpoint import checkpoint_steps

    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "megatron_mhar.cli.main", "train", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    files = RunFiles(config.run_dir)
    limit = threading.Timer(200, process.kill)
    limit.daemon = True
    limit.start()
    while process.poll() is None and not (files.journal.exists() and files.journal.stat().st_size > 500):
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait() == 0, process.stderr.read()
    assert f"stopped by {signal.Signals(number).name} after step" in files.log.read_text()
    steps = load_metrics(files.journal)["train/loss"]
    assert 0 < len(steps) < 400 and checkpoint_steps(files.checkpoints) == [len(steps)]
    assert "the same command goes on" in files.log.read_text()
    assert not files.summary.exists()
    again = tiny_run(corpus, tmp_path, training={"steps": 400, "stop_after": len(steps) + 2},
                     evaluation={"interval": 400})  # fmt: skip
    train(again)
    assert [s for s, _ in load_metrics(files.journal)["train/loss"]] == list(range(1, len(steps) + 3))


def test_metrics_reach_the_local_mlflow_store(tmp_path, corpus):
    mlflow = pytest.importorskip("mlflow")
    config = tiny_run(corpus, tmp_path, tracking={"enabled": True})
    train(config)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("megatron_mhar").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["model.hidden_size"] == "64"
    journal = load_metrics(RunFiles(config.run_dir).journal)
    history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")]
    assert history == journal["train/loss"] and len(history) == 8


def test_a_failed_run_is_marked_failed_and_keeps_its_journal(tmp_path, corpus, monkeypatch):
    from megatron_mhar.train import loop

    config = tiny_run(corpus, tmp_path)
    original = loop.Trainer.train_step

    def failing(self, batches):
        if len(load_metrics(self.folder.files.journal).get("train/loss", [])) == 3:
            raise RuntimeError("no luck")
        return original(self, batches)

    monkeypatch.setattr(loop.Trainer, "train_step", failing)
    with pytest.raises(RuntimeError, match="no luck"):
        train(config)
    assert len(load_metrics(RunFiles(config.run_dir).journal)["train/loss"]) == 3
    assert json.loads((config.run_dir / "tracking" / "job.json").read_text())["status"] == "FAILED"


def test_a_stopped_run_is_marked_killed_and_running_again_finished(tmp_path, corpus):
    job = tmp_path / "run" / "tracking" / "job.json"
    train(tiny_run(corpus, tmp_path, training={"stop_after": 2}))
    assert json.loads(job.read_text())["status"] == "KILLED"
    train(tiny_run(corpus, tmp_path))
    assert json.loads(job.read_text())["status"] == "FINISHED"
