"""Whole training runs with fused kernels: as with plain reads, the same to the bit when repeated, and in FP8.

On a GPU the 100M recipe for 200 steps; without one a tiny model for a few, in Triton's interpreter.
"""

import itertools
import statistics

import pytest
import torch

from tests.conftest import METHODS, tiny_run, write_texts

GPU = torch.cuda.is_available()
STEPS = 200 if GPU else 3
VOCABULARY = 151936


def write(folder):
    """Tokens for all steps, each seen once.

    As frequent as those of a language: the loss then falls step by step, as it does on text, and not at once when all
    of a small world has been understood, where being half a step ahead is two percent.
    """
    documents = (("train", 4000 if GPU else 60), ("valid", 100 if GPU else 20))
    write_texts(folder, vocab_size=VOCABULARY if GPU else 128, documents=documents, length=1000 if GPU else 100)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write(folder)
    return folder


def recipe(texts, folder, name, **training):
    """The 100M recipe on a GPU, whose first steps are run: its schedule is as it is."""
    from megatron_mhar.config.load import load_config
    from tests.launch import ROOT

    given = [
        f"name={name}", f"output_dir={folder}", f"data.train=[{texts}/train]", f"data.valid=[{texts}/valid]",
        "data.end_of_document=0", "data.num_workers=0", "tracking.enabled=false", "training.global_batch_size=8",
        "training.micro_batch_size=8", "training.deterministic=true", *(f"{k}={v}" for k, v in training.items()),
    ]  # fmt: skip
    return load_config(ROOT / "configs/100m/mhar.yaml", given)


def losses(config):
    """Of every step, from a model of its own."""
    from megatron_mhar import platform
    from megatron_mhar.train.distributed import initialize
    from megatron_mhar.train.loop import Trainer
    from megatron_mhar.train.progress import ProgressLog
    from megatron_mhar.train.run_folder import RunFolder

    device = initialize(config)
    folder = RunFolder(config)
    folder.prepare()
    trainer = Trainer(config, folder, device, ProgressLog(None, total=STEPS, start=0), None)
    size = config.training.global_batch_size
    batches = trainer._batches(trainer.train_set, 0, STEPS * size)
    found = [trainer.train_step(batches)[0].clone() for _ in itertools.repeat(None, STEPS)]
    platform.synchronize()
    trainer.release()
    return [float(loss) for loss in found]


@pytest.fixture(scope="module")
def runs(texts, tmp_path_factory, groups):
    """Losses of a run with the kernels and one with plain reads, and of the first one once more."""
    folder = tmp_path_factory.mktemp("runs")
    if GPU:
        configs = [recipe(texts, folder, name, **{"residual.backend": backend}) for name, backend in
                   (("kernels", "triton"), ("again", "triton"), ("plain", "torch"))]  # fmt: skip
    else:
        configs = [
            tiny_run(texts, folder, name=name, residual=METHODS["mhar"] | {"backend": backend},
                     model={"num_layers": 2}, training={"steps": STEPS, "sequence_length": 8, "global_batch_size": 2})
            for name, backend in (("kernels", "triton"), ("again", "triton"), ("plain", "torch"))
        ]  # fmt: skip
    return {config.name: losses(config) for config in configs}


def test_a_run_is_the_same_when_it_is_repeated(runs):
    assert runs["kernels"] == runs["again"]


def test_losses_are_those_of_plain_reads(runs):
    kernels, plain = runs["kernels"], runs["plain"]
    if not GPU:
        assert kernels == pytest.approx(plain, rel=1e-5)
        return
    assert kernels[-1] < kernels[0] - 1, "it has learned something"
    # bf16: single steps wander apart by its noise, which grows as weights do; means over twenty do not.
    for start in range(0, STEPS, 20):
        one, other = (statistics.fmean(run[start : start + 20]) for run in (kernels, plain))
        assert one == pytest.approx(other, rel=5e-3), f"steps {start} to {start + 19}"


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("scaling", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_fp8_follows_bf16(request, texts, tmp_path, groups, scaling):
    pytest.importorskip("transformer_engine")
    from megatron_mhar.model.fp8 import recipes_here

    if reason := recipes_here()[scaling]:
        pytest.skip(reason)
    bf16 = request.getfixturevalue("runs")["kernels"]
    found = losses(recipe(texts, tmp_path, scaling, **{"training.precision": "fp8", "training.fp8.recipe": scaling}))

    def mean(run, start):
        return statistics.fmean(run[start : start + 20])

    off = {start: mean(found, start) / mean(bf16, start) - 1 for start in range(20, STEPS, 20)}
    told = ", ".join(f"{share:+.2%} from step {start} on" for start, share in off.items())
    print(f"{scaling}: {told}")
    for start, share in off.items():  # the loss hardly falls in the second half: there is less to be off by
        assert abs(share) <= (1e-2 if start < STEPS // 2 else 2e-3), f"means over 20 steps are off by {told}"
