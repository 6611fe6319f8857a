"""Checkpoints load under any other layout, are written beside training, and are whole or refused by name."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mhar.config.load import dump_config
from megatron_mhar.errors import UserError
from megatron_mhar.run_files import Evaluation, RunFiles
from megatron_mhar.tracking.journal import load_metrics
from tests.conftest import METHODS, tiny_run
from tests.launch import ROOT, launch
from tests.train.checkpoint_worker import CASES, PAIRS, SAVED, STEPS, run_all, run_folder

pytestmark = pytest.mark.usefixtures("one_rank")
WORKER = ROOT / "tests" / "train" / "checkpoint_worker.py"


def train(config):
    from megatron_mhar.train.loop import train

    return train(config)


def steps_in(config):
    from megatron_mhar.train.checkpoint import checkpoint_steps

    return checkpoint_steps(RunFiles(config.run_dir).checkpoints)


def tensors(run, step):
    """Every tensor of a checkpoint by its global name, and the rest."""
    from megatron.core import dist_checkpointing

    from megatron_mhar.train.checkpoint import checkpoint_path

    path = str(checkpoint_path(RunFiles(run).checkpoints, step))
    found = dist_checkpointing.load_plain_tensors(path)
    found = {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
    return found, dist_checkpointing.load_common_state_dict(path)


def step_counts(common):
    return {group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]}


# --- other layouts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, corpus, groups):
    folder, tier = tmp_path_factory.mktemp("layouts"), request.config.getoption("--tier")
    for world in (2, 4):
        out = folder / f"world{world}.pt"
        launch("train/checkpoint_worker.py", world, out, str(corpus), tier, timeout_s=1200)
    run_all(folder, corpus, 1, tier, lambda: True)
    return folder


def pytest_generate_tests(metafunc):
    if "method" in metafunc.fixturenames:
        metafunc.parametrize("method", CASES[metafunc.config.getoption("--tier")])


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("first,then", PAIRS)
def test_going_on_under_another_layout_equals_the_uninterrupted_run(runs, method, first, then):
    whole, parts = run_folder(runs, method, "whole"), run_folder(runs, method, first, then)
    expected, found = (load_metrics(RunFiles(run).journal) for run in (whole, parts))
    assert [step for step, _ in found["train/loss"]] == list(range(1, STEPS + 1))
    for metric, tolerance in {"train/loss": 1e-5, "train/grad_norm": 1e-5, "valid/loss": 1e-5, "train/lr": 0}.items():
        values = [value for _, value in expected[metric]]
        assert [value for _, value in found[metric]] == pytest.approx(values, abs=tolerance), metric
    (weights, common), (others, other_common) = tensors(whole, STEPS), tensors(parts, STEPS)
    assert weights.keys() == others.keys()
    assert sum("average" in name for name in weights) == sum("exp_avg_sq" in name for name in weights) > 10
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=0, atol=1e-5, msg=name)
    assert step_counts(common) == step_counts(other_common) == {STEPS}
    for progress in (common["progress"], other_common["progress"]):
        assert (progress["step"], progress["samples"]) == (STEPS, STEPS * 4)
    assert f"checkpoints/step_{SAVED:08d}\n" in (parts / "log.txt").read_text()


@pytest.mark.timeout(2400)
def test_a_checkpoint_is_evaluated_under_another_layout(runs, method):
    run = run_folder(runs, method, "whole")
    found = Evaluation.model_validate_json(RunFiles(run).evaluation_of(STEPS).read_text())
    assert found.average_loss == pytest.approx(load_metrics(RunFiles(run).journal)["valid/loss"][-1][1], abs=1e-5)
    assert (found.step, found.ranks) == (STEPS, 2) and abs(found.loss - found.average_loss) > 1e-4


@pytest.mark.timeout(2400)
def test_the_steps_compared_move_the_weights(runs, method):
    """By far more than the tolerance, and each layer's site to somewhere else."""
    before, _ = tensors(run_folder(runs, method, "tp2"), SAVED)
    after, _ = tensors(run_folder(runs, method, "whole"), STEPS)
    assert before.keys() == after.keys()
    moved = {name: (after[name] - before[name]).abs().max() for name in before if not name.startswith("optimizer")}
    sites = {"hyper_connections": "alpha"}.get(method, "query")
    still = {name for name, distance in moved.items() if distance < 1e-4}
    assert all("layers.0.site" in name for name in still), still  # a site with one source is not trained
    found = [after[f"decoder.layers.{layer}.site.{sites}"] for layer in range(8)]
    for layer, other in zip(found, found[1:]):
        assert (layer - other).abs().max() > 1e-4


# --- asynchronous saves -------------------------------------------------------------------------------------------


def patch_writer(monkeypatch, act):
    """Have megatron-core's writer call ``act`` with its file's path first."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data

    def patched(transforms, *, write_bucket, **others):
        act(Path(write_bucket[0]))
        return write(transforms, write_bucket=write_bucket, **others)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(patched))


def wait_for(path, process=None):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        assert process is None or process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, corpus, monkeypatch):
    """The writer waits until two more steps are done, and what it then writes is the state of its own step."""
    from megatron_mhar.train import loop

    settings = dict(residual=METHODS["mhar"], optimizer={"ema_decay": 0.9}, training={"stop_after": 7})
    sync = tiny_run(corpus, tmp_path, name="sync", checkpoint={"interval": 4, "keep": 9}, **settings)
    train(sync)

    go, step, seen = tmp_path / "go", loop.Trainer.train_step, []

    def stepping(self, batches):
        result = step(self, batches)
        seen.append(steps_in(self.config))
        if len(seen) == 6:
            go.touch()
        return result

    monkeypatch.setattr(loop.Trainer, "train_step", stepping)
    patch_writer(monkeypatch, lambda file: file.parent.name.startswith("step_00000004") and wait_for(go))
    config = tiny_run(
        corpus, tmp_path, name="async", checkpoint={"interval": 4, "keep": 9, "asynchronous": True}, **settings
    )
    train(config)
    assert seen[4] == seen[5] == [] and steps_in(config) == [4, 7]
    for checkpoint in (4, 7):
        (expected, common), (found, other) = tensors(sync.run_dir, checkpoint), tensors(config.run_dir, checkpoint)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), (checkpoint, name)
        assert common["progress"] == other["progress"] and step_counts(other) == {checkpoint}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_one_error_and_leaves_nothing(tmp_path, corpus, monkeypatch, asynchronous):
    def full(file):
        if file.parent.name.startswith("step_00000004"):
            file.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")

    patch_writer(monkeypatch, full)
    checkpoint = {"interval": 2, "asynchronous": asynchronous}
    config = tiny_run(corpus, tmp_path, checkpoint=checkpoint)
    with pytest.raises(UserError, match=r"step_00000004: the checkpoint cannot be written \(.*from step 2$"):
        train(config)
    assert [entry.name for entry in RunFiles(config.run_dir).checkpoints.iterdir()] == ["step_00000002"]
    monkeypatch.undo()
    train(config)
    assert steps_in(config) == [6, 8]


def test_a_writer_that_is_ended_is_told(tmp_path, corpus, monkeypatch):
    patch_writer(monkeypatch, lambda file: "step_00000004" in str(file) and os.kill(os.getpid(), signal.SIGKILL))
    config = tiny_run(corpus, tmp_path, checkpoint={"interval": 2, "asynchronous": True})
    with pytest.raises(UserError, match=r"step_00000004: .*\(the process that writes it was ended;.*from step 2$"):
        train(config)
    assert steps_in(config) == [2]


# --- kills --------------------------------------------------------------------------------------------------------


class Held:
    """A run in a process of its own; the writer of its second checkpoint has written half of a file and waits."""

    def __init__(self, tmp_path, corpus, asynchronous, seconds):
        # One that goes on after the kill has saves of its own: the third must wait for the second.
        self.config = tiny_run(
            corpus, tmp_path, training={"steps": STEPS}, evaluation={"interval": STEPS},
            checkpoint={"interval": SAVED // 2, "keep": 9, "asynchronous": asynchronous},
        )  # fmt: skip
        config, self.mark = tmp_path / "config.yaml", tmp_path / "mark"
        config.write_text(dump_config(self.config))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(WORKER), str(config), str(self.mark), str(seconds)]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        wait_for(self.mark, self.process)
        self.writer = int(self.mark.read_text())
        self.folder = RunFiles(self.config.run_dir).checkpoints


def alive(process):
    """Whether a process runs; one that has ended and is not collected does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_a_kill_during_a_save_the_last_complete_checkpoint_is_used(tmp_path, corpus, asynchronous):
    held = Held(tmp_path, corpus, asynchronous, seconds=600)
    assert (held.writer != held.process.pid) == asynchronous
    held.process.kill()
    held.process.wait()
    deadline = time.monotonic() + 10
    while alive(held.writer):  # it would keep the folder locked
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (partial,) = held.folder.glob("*.partial")
    assert partial.name.startswith("step_00000004.") and steps_in(held.config) == [2]
    train(held.config)
    log = RunFiles(held.config.run_dir).log.read_text()
    assert f"{partial}: a half-written checkpoint, passed over and removed" in log
    assert f"continued from {held.folder / 'step_00000002'}" in log
    assert steps_in(held.config) == [2, 4, 6, 8] and not list(held.folder.glob("*.partial"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_of_a_job_does_not_cost_the_save_under_way(tmp_path, corpus, number):
    held = Held(tmp_path, corpus, asynchronous=True, seconds=1)
    os.killpg(held.process.pid, number)
    assert held.process.wait(60) == 0, held.process.stderr.read()
    *earlier, last = steps_in(held.config)
    assert earlier[:2] == [2, 4] or last == 4
    assert not list(held.folder.glob("*.partial"))
    train(held.config)
    assert f"continued from {held.folder}/step_{last:08d}" in RunFiles(held.config.run_dir).log.read_text()


# --- damaged and foreign ones -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory, corpus, groups):
    """A run with checkpoints of steps 2 and 3."""
    config = tiny_run(
        corpus, tmp_path_factory.mktemp("saved"), residual=METHODS["mhar"], training={"stop_after": 3},
        checkpoint={"interval": 2}, model={"layers": "local"},
    )  # fmt: skip
    train(config)
    return config


def load(config, folder, step):
    """Load a checkpoint that lies in ``folder`` into a new model."""
    from megatron_mhar.train.checkpoint import Checkpoints
    from megatron_mhar.train.loop import Trainer
    from megatron_mhar.train.progress import ProgressLog
    from megatron_mhar.train.run_folder import RunFolder

    progress = ProgressLog(None, total=1, start=0)
    with progress:
        trainer = Trainer(config, RunFolder(config), torch.device(torch.cuda.current_device()), progress, None)
        return Checkpoints(config, folder, trainer.chunks, trainer.optimizer).load(step)


def noise(file):
    file.write_bytes(torch.randint(256, (file.stat().st_size,), dtype=torch.uint8).numpy().tobytes())


def flip(file):
    """One bit of a weight, which no format notices."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "cut to half": lambda file, other: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file, other: os.truncate(file, 0),
    "missing": lambda file, other: file.unlink(),
    "noise": lambda file, other: noise(file),
    "a bit": lambda file, other: flip(file),
    "of another step": lambda file, other: shutil.copy(other / file.name, file),
}
FILES = ("__0_0.distcp", ".metadata", "metadata.json", "integrity.json")


@pytest.fixture
def copied(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(RunFiles(saved.run_dir).checkpoints, folder)
    return folder


def test_a_checkpoint_has_the_files_that_are_damaged_here(saved, copied):
    assert sorted(entry.name for entry in (copied / "step_00000003").iterdir()) == sorted(FILES)
    progress = load(saved, copied, 3)
    assert (progress["step"], progress["samples"], len(progress["skips"]["norms"])) == (3, 12, 3)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named(saved, copied, file, damage):
    newest, other = copied / "step_00000003", copied / "step_00000002"
    before = (newest / file).read_bytes()
    DAMAGES[damage](newest / file, other)
    if (newest / file).exists() and (newest / file).read_bytes() == before:
        assert file == "metadata.json" and damage == "of another step"  # it says no more than the format
        return
    # A list of other sums accuses the files that are listed.
    named = FILES if file == "integrity.json" and damage in ("a bit", "of another step") else (file,)
    with pytest.raises(UserError) as refused:
        load(saved, copied, 3)
    message = str(refused.value)
    assert message.startswith(f"{newest}: the checkpoint cannot be loaded (") and "Remove it" in message
    assert any(message.split("(", 1)[1].startswith(name) for name in named), message
    assert load(saved, copied, 2)["step"] == 2


def test_a_folder_without_files_is_no_checkpoint(saved, tmp_path):
    (tmp_path / "step_00000009").mkdir()
    with pytest.raises(UserError, match=r"step_00000009: .*\(integrity.json is missing\)"):
        load(saved, tmp_path, 9)


FOREIGN = {
    "heads": (dict(residual=METHODS["attnres"]), r"residual\.method: 'mhar' there, 'attnres' here"),
    "num_heads": (dict(residual={"method": "mhar", "num_heads": 2}), r"residual\.num_heads: 4 there, 2 here"),
    "method": (dict(residual=METHODS["baseline"]), r"residual\.method: 'mhar' there, 'baseline' here"),
    "depth": (dict(model={"num_layers": 3, "layers": "local"}), r"model\.num_layers: 4 there, 3 here"),
    "width": (dict(model={"hidden_size": 32, "layers": "local"}), r"model\.hidden_size: 64 there, 32 here"),
}


@pytest.mark.parametrize("difference", FOREIGN)
def test_a_checkpoint_of_another_model_is_refused(saved, corpus, tmp_path, difference):
    """Also where all tensors are alike, as those of one head and of four."""
    sections, message = FOREIGN[difference]
    config = tiny_run(corpus, tmp_path, **{"residual": METHODS["mhar"], "model": {"layers": "local"}} | sections)
    with pytest.raises(UserError, match=rf"step_00000003: the checkpoint cannot be loaded \({message}\)"):
        load(config, RunFiles(saved.run_dir).checkpoints, 3)


def rename(checkpoint, renamed):
    """Give tensors other names, as a tool that converts checkpoints would, with sums that are right."""
    from megatron_mhar.train.checkpoint import _digest

    index = checkpoint / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for field in ("state_dict_metadata", "planner_data"):
        entries = getattr(metadata, field)
        if entries is not None:
            setattr(metadata, field, {renamed(name): value for name, value in entries.items()})
    metadata.storage_data = {
        replace(place, fqn=renamed(place.fqn)): value for place, value in metadata.storage_data.items()
    }
    index.write_bytes(pickle.dumps(metadata))
    manifest = json.loads((checkpoint / "integrity.json").read_text())
    manifest["files"][".metadata"] = _digest(index)
    (checkpoint / "integrity.json").write_text(json.dumps(manifest))


def test_queries_of_other_layers_are_not_loaded(saved, copied):
    def shifted(name):
        head, found, tail = name.rpartition("decoder.layers.")
        layer, _, rest = tail.partition(".")
        return f"{head}{found}{int(layer) + 1}.{rest}" if rest == "site.query" else name

    rename(copied / "step_00000003", shifted)
    with pytest.raises(UserError, match=r"step_00000003: .*\(it lacks decoder\.layers\.0\.site\.query and 3 others\)"):
        load(saved, copied, 3)


def test_tensors_that_the_model_has_not_are_named(saved, copied):
    """Not only those that it wants and does not get."""
    from megatron_mhar.train.checkpoint import Checkpoints

    rename(copied / "step_00000003", lambda name: name.replace("decoder.final_norm", "decoder.last_norm"))
    with pytest.raises(UserError, match=r"it lacks decoder\.final_norm\.weight and [34] others"):
        load(saved, copied, 3)
    asked = Checkpoints._state

    def without(self, progress, *, loading):
        state = asked(self, progress, loading=loading)
        del state["model0"]["decoder.layers.7.site.query"]
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_state", without)
        with pytest.raises(UserError, match=r"\(this model has no decoder\.layers\.7\.site\.query\)"):
            load(saved, copied, 2)


def test_a_tensor_of_another_shape_is_named(saved, copied, corpus, tmp_path):
    """Where the config says nothing: a checkpoint without it, of an older version or another tool."""
    from megatron_mhar.train.checkpoint import Checkpoints

    wide = tiny_run(corpus, tmp_path, residual=METHODS["mhar"], model={"ffn_hidden_size": 128, "layers": "local"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_check_model", lambda self, path: None)
        with pytest.raises(UserError, match=r"step_00000003: .*mlp\.linear_fc[12]\.weight"):
            load(wide, copied, 3)


# --- pruning ------------------------------------------------------------------------------------------------------


def test_the_newest_stay_and_every_third(tmp_path, corpus):
    config = tiny_run(
        corpus, tmp_path, training={"stop_after": 8, "steps": 9}, checkpoint={"interval": 1, "keep": 2, "keep_every": 3}
    )
    train(config)
    assert sorted(entry.name for entry in RunFiles(config.run_dir).checkpoints.iterdir()) == [
        f"step_{step:08d}" for step in (3, 6, 7, 8)
    ]


def test_an_old_checkpoint_that_cannot_be_removed_is_none_any_more(tmp_path, corpus, monkeypatch):
    def interrupted(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(5, "Input/output error")

    config = tiny_run(corpus, tmp_path, checkpoint={"interval": 4, "keep": 1})
    monkeypatch.setattr("megatron_mhar.train.checkpoint.shutil.rmtree", interrupted)
    train(config)
    assert steps_in(config) == [8]
    log = RunFiles(config.run_dir).log.read_text()
    assert "step_00000004: the old checkpoint cannot be removed (Input/output error)" in log
