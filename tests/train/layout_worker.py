"""Five training steps of every method under each layout of this world size: losses, gradient norms, depth gradients.

python -m torch.distributed.run --nproc-per-node N layout_worker.py OUT CORPUS
"""

import os
import sys
from pathlib import Path

import torch

from megatron_mhar import platform
from tests.conftest import METHODS, tiny_run

LAYOUTS = {
    1: {"one": {}},
    2: {
        "tp2": {"tensor": 2},
        "tp2_sp": {"tensor": 2, "sequence": True},
        "dp2": {},
        "dp2_overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    },
}
STEPS = 5
# Layers are megatron-core's own: Transformer Engine multiplies fp32 matrices in TF32, which hides 1e-5.
# Norms on heads change which parameters megatron-core sums over tensor-parallel ranks, by their names.
CASES = [(method, True) for method in METHODS] + [("mhar", False), ("delta_block", False)]


def gradients(model):
    """Depth gradients as the optimizer will see them, whole on every rank."""
    for buffer in model.buffers:
        for bucket in buffer.buckets:
            group = bucket.data_parallel_group if hasattr(bucket, "data_parallel_group") else buffer.data_parallel_group
            shards = bucket.grad_data.view(group.size(), -1)
            torch.distributed.all_gather_into_tensor(bucket.grad_data, shards[group.rank()].clone(), group=group)
    return {n: p.main_grad.clone() for n, p in model.module.named_parameters() if "site." in n}


def run(config):
    """Losses, norms, gradients and evaluation of one run; queries and gates are moved off zero first."""
    from megatron.core.distributed import finalize_model_grads

    from megatron_mhar.model.initialize import generator
    from megatron_mhar.train.distributed import data_parallel_mean
    from megatron_mhar.train.loop import Trainer
    from megatron_mhar.train.progress import ProgressLog
    from megatron_mhar.train.run_folder import RunFolder

    device = torch.device(torch.cuda.current_device())
    trainer = Trainer(config, RunFolder(config), device, ProgressLog(None, total=STEPS, start=0), None)
    with torch.no_grad():
        for name, parameter in trainer.model.module.named_parameters():
            if "site." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator(7, name, "cpu")).to(device))
    seen = []

    def watched(*args, **kwargs):
        finalize_model_grads(*args, **kwargs)
        seen.append(gradients(trainer.model))

    trainer.model.config.finalize_model_grads_func = watched
    batches = trainer._batches(trainer.train_set, 0, STEPS * config.training.global_batch_size)
    losses, norms = [], []
    for _ in range(STEPS):
        loss, norm = trainer.train_step(batches)
        losses.append(float(data_parallel_mean(loss)))
        norms.append(norm)
    result = {"losses": losses, "norms": norms, "gradients": seen, "valid": trainer.evaluate()}
    return result


def stopped_and_resumed(corpus, folder, layout, parallel):
    """Journal and summary of one whole bf16 run, and of one that is stopped between evaluations and goes on."""
    from megatron_mhar.run_files import RunFiles
    from megatron_mhar.tracking.journal import load_metrics
    from megatron_mhar.train.loop import train

    found = {}
    for name, stops in (("whole", [None]), ("parts", [5, None])):
        for stop_after in stops:
            config = tiny_run(
                corpus, folder, name=f"{layout}-{name}", residual=METHODS["mhar"], parallel=parallel,
                model={"layers": "local"}, optimizer={"ema_decay": 0.9, "lr": 1e-2}, evaluation={"interval": 8},
                training={"micro_batch_size": 1, "precision": "bf16", "stop_after": stop_after},
            )  # fmt: skip
            summary = train(config)
        torch.distributed.barrier()
        found[name] = load_metrics(RunFiles(config.run_dir).journal), summary
    return found


def main():
    out, corpus = Path(sys.argv[1]), Path(sys.argv[2])
    world = int(os.environ["WORLD_SIZE"])
    results = {}
    from megatron.core import parallel_state

    from megatron_mhar.train.distributed import initialize

    platform.setup(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(platform.BACKEND)
    for layout, parallel in LAYOUTS[world].items():
        initialize(tiny_run(corpus, out.parent, parallel=parallel))  # groups take longer to build than five steps
        for method, qk_layernorm in CASES:
            config = tiny_run(
                corpus, out.parent, name=f"{layout}-{method}", residual=METHODS[method], parallel=parallel,
                model={"qk_layernorm": qk_layernorm, "layers": "local"}, optimizer={"ema_decay": 0.9, "z_loss": 1e-3},
                training={"micro_batch_size": 1},
            )  # fmt: skip
            results[layout, method, qk_layernorm] = run(config)
        results["resumed", layout] = stopped_and_resumed(corpus, out.parent, layout, parallel)
        parallel_state.destroy_model_parallel()
    if int(os.environ["RANK"]) == 0:
        torch.save(results, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
