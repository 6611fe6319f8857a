"""A run that goes on with other layers and other routing kernels is the same run."""

import pytest
import torch

from megatron_mhar.run_files import RunFiles
from megatron_mhar.tracking.journal import load_metrics
from tests.conftest import METHODS, tiny_run
from tests.model.test_stack import transformer_engine_runs
from tests.train.test_resume import final_state

pytestmark = pytest.mark.usefixtures("one_rank")
GPU = torch.cuda.is_available()
# Layers and kernels of two steps each.
TURNS = [("local", "torch"), ("local", "triton"), ("local", "torch"), ("local", "triton")]
IN_TURNS = {"kernels": TURNS} | (
    {
        "layers and kernels": [
            ("local", "triton"), ("transformer_engine", "torch"), ("local", "torch"), ("transformer_engine", "triton")
        ],
        "from Transformer Engine": [
            ("transformer_engine", "triton"), ("local", "triton"), ("transformer_engine", "torch"), ("local", "torch")
        ],
    }
    if transformer_engine_runs()
    else {}
)  # fmt: skip


def train(corpus, folder, name, layers, backend, *, method, stop_after):
    from megatron_mhar.train.loop import train

    training = {"steps": 8, "stop_after": stop_after}
    if not GPU:  # Triton's interpreter is slow
        training |= {"sequence_length": 8, "global_batch_size": 2}
    config = tiny_run(
        corpus, folder, name=name, residual=METHODS[method] | {"backend": backend}, training=training,
        model={"layers": layers, "num_layers": 2}, optimizer={"lr": 1e-2, "warmup_steps": 1},
        evaluation={"interval": 100},
    )  # fmt: skip
    train(config)
    return config


@pytest.mark.parametrize("turns", IN_TURNS)
@pytest.mark.parametrize("method", ["mhar", "delta_block"])
def test_a_run_goes_on_with_other_layers_and_kernels(tmp_path, corpus, method, turns):
    """Against the run that never changes: a tensor that got lost would be off by all that it has moved."""
    stops = (2, 4, 6, None)
    before = None
    for stop in (2, None):
        whole = train(corpus, tmp_path, "whole", "local", "torch", method=method, stop_after=stop)
        before = before or final_state(whole)[0]
    for (layers, backend), stop in zip(IN_TURNS[turns], stops, strict=True):
        parts = train(corpus, tmp_path, "parts", layers, backend, method=method, stop_after=stop)
    expected, found = (load_metrics(RunFiles(config.run_dir).journal) for config in (whole, parts))
    # Transformer Engine multiplies fp32 matrices in TF32.
    precise = {layers for layers, _ in IN_TURNS[turns]} == {"local"}
    for metric in ("train/loss", "train/grad_norm"):
        values = [value for _, value in expected[metric]]
        assert [value for _, value in found[metric]] == pytest.approx(values, rel=1e-5 if precise else 5e-3), metric
    tensors, others = final_state(whole)[0], final_state(parts)[0]
    assert tensors.keys() <= others.keys() | {key for key in tensors if key.endswith("_extra_state")}
    compared = 0
    for key, tensor in tensors.items():
        moved = (tensor - before[key]).norm() if tensor.is_floating_point() else 0
        if moved > 0:
            compared += 1
            off = (others[key] - tensor).norm() / moved
            assert off < (1e-2 if precise else 0.15), f"{key} is off by {off:.2g} of what it moved since step 2"
    assert compared > 30


PRECISIONS = [("bf16", "fp8"), ("fp8", "bf16")] if transformer_engine_runs() else [("bf16", "bf16")]


@pytest.mark.parametrize(("first", "second"), PRECISIONS)
@pytest.mark.parametrize("method", ["mhar", "delta_block"])
def test_a_checkpoint_moves_between_precisions(tmp_path, corpus, method, first, second):
    """In FP8 Transformer Engine's product holds the norm's weight, in bf16 the site's or the norm before it."""
    from megatron_mhar.train.checkpoint import Checkpoints
    from megatron_mhar.train.distributed import initialize
    from megatron_mhar.train.loop import Trainer, train
    from megatron_mhar.train.progress import ProgressLog
    from megatron_mhar.train.run_folder import RunFolder

    given, moved = (
        tiny_run(corpus, tmp_path, name=name, residual=METHODS[method], model={"num_layers": 2},
                 training={"precision": precision, "steps": 2}, optimizer={"lr": 1e-2, "warmup_steps": 1})
        for name, precision in (("given", first), ("moved", second))
    )  # fmt: skip
    train(given)
    device, files = initialize(moved), RunFiles(moved.run_dir)
    RunFolder(moved).prepare()
    trainer = Trainer(moved, RunFolder(moved), device, ProgressLog(None, total=2, start=0), None)
    parts = trainer.chunks, trainer.optimizer
    with Checkpoints(moved, files.checkpoints, *parts) as own:
        own.save(2, Checkpoints(given, RunFiles(given.run_dir).checkpoints, *parts).load(2))
    trainer.release()
    tensors, others = (
        {key: tensor for key, tensor in final_state(config)[0].items() if not key.endswith("_extra_state")}
        for config in (given, moved)
    )
    assert tensors.keys() == others.keys() and len(tensors) > 30
    for key, tensor in tensors.items():
        assert torch.equal(others[key], tensor), key
