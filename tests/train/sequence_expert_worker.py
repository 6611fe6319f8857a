"""Context parallelism and mixtures of experts, alone and with pipelines, held against one process.

python -m torch.distributed.run --nproc-per-node N sequence_expert_worker.py OUT CORPUS REFERENCE TIER

REFERENCE is what the launch with one process wrote; the folders of whole runs lie beside OUT. TIER is "fast" or "all".
"""

import os
import sys
from pathlib import Path

import torch

from megatron_mhar import platform
from tests.conftest import METHODS, tiny_run
from tests.train.layout_worker import run

DENSE = {}
MIXED = {"pattern": "*E*-*E*-", "num_experts": 4, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.1}
ENDS = MIXED | {"pattern": "*-*-*E*E"}  # of two stages the first has no experts
TOP1 = MIXED | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_topk": 1}
MODELS = {"dense": DENSE, "mixed": MIXED, "ends": ENDS, "top1": TOP1}
# By number of ranks: layout, its model and its parallel keys.
LAYOUTS = {
    1: {f"one_{model}": (model, {}) for model in MODELS},
    2: {
        "cp2": ("dense", {"context": 2}),
        "cp2_ep2": ("mixed", {"context": 2, "expert": 2}),
        "ep2": ("mixed", {"expert": 2}),
        "ep2_top1": ("top1", {"expert": 2}),
        "ep2_overlap": ("mixed", {"expert": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
        "ep2_recompute": ("mixed", {"expert": 2}),
        "tp2_sp": ("mixed", {"tensor": 2, "sequence": True}),
        "pp2": ("mixed", {"pipeline": 2, "stage_sublayers": [3, 5]}),
        "pp2_vpp2": ("mixed", {"pipeline": 2, "virtual_stages": 2}),
    },
    4: {
        "cp2_pp2": ("dense", {"context": 2, "pipeline": 2}),
        "pp2_ep2": ("ends", {"pipeline": 2, "expert": 2}),
        "tp2_sp_ep2": ("mixed", {"tensor": 2, "sequence": True, "expert": 2}),
    },
}
TRAINING = {"ep2_recompute": {"recompute": "full", "recompute_sublayers": 2}}
# Blocks of one layer: with stages of 3 and 5 sublayers one of them straddles their boundary.
CASES = {"mhar_block": METHODS["mhar_block"] | {"block_layers": 1}, "delta_block": METHODS["delta_block"]}
# In the tier of all, every method in the plain layouts and what they are held against.
EVERY_METHOD = ("one_dense", "one_mixed", "cp2", "ep2")


def cases(layout, tier):
    """Methods of a layout, with their settings."""
    return METHODS | CASES if tier == "all" and layout in EVERY_METHOD else CASES


# Whole runs: name, model, parallel keys, and where they stop, if they do. Those of one name go on with one another.
RUNS = {
    1: [("one", MIXED, {}, None), ("one_ends", ENDS, {}, None), ("one_dense", DENSE, {}, None),
        ("one_then_ep2", MIXED, {}, 4)],
    2: [("ep2", MIXED, {"expert": 2}, None), ("ep2_then_ep2", MIXED, {"expert": 2}, 4),
        ("ep2_then_ep2", MIXED, {"expert": 2}, None), ("one_then_ep2", MIXED, {"expert": 2}, None),
        ("ep2_then_one", MIXED, {"expert": 2}, 4), ("cp2", DENSE, {"context": 2}, None)],
    4: [("pp2_ep2_parts", ENDS, {"pipeline": 2, "expert": 2}, 4),
        ("pp2_ep2_parts", ENDS, {"pipeline": 2, "expert": 2}, None)],
}  # fmt: skip


def whole_run(corpus, folder, name, model, parallel, stop_after):
    """Config of a run of ``RUNS``; the epsilon keeps gradients of the size of rounding from moving weights."""
    return tiny_run(
        corpus, folder, name=name, residual=METHODS["mhar"], parallel=parallel, model={"layers": "local", **model},
        optimizer={"ema_decay": 0.9, "eps": 1e-3}, training={"micro_batch_size": 1, "stop_after": stop_after},
    )  # fmt: skip


def main():
    out, corpus, reference, tier = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    world = int(os.environ["WORLD_SIZE"])
    expected = torch.load(reference, weights_only=False) if world > 1 else None
    results = {}
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from megatron_mhar.model import specs
    from megatron_mhar.train import loop
    from megatron_mhar.train.distributed import initialize
    from tests.gathering_attention import GatheringAttention

    platform.setup(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(platform.BACKEND)
    attention, check_layers = specs.DotProductAttention, loop.check_layers

    def start(model, parallel):
        initialize(tiny_run(corpus, out.parent, model=model, parallel=parallel))
        gathers = parallel.get("context", 1) > 1
        specs.DotProductAttention = GatheringAttention if gathers else attention
        # What it refuses, local layers under context parallelism, is what the other attention is for.
        loop.check_layers = (lambda config: "local") if gathers else check_layers

    for layout, (model, parallel) in LAYOUTS[world].items():
        start(MODELS[model], parallel)
        for method, residual in cases(layout, tier).items():
            config = tiny_run(
                corpus, out.parent, name=f"{layout}-{method}", residual=residual, parallel=parallel,
                model={"layers": "local", **MODELS[model]}, optimizer={"ema_decay": 0.9, "z_loss": 1e-3, "eps": 1e-3},
                training={"micro_batch_size": 1, **TRAINING.get(layout, {})},
            )  # fmt: skip
            results[layout, method] = run(config, expected and expected[f"one_{model}", method])
        parallel_state.destroy_model_parallel()
    for name, model, parallel, stop_after in RUNS[world]:
        start(model, parallel)
        destroy_moe_metrics_tracker()
        loop.train(whole_run(corpus, out.parent, name, model, parallel, stop_after))
        parallel_state.destroy_model_parallel()
    if int(os.environ["RANK"]) == 0:
        torch.save(results, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
