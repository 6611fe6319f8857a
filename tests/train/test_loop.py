"""The loop on one rank: accumulation, evaluation, what is logged."""

import gc
import math

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_mhar.run_files import RunFiles
from megatron_mhar.tracking.journal import load_metrics
from tests.conftest import METHODS, tiny_run

pytestmark = pytest.mark.usefixtures("one_rank")


def train(config):
    from megatron_mhar.train.loop import train

    train(config)
    return load_metrics(RunFiles(config.run_dir).journal)


@pytest.mark.parametrize("method", ["baseline", "mhar", "delta_block"])
def test_accumulated_micro_batches_train_as_one_big_batch(tmp_path, corpus, method):
    runs = [
        train(tiny_run(corpus, tmp_path, name=f"micro{size}", residual=METHODS[method],
                       training={"micro_batch_size": size}, optimizer={"z_loss": 1e-2}))
        for size in (4, 2, 1)
    ]  # fmt: skip
    for other in runs[1:]:
        for metric in ("train/loss", "valid/loss"):
            expected = [v for _, v in runs[0][metric]]
            assert [v for _, v in other[metric]] == pytest.approx(expected, rel=1e-5)
        assert [v for _, v in other["train/grad_norm"]] == pytest.approx(
            [v for _, v in runs[0]["train/grad_norm"]], rel=1e-3
        )


def test_it_learns(tmp_path, corpus):
    """The corpus is a walk with three equally likely steps: ln 3 = 1.10 is the best there is, ln 128 = 4.85 a guess."""
    for method in ("baseline", "mhar"):
        config = tiny_run(
            corpus, tmp_path, name=method, residual=METHODS[method], optimizer={"lr": 1e-2, "warmup_steps": 5},
            training={"steps": 60, "global_batch_size": 8, "micro_batch_size": 8}, evaluation={"interval": 60},
        )  # fmt: skip
        metrics = train(config)
        (_, loss) = metrics["valid/loss"][-1]
        assert math.log(3) - 0.05 < loss < 2.5, method


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("method", ["baseline", "mhar"])
def test_a_trainer_that_is_released_leaves_no_memory(tmp_path, corpus, method, overlap):
    """Neither weights nor gradients nor the optimizer's: the next model of the process may need all there is."""
    from megatron_mhar.train.distributed import initialize
    from megatron_mhar.train.loop import Trainer
    from megatron_mhar.train.progress import ProgressLog
    from megatron_mhar.train.run_folder import RunFolder

    parallel = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    config = tiny_run(corpus, tmp_path, residual=METHODS[method], parallel=parallel, training={"precision": "bf16"})
    trainer = Trainer(config, RunFolder(config), initialize(config), ProgressLog(None, total=1, start=0), None)
    trainer.train_step(trainer._batches(trainer.train_set, 0, config.training.global_batch_size))
    optimizer, (chunk,) = trainer.optimizer.megatron, trainer.chunks
    tensors = [*chunk.parameters(), *(buffer.grad_data for buffer in chunk.buffers)]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors += [parameter, *(t for t in optimizer.chained_optimizers[0].optimizer.state[parameter].values())]
    held = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    assert len(held) > 3 * len(optimizer.param_groups)
    trainer.release()
    del trainer, optimizer, chunk, tensors, group, parameter
    gc.collect()
    assert not [number for number, storage in enumerate(held) if not storage.expired()]


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_finding_fp8_scales_changes_nothing_else(tmp_path, corpus, monkeypatch, model):
    """Neither weights nor the order of data nor what is logged. That layers lack scales is the test's word here."""
    from megatron_mhar.train import loop

    experts = {"pattern": "*E*-*E*-", "num_experts": 4, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.1}
    keys = {"residual": METHODS["mhar"], "model": experts if model == "experts" else {}}
    plain = train(tiny_run(corpus, tmp_path, name="plain", **keys))
    begin, gradients, batches = loop.Trainer.__init__, loop.Trainer._gradients, []

    def begins(self, *args, **arguments):
        begin(self, *args, **arguments)
        self._may_lack_scales = True

    def counted(self, batch):
        batches.append(batch[0]["tokens"].sum().item())
        return gradients(self, batch)

    monkeypatch.setattr(loop.Trainer, "__init__", begins)
    monkeypatch.setattr(loop.Trainer, "_gradients", counted)
    for lacks, passes in ((True, 3), (False, 0)):
        monkeypatch.setattr(loop, "lacks_scales", lambda module, lacks=lacks: lacks)
        batches.clear()
        found = train(tiny_run(corpus, tmp_path, name=f"lacks-{lacks}", **keys))
        assert len(batches) == 8 + passes and len(set(batches[: passes + 1])) == 1 and len(set(batches)) > 4
        assert found.keys() == plain.keys()
        measured = {"train/tokens_per_second", "train/peak_memory_bytes", "train/mfu", "train/mfu_of_routing"}
        for metric in plain.keys() - measured:
            assert found[metric] == plain[metric], metric


def test_z_loss_draws_the_partition_down(tmp_path, corpus):
    """The reported loss is the cross entropy in both runs; with the z-loss the logits' partition ends nearer to one."""
    found = {}
    for z_loss in (0.0, 0.1):
        config = tiny_run(corpus, tmp_path, name=f"z{z_loss}", optimizer={"z_loss": z_loss, "lr": 1e-2})
        found[z_loss] = train(config)
    first = [run["train/loss"][0] for run in found.values()]
    assert first[0] == first[1]  # not counted in what is reported
    assert found[0.1]["train/grad_norm"][0][1] > found[0.0]["train/grad_norm"][0][1]


def test_every_step_is_in_the_journal_whatever_the_interval(tmp_path, corpus):
    every = train(tiny_run(corpus, tmp_path, name="every"))
    seldom = train(tiny_run(corpus, tmp_path, name="seldom", training={"log_interval": 5}))
    assert [s for s, _ in seldom["train/loss"]] == list(range(1, 9))
    assert seldom["train/loss"] == every["train/loss"] and seldom["valid/loss"] == every["valid/loss"]
    assert [s for s, _ in seldom["train/tokens_per_second"]] == [4, 5, 8]
    assert seldom["train/tokens"][-1] == (8, 8 * 4 * 32)


def test_what_a_start_says_of_an_evaluation_and_of_a_stop(tmp_path, corpus):
    """More batches than there are samples, and a stop that was come to before."""
    keys = {"residual": METHODS["mhar"], "training": {"stop_after": 1}}
    config = tiny_run(corpus, tmp_path, **keys, evaluation={"batches": 1000})
    train(config)
    log = RunFiles(config.run_dir).log
    first = log.read_text()
    assert "evaluation.batches: 1000 given, but data.valid has " in first and "run: mhar with H = 4, " in first
    train(config)
    second = log.read_text().removeprefix(first)
    assert "step 1, saved at step 1; with a later training.stop_after, or none, the same command goes on" in second
    config = tiny_run(corpus, tmp_path, name="enough", **keys)
    train(config)
    assert "evaluation.batches" not in RunFiles(config.run_dir).log.read_text()


def test_an_evaluation_holds_no_more_than_a_global_batch(tmp_path, corpus, monkeypatch):
    from megatron_mhar.train import loop

    events, batches, mean_loss = [], loop.micro_batches, loop.Trainer._mean_loss

    def read(dataset, **keys):
        for batch in batches(dataset, **keys):
            events.append("read")
            yield batch

    def run(self, batch, **keys):
        events.append("run")
        return mean_loss(self, batch, **keys)

    monkeypatch.setattr(loop, "micro_batches", read)
    monkeypatch.setattr(loop.Trainer, "_mean_loss", run)
    train(tiny_run(corpus, tmp_path, training={"stop_after": 1}, evaluation={"batches": 5, "interval": 1}))
    assert events == ["read", "read", "run"] * 6


def test_evaluation_leaves_training_as_it_was(tmp_path, corpus):
    often = train(tiny_run(corpus, tmp_path, name="often", evaluation={"interval": 1}, optimizer={"ema_decay": 0.5}))
    once = train(tiny_run(corpus, tmp_path, name="once", evaluation={"interval": 8}, optimizer={"ema_decay": 0.5}))
    assert often["train/loss"] == once["train/loss"]
    assert often["valid/loss"][-1] == once["valid/loss"][-1] and len(often["valid/loss"]) == 8


def test_the_average_is_what_is_evaluated(tmp_path, corpus):
    plain = train(tiny_run(corpus, tmp_path, name="plain"))
    nothing = train(tiny_run(corpus, tmp_path, name="nothing", optimizer={"ema_decay": 1 - 1e-9}))
    assert plain["train/loss"] == nothing["train/loss"]
    first = plain["train/loss"][0][1]
    # An average that hardly moves stays at the initial weights, whose loss is a guess.
    assert nothing["valid/loss"][-1][1] == pytest.approx(nothing["valid/loss"][0][1], abs=1e-4)
    assert abs(nothing["valid/loss"][-1][1] - first) < 0.3 < first - plain["valid/loss"][-1][1] + 0.3


def test_no_validation_files_no_validation(tmp_path, corpus):
    metrics = train(tiny_run(corpus, tmp_path, data={"valid": []}))
    assert "valid/loss" not in metrics and len(metrics["train/loss"]) == 8


def test_bf16_follows_fp32(tmp_path, corpus):
    runs = [train(tiny_run(corpus, tmp_path, name=p, residual=METHODS["mhar"], training={"precision": p}))
            for p in ("fp32", "bf16")]  # fmt: skip
    for (_, a), (_, b) in zip(*(run["train/loss"] for run in runs)):
        assert a == pytest.approx(b, abs=0.02)


def test_loader_workers_give_the_same_run(tmp_path, corpus):
    runs = [train(tiny_run(corpus, tmp_path, name=f"w{n}", data={"num_workers": n})) for n in (0, 2)]
    assert runs[0]["train/loss"] == runs[1]["train/loss"]


def test_utilisation_is_a_share_of_the_peak(tmp_path, corpus):
    from megatron_mhar import platform
    from megatron_mhar.train.throughput import model_flops, peak_flops, routing_flops

    config = tiny_run(corpus, tmp_path, residual=METHODS["mhar"], training={"peak_tflops": 0.5})
    metrics = train(config)
    for name, flops in (("train/mfu", model_flops(config)), ("train/mfu_of_routing", routing_flops(config))):
        expected = [speed * flops / 0.5e12 for _, speed in metrics["train/tokens_per_second"]]
        assert [share for _, share in metrics[name]] == pytest.approx(expected)
    log = RunFiles(config.run_dir).log.read_text()
    model, routing = (f"{flops(config) / 1e9:.3g}" for flops in (model_flops, routing_flops))
    assert f"{model} GFLOP a token, and {routing} of routing; MFU is of 0.5 TFLOP/s a device" in log
    metrics = train(tiny_run(corpus, tmp_path, name="other"))
    # A GPU's peak is known, as a rule; that of a CPU is not.
    assert any("mfu" in name for name in metrics) == (peak_flops(platform.device_name(), "fp32") is not None)


@pytest.mark.parametrize("method", ["baseline", "mhar", "mhar_block", "delta", "delta_block_released"])
def test_entropy_and_gates_of_every_site_are_logged_with_each_evaluation(tmp_path, corpus, method):
    from megatron_mhar.run_files import RoutingMap

    config = tiny_run(corpus, tmp_path, residual=METHODS[method], optimizer={"lr": 1e-2})
    metrics = {name: values for name, values in train(config).items() if name.startswith("routing/")}
    first = {"mhar": 1, "mhar_block": 1, "delta": 0, "delta_block_released": 1}  # sites before it have no choice
    last = 9 if "mhar" in method else 8  # the final site is of replacement methods
    sites = range(first[method], last) if method in first else range(0)
    gates = range(8) if "delta" in method else range(0)
    assert set(metrics) == {
        *(f"routing/{name}/site_{site:03}" for name, found in (("entropy", sites), ("gate", gates)) for site in found),
        *(f"routing/{name}/mean" for name, found in (("entropy", sites), ("gate", gates)) if found),
    }
    if not metrics:
        return
    assert all([step for step, _ in values] == [4, 8] for values in metrics.values())
    routing = RoutingMap.read(RunFiles(config.run_dir).routing)
    assert {name: values[-1][1] for name, values in metrics.items()} == routing.metrics()
    entropies = [metrics[f"routing/entropy/site_{site:03}"][-1][1] for site in sites]
    assert all(0.5 < entropy <= 1 for entropy in entropies) and min(entropies) < 1 - 1e-6
    # The mean of entropies is below the entropy of the mean, and not by much where tokens are alike.
    of_mean = -(routing.weights * np.log(np.where(routing.weights > 0, routing.weights, 1))).sum(-1).mean(1)
    ratio = of_mean[sites.start :] / np.log(routing.reads.sum(1)[sites.start :])
    assert (ratio >= np.array(entropies) - 1e-6).all() and (ratio - np.array(entropies) < 0.1).all()
    assert metrics["routing/entropy/mean"][-1][1] == pytest.approx(np.mean(entropies))
    moved = [metrics[f"routing/gate/site_{site:03}"][-1][1] for site in gates]
    assert len(set(moved)) == len(gates)


def test_routing_is_looked_at_in_part_until_the_last_evaluation(tmp_path, corpus):
    """Of two global batches the first alone, whose samples are those of an evaluation of one."""
    one, two = (
        train(tiny_run(corpus, tmp_path, name=f"{n}", residual=METHODS["mhar"], evaluation={"batches": n}))
        for n in (1, 2)
    )
    for name in ("routing/entropy/mean", "routing/entropy/site_003"):
        assert one[name][0] == two[name][0] and one[name][1] != two[name][1]
    assert one["valid/loss"][0] != two["valid/loss"][0]
