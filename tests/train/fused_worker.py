"""One training step and one evaluation over virtual pipeline stages, with fused and with plain reads.

python -m torch.distributed.run --nproc-per-node 2 fused_worker.py OUT CORPUS
"""

import os
import sys
from pathlib import Path

import torch

from megatron_mhar import platform
from tests.conftest import METHODS, tiny_run
from tests.train.layout_worker import gradients

CASES = {
    ("mhar", "none"): {},
    ("delta_block", "none"): {},
    ("mhar", "full"): {"recompute": "full", "recompute_sublayers": 2},
}
PARALLEL = {"pipeline": 2, "virtual_stages": 2}


def step(config):
    """Loss, gradient norm, gradients of this rank and validation loss; queries and gates are moved off zero first."""
    from megatron.core.distributed import finalize_model_grads

    from megatron_mhar.model.initialize import generator, global_name
    from megatron_mhar.train.distributed import mean_of_last_stage
    from megatron_mhar.train.loop import Trainer
    from megatron_mhar.train.progress import ProgressLog
    from megatron_mhar.train.run_folder import RunFolder

    device = torch.device(torch.cuda.current_device())
    trainer = Trainer(config, RunFolder(config), device, ProgressLog(None, total=1, start=0), None)
    found = {}
    with torch.no_grad():
        for model in trainer.models:
            for name, parameter in model.named_parameters():
                if "site." in name:
                    noise = torch.randn(parameter.shape, generator=generator(7, global_name(model, name), "cpu"))
                    parameter.add_(0.2 * noise.to(device))

    def watched(*args, **kwargs):
        finalize_model_grads(*args, **kwargs)
        found.update(gradients(trainer.chunks))

    trainer.chunks[0].config.finalize_model_grads_func = watched
    batches = trainer._batches(trainer.train_set, 0, config.training.global_batch_size)
    loss, norm = trainer.train_step(batches)
    return {"loss": float(mean_of_last_stage(loss, 1)), "norm": norm, "valid": trainer.evaluate(), "gradients": found}


def main():
    out, corpus = Path(sys.argv[1]), Path(sys.argv[2])
    from megatron_mhar.train.distributed import initialize

    platform.setup(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(platform.BACKEND)
    initialize(tiny_run(corpus, out.parent, parallel=PARALLEL))
    results = {}
    for (method, recompute), training in CASES.items():
        for backend in ("torch", "triton"):
            config = tiny_run(
                corpus, out.parent, name=f"{method}-{recompute}-{backend}", parallel=PARALLEL,
                residual=METHODS[method] | {"backend": backend}, evaluation={"batches": 1},
                model={"layers": "local", "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2},
                training={"sequence_length": 4, "global_batch_size": 2, "micro_batch_size": 1, **training},
            )  # fmt: skip
            everyone = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, step(config))
            results[method, recompute, backend] = everyone
    if int(os.environ["RANK"]) == 0:
        torch.save(results, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
