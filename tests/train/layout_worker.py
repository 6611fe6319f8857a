"""Five training steps of every method under each layout of this world size, held against one process.

python -m torch.distributed.run --nproc-per-node N layout_worker.py OUT CORPUS REFERENCE TIER

REFERENCE is what the launch with one process wrote; TIER is "fast" or "all".
"""

import gc
import os
import sys
import zlib
from functools import partial
from pathlib import Path

import torch

from megatron_mhar import platform
from tests.conftest import METHODS, tiny_run
from tests.train.poison import poisoned

LAYOUTS = {
    1: {"one": {}},
    2: {
        "tp2": {"tensor": 2},
        "tp2_sp": {"tensor": 2, "sequence": True},
        "dp2": {},
        "dp2_overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        "pp2": {"pipeline": 2},
        "pp2_uneven": {"pipeline": 2, "stage_sublayers": [3, 5]},
        "pp2_recompute": {"pipeline": 2},
        "pp2_vpp2": {"pipeline": 2, "virtual_stages": 2},
        "pp2_vpp2_uncached": {"pipeline": 2, "virtual_stages": 2, "history_cache": False},
        "pp2_vpp2_ends": {"pipeline": 2, "virtual_stages": 2, "stage_sublayers": [0, 3, 5, 0]},
        "pp2_vpp4": {"pipeline": 2, "virtual_stages": 4, "overlap_p2p": True},
    },
    4: {
        "pp4": {"pipeline": 4},
        "pp4_ends": {"pipeline": 4, "stage_sublayers": [0, 5, 3, 0]},
        "pp2_vpp2_dp2_overlap": {
            "pipeline": 2, "virtual_stages": 2, "overlap_p2p": True, "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        "tp2_pp2_sp": {"tensor": 2, "sequence": True, "pipeline": 2},
        "tp2_pp2_vpp2_sp": {"tensor": 2, "sequence": True, "pipeline": 2, "virtual_stages": 2},
    },
    8: {
        "pp8": {"pipeline": 8},
        "tp2_pp2_vpp2_dp2_sp": {"tensor": 2, "sequence": True, "pipeline": 2, "virtual_stages": 2},
    },
}  # fmt: skip
TRAINING = {"pp2_recompute": {"recompute": "full", "recompute_sublayers": 2}}
STEPS = 5
LONG = 20  # steps of one method under every layout: nothing hangs
# Sequences in a global and in a micro-batch: a pipeline runs 4, 1 and 7 micro-batches.
BATCHES = {"4x1": (4, 1), "1x4": (4, 4), "7x1": (7, 1)}
# Layers are megatron-core's own: Transformer Engine multiplies fp32 matrices in TF32, which hides 1e-5.
# Norms on heads change which parameters megatron-core sums over tensor-parallel ranks, by their names.
CASES = [(method, True) for method in METHODS] + [("mhar", False), ("delta_block", False)]
FAST_PIPELINE_CASES = [(method, True) for method in ("mhar", "mhar_block", "delta_block", "hyper_connections")]
RESUMED = ("one", "tp2", "dp2", "dp2_overlap", "pp2_vpp2")
# Their steps that are skipped, before and after they are stopped; what is a spike is known from steps before that.
SKIPPED, STOP = {2: "nan", 3: "loss", 5: "spike", 7: "spike"}, 5
SKIP = {"spike_factor": 4, "spike_window": 2}


def worlds(tier):
    """Numbers of processes that a tier runs; eight take too long for every day."""
    return [world for world in LAYOUTS if world < 8 or tier == "all"]


def runs(layout, tier):
    """Method, norms on heads, and batch of each run of a layout."""
    if layout in LAYOUTS[8]:
        return [(*case, "4x1") for case in FAST_PIPELINE_CASES]
    parallel = next(layouts[layout] for layouts in LAYOUTS.values() if layout in layouts)
    pipelined = "pipeline" in parallel
    cases = FAST_PIPELINE_CASES if pipelined and tier == "fast" else CASES
    found = [(*case, "4x1") for case in cases]
    if layout == "one":
        found += [(method, True, batch) for method in METHODS for batch in ("1x4", "7x1")]
    elif pipelined and (tier == "all" or layout in ("pp2", "pp2_vpp2")):
        batches = ["7x1"]
        if parallel.get("virtual_stages", 1) == 1:
            batches += ["1x4"]
        if "dp2" in layout:
            batches = []
        found += [(*case, batch) for case in cases if case[1] for batch in batches]
    return found


def gradients(chunks):
    """Gradients as the optimizer will see them, by global name."""
    from megatron_mhar.model.initialize import global_name

    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:
                group = getattr(bucket, "data_parallel_group", None) or buffer.data_parallel_group
                shards = bucket.grad_data.view(group.size(), -1)
                torch.distributed.all_gather_into_tensor(bucket.grad_data, shards[group.rank()].clone(), group=group)
    return {
        global_name(chunk.module, n): p.main_grad.clone()
        for chunk in chunks
        for n, p in chunk.module.named_parameters()
    }


class Wire:
    """Counts what this rank sends to other pipeline ranks: messages and bytes."""

    def __init__(self):
        self.messages = self.bytes = 0
        self._send = torch.distributed.isend

    def __enter__(self):
        def counted(tensor, *args, **kwargs):
            self.messages += 1
            self.bytes += tensor.numel() * tensor.element_size()
            return self._send(tensor, *args, **kwargs)

        torch.distributed.isend = counted
        return self

    def __exit__(self, *_):
        torch.distributed.isend = self._send


def predicted_sends(trainer, config, num_microbatches, forward_only):
    """Messages and bytes that this rank sends in one run of the schedule, as the plan says."""
    from megatron.core import parallel_state

    plan, rank = trainer.pipeline.plan, parallel_state.get_pipeline_model_parallel_rank()
    sequence = config.training.sequence_length // (config.parallel.tensor if config.parallel.sequence else 1)
    tensor_bytes = sequence * config.training.micro_batch_size * config.model.hidden_size
    tensor_bytes *= trainer.models[0].config.pipeline_dtype.itemsize
    # Gradients of what comes over the link from the rank before go back over it.
    links = [rank] if forward_only else [rank, (rank - 1) % plan.num_ranks]
    return (
        num_microbatches * sum(plan.link_messages(link) for link in links),
        num_microbatches * sum(plan.link_tensors(link) for link in links) * tensor_bytes,
    )


class Checksums:
    """Observer: every value that each source of the table had at any site. Two histories must not differ."""

    def __init__(self, table):
        self.table, self.seen = table, {}

    def __call__(self, site, sources, query, norm_weight):
        for name, tensor in zip(self.table.reads[site], sources, strict=True):
            if name.kind != "null":
                self.seen.setdefault(name, set()).add(zlib.crc32(tensor.detach().cpu().numpy().tobytes()))


def probe(trainer, config):
    """One evaluation and one step of a pipeline, watched: bytes sent, graphs kept, sources changed, tensors left."""
    found = {"sent": [], "predicted": [], "graph": [], "alive": 0}
    count = trainer.micro_batches
    shape = (config.training.sequence_length, config.training.micro_batch_size)

    def tensors():
        """Activations `[..., s, b, d]` that this process holds; it takes seconds, and is left to one method."""
        if config.residual.method != "mhar":
            return 0
        gc.collect()
        return sum(torch.is_tensor(x) and x.dim() >= 3 and tuple(x.shape[-3:-1]) == shape for x in gc.get_objects())

    def watched(close, state):
        packed = close(state)
        found["graph"].append(packed.requires_grad)
        found["alive"] = found["alive"] or tensors()
        return packed

    for stage in trainer.pipeline.stages:
        stage.close = partial(watched, stage.close)
    checksums = Checksums(trainer.pipeline.plan.table)
    for model in trainer.models:
        model.decoder.observer = checksums
    for forward_only in (True, False):
        batches = next(trainer._batches(trainer.train_set, 0, config.training.global_batch_size))
        with Wire() as wire:
            if forward_only:
                with torch.no_grad():
                    trainer._mean_loss(batches, z_loss=0.0, forward_only=True)
                found["graph_forward_only"] = found.pop("graph")
                found["graph"] = []
            else:
                trainer._mean_loss(batches, z_loss=0.0, forward_only=False)
        found["sent"].append((wire.messages, wire.bytes))
        found["predicted"].append(predicted_sends(trainer, config, count, forward_only))
        if forward_only:
            # A step sees every micro-batch; one of them is enough to compare stages by.
            found["checksums"] = {str(name): values for name, values in checksums.seen.items()}
            for model in trainer.models:
                model.decoder.observer = None
    found["waiting"] = [len(stage._waiting) for stage in trainer.pipeline.stages]
    for stage in trainer.pipeline.stages:
        del stage.close
    found["left"] = tensors()
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, found)
    return everyone


def move_sites(models, by=0.1):
    """Move queries and gates off zero, by normal numbers that depend on their names alone."""
    from megatron_mhar.model.initialize import generator, global_name

    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                if "site." in name:
                    source = generator(7, global_name(model, name), "cpu")
                    parameter.add_(by * torch.randn(parameter.shape, generator=source).to(parameter.device))


def run(config, reference, steps=STEPS, probed=False):
    """Losses, norms, evaluation and largest gradient errors of one run; queries and gates are moved off zero first."""
    from megatron.core.distributed import finalize_model_grads

    from megatron_mhar.model.initialize import global_name, tensor_parallel_part
    from megatron_mhar.train.distributed import mean_of_last_stage
    from megatron_mhar.train.loop import Trainer
    from megatron_mhar.train.progress import ProgressLog
    from megatron_mhar.train.run_folder import RunFolder

    device = torch.device(torch.cuda.current_device())
    trainer = Trainer(config, RunFolder(config), device, ProgressLog(None, total=steps, start=0), None)
    move_sites(trainer.models)
    seen, errors = [], {}

    def watched(*args, **kwargs):
        finalize_model_grads(*args, **kwargs)
        found = gradients(trainer.chunks)
        if reference is None:
            seen.append(found)
            return
        step = len(seen)
        if step == STEPS:
            return
        seen.append(None)
        for model in trainer.models:
            for name, parameter in model.named_parameters():
                name_ = global_name(model, name)
                expected = tensor_parallel_part(model, name, parameter, reference["gradients"][step][name_])
                error = (found[name_] - expected).abs().max() / max(0.1, expected.abs().max())
                errors[name_] = max(errors.get(name_, 0.0), float(error))

    trainer.chunks[0].config.finalize_model_grads_func = watched
    batches = trainer._batches(trainer.train_set, 0, steps * config.training.global_batch_size)
    losses, norms = [], []
    for _ in range(steps):
        loss, norm = trainer.train_step(batches)
        losses.append(float(mean_of_last_stage(loss, 1)))
        norms.append(norm)
    result = {"losses": losses, "norms": norms, "valid": trainer.evaluate(recorded=1)}
    result["routing"] = trainer.routing.metrics() if trainer.routing else {}
    if reference is None:
        return result | {"gradients": seen}
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, errors)
    names = {name for errors in everyone for name in errors}
    result |= {"errors": {name: max(errors.get(name, 0.0) for errors in everyone) for name in names}}
    return result | ({"probe": probe(trainer, config)} if probed else {})


def layout_run(corpus, folder, layout, method, parallel, *, training, qk_layernorm=True):
    """Config of one run of a layout."""
    return tiny_run(
        corpus, folder, name=f"{layout}-{method}", residual=METHODS[method], parallel=parallel,
        model={"qk_layernorm": qk_layernorm, "layers": "local"},
        # The epsilon keeps gradients of the size of rounding from moving weights by whole steps.
        optimizer={"ema_decay": 0.9, "z_loss": 1e-3, "eps": 1e-3}, training={"steps": LONG, **training},
    )  # fmt: skip


def stopped_and_resumed(corpus, folder, layout, parallel):
    """Journal, summary and skipped steps, by rank, of a whole bf16 run and of one that is stopped and goes on."""
    from megatron_mhar.run_files import RunFiles
    from megatron_mhar.tracking.journal import load_metrics
    from megatron_mhar.train.loop import train

    found = {}
    for name, stops in (("whole", [None]), ("parts", [STOP, None])):
        unmoved = []
        for stop_after in stops:
            config = tiny_run(
                corpus, folder, name=f"{layout}-{name}", residual=METHODS["mhar"], parallel=parallel,
                model={"layers": "local"}, optimizer={"ema_decay": 0.9, "lr": 1e-2}, evaluation={"interval": 8},
                training={"micro_batch_size": 1, "precision": "bf16", "stop_after": stop_after, "skip": SKIP},
            )  # fmt: skip
            with poisoned(SKIPPED) as steps:
                summary = train(config)
            unmoved += steps
        everyone = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, unmoved)
        found[name] = load_metrics(RunFiles(config.run_dir).journal), summary, everyone
    return found


def main():
    out, corpus, reference, tier = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    world = int(os.environ["WORLD_SIZE"])
    expected = torch.load(reference, weights_only=False) if world > 1 else None
    results = {}
    from megatron.core import parallel_state

    from megatron_mhar.train.distributed import initialize

    platform.setup(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(platform.BACKEND)
    only = os.environ.get("LAYOUTS", "").split()
    for layout, parallel in LAYOUTS[world].items():
        if only and layout not in only:
            continue
        initialize(tiny_run(corpus, out.parent, parallel=parallel))  # groups take longer to build than five steps
        for method, qk_layernorm, batch in runs(layout, tier):
            global_batch, micro_batch = BATCHES[batch]
            # Seven micro-batches make one group: the last of three groups would be too small.
            groups = {"microbatch_group": 7} if batch == "7x1" and "virtual_stages" in parallel else {}
            config = layout_run(
                corpus, out.parent, layout, method, {**parallel, **groups}, qk_layernorm=qk_layernorm,
                training={
                    "global_batch_size": global_batch, "micro_batch_size": micro_batch, **TRAINING.get(layout, {})
                },
            )  # fmt: skip
            key = (method, qk_layernorm, batch)
            steps = LONG if key == ("mhar", True, "4x1") else STEPS
            probed = "pipeline" in parallel and batch == "4x1"
            results[layout, *key] = run(config, expected and expected["one", *key], steps, probed)
        if layout in RESUMED:
            results["resumed", layout] = stopped_and_resumed(corpus, out.parent, layout, parallel)
        parallel_state.destroy_model_parallel()
    if int(os.environ["RANK"]) == 0:
        torch.save(results, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
