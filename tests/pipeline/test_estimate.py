"""Links, memory, parameters and time of layouts, by hand and against built models.

Tiny models have eight sublayers of width 64; a micro-batch of two sequences of 32 fp32 tokens makes tensors of 16 KiB.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mhar.config.load import load_config
from megatron_mhar.depth.sites import EMBEDDING, Source
from megatron_mhar.errors import UserError
from megatron_mhar.pipeline.estimate import (
    Cluster,
    count_parameters,
    crosses_nodes,
    estimate_layout,
    forward_flops,
    kept,
    layout_of,
    plan_of,
    recomputed,
    stage_parameters,
)
from megatron_mhar.pipeline.timeline import passes
from tests.conftest import METHODS, tiny_run

CONFIGS = Path(__file__).parents[2] / "configs"
TENSOR = 32 * 2 * 64 * 4


def tiny(method="mhar", *, batch=8, **sections):
    sections["training"] = {"global_batch_size": batch, **sections.get("training", {})}
    return tiny_run("corpus", Path("runs"), residual=METHODS[method], **sections)


def shipped(name, *overrides):
    return load_config(CONFIGS / name, overrides)


def in_tensors(history):
    parts = (history.received, history.made, history.gradients, history.messages)
    assert all(part % TENSOR == 0 for part in parts)
    return tuple(part // TENSOR for part in parts)


def test_imports_neither_torch_nor_megatron():
    code = (
        "import sys\n"
        "import megatron_mhar.pipeline.estimate\n"
        "sys.exit(str({'torch', 'megatron'} & set(sys.modules)) if {'torch', 'megatron'} & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- links ---


def test_four_stages_of_mhar_by_hand():
    """Into the stages go e o0 o1, e o0 ... o3, e o0 ... o5; four micro-batches."""
    estimate = estimate_layout(tiny(parallel={"pipeline": 4}), 4)
    assert estimate.layout.stage_sublayers == (2, 2, 2, 2)
    assert (estimate.layout.micro_batches, estimate.layout.tensor_bytes) == (4, TENSOR)
    found = [(link.sender, link.receiver, link.messages, link.sent_bytes // TENSOR) for link in estimate.links]
    assert found == [(0, 1, 4, 4 * 3), (1, 2, 4, 4 * 5), (2, 3, 4, 4 * 7)]
    assert [link.baseline_bytes // TENSOR for link in estimate.links] == [4, 4, 4]
    assert all(link.uncached_bytes == link.sent_bytes for link in estimate.links)
    assert (estimate.over_baseline, estimate.over_uncached) == (15 / 3, 1.0)


def test_two_ranks_of_two_stages_by_hand():
    """Cached: e o0 o1 | o2 o3 | o4 o5; uncached 3, 5 and 7; the link back to rank 0 carries the middle one."""
    parallel = {"pipeline": 2, "virtual_stages": 2}
    forward, back = estimate_layout(tiny(parallel=parallel, batch=4), 2).links
    assert (forward.sender, forward.receiver, back.sender, back.receiver) == (0, 1, 1, 0)
    assert (forward.messages, forward.sent_bytes, forward.uncached_bytes) == (4, 2 * 5 * TENSOR, 2 * 10 * TENSOR)
    assert (back.messages, back.sent_bytes, back.uncached_bytes) == (2, 2 * 2 * TENSOR, 2 * 5 * TENSOR)
    assert (forward.baseline_bytes, back.baseline_bytes) == (2 * 2 * TENSOR, 2 * TENSOR)

    off = estimate_layout(tiny(parallel={**parallel, "history_cache": False}, batch=4), 2)
    assert [link.sent_bytes for link in off.links] == [forward.uncached_bytes, back.uncached_bytes]
    assert off.over_uncached == 1.0


def test_delta_block_at_8b_by_hand():
    """e, four block deltas and the stream cross the middle, cut over four sequence-parallel ranks."""
    estimate = estimate_layout(shipped("8b/delta_block.yaml", "parallel.pipeline=2"), 512)
    (link,) = estimate.links
    tensor = 4096 // 4 * 1 * 4096 * 2
    assert estimate.layout.micro_batches == 256 // 64 == link.messages
    assert (link.sent_bytes, link.baseline_bytes) == (4 * 6 * tensor, 4 * tensor)


def test_bytes_are_divided_as_activations_are():
    parallel = {"pipeline": 2, "tensor": 2}
    assert layout_of(tiny(parallel=parallel), 4).tensor_bytes == TENSOR  # every tensor-parallel rank has all of it
    assert layout_of(tiny(parallel={**parallel, "sequence": True}), 4).tensor_bytes == TENSOR // 2
    assert layout_of(tiny(parallel={"pipeline": 2}, training={"precision": "bf16"}), 2).tensor_bytes == TENSOR // 2


def test_which_links_cross_nodes():
    """Ranks of a pipeline lie num_gpus / P apart, and are numbered node after node."""

    def crossing(gpus, pipeline, node):
        layout = layout_of(tiny(parallel={"pipeline": pipeline}, batch=2 * gpus), gpus)
        return [crosses_nodes(layout, Cluster(gpus_per_node=node), rank) for rank in range(pipeline)]

    assert crossing(8, 4, 8) == [False] * 4
    assert crossing(16, 4, 8) == [False, True, False, True]
    assert crossing(32, 4, 8) == [True] * 4
    assert crossing(12, 4, 4) == [True] * 4  # three ranks to a stage, four to a node: 0 -> 3 stays, 1 -> 4 does not
    assert crossing(12, 4, 6) == [False, True, False, True]
    assert crossing(4, 4, 1) == [True] * 4


LAYOUTS = [
    {"pipeline": 2}, {"pipeline": 4}, {"pipeline": 4, "stage_sublayers": [0, 5, 3, 0]},
    {"pipeline": 2, "virtual_stages": 2}, {"pipeline": 2, "virtual_stages": 4}, {"pipeline": 4, "virtual_stages": 2},
    {"pipeline": 2, "virtual_stages": 2, "stage_sublayers": [0, 3, 5, 0]},
]  # fmt: skip


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_what_holds_for_all(method, parallel):
    config = tiny(method, parallel=parallel, batch=16)
    estimate = estimate_layout(config, 2 * parallel["pipeline"])
    plan = plan_of(config)
    for link in estimate.links:
        crossed = [source for stage in plan.hops(link.sender) for source in plan.received(stage)]
        assert len(set(crossed)) == len(crossed)  # each source crosses each link at most once
        assert link.sent_bytes >= link.baseline_bytes
        assert link.sent_bytes <= link.uncached_bytes
        if "virtual_stages" not in parallel:
            assert link.sent_bytes == link.uncached_bytes
        if method == "baseline":
            assert link.sent_bytes == link.baseline_bytes
    for rank in estimate.memory:
        if method == "baseline":
            assert rank.history == rank.history_baseline
        assert rank.history.total >= rank.history_baseline.total
        assert rank.history.in_flight == rank.history_baseline.in_flight
        assert rank.total == rank.weights + rank.gradients + rank.optimizer + rank.history.total
    time = estimate.time
    assert time.compute <= time.pipeline * (1 + 1e-9)
    assert time.pipeline < time.blocking <= time.uncached
    assert time.baseline <= time.blocking
    assert (time.overlapped is None) == ("virtual_stages" not in parallel)
    assert 0 <= time.bubble_share < 1
    assert 0 < time.message_share(time.blocking) < 1


# --- memory of the history ---


def test_memory_of_1f1b_by_hand():
    estimate = estimate_layout(tiny(parallel={"pipeline": 4}), 4)
    histories = [rank.history for rank in estimate.memory]
    assert [history.in_flight for history in histories] == [4, 3, 2, 1]
    # Stage 1 gets e o0 o1 and keeps o2, which its second site reads (o3 is sent on). Three micro-batches in flight; in
    # a backward five gradients, five that came in and three that go out.
    assert in_tensors(histories[1]) == (3 * 3, 3 * 1, 5, 5 + 3)
    # Stage 3 gets seven, keeps o6 and o7 for the last two sites, and has nine gradients before the final one.
    assert in_tensors(histories[3]) == (7, 2, 9, 7)
    # The baseline's stream: what came in, one gradient, and one message each way.
    assert in_tensors(estimate.memory[1].history_baseline) == (3, 0, 1, 2)


def test_memory_of_interleaved_by_hand():
    estimate = estimate_layout(tiny(parallel={"pipeline": 2, "virtual_stages": 2}, batch=4), 2)
    first, second = (rank.history for rank in estimate.memory)
    assert (first.in_flight, second.in_flight) == (4, 3)
    # Rank 0, at its first backward, of stage 2: both micro-batches of stages 0 (e o0 o1 made, all handed to stage 2)
    # and 2 (o2 o3 received, o4 made); seven gradients; o4 o5's gradients came in, those of o2 o3 go out.
    assert in_tensors(first) == (2 * 2, 2 * (3 + 1), 7, 2 + 2)
    # Rank 1, at the second backward of stage 3: two of stage 1 (three received, o2 o3 made) and one of stage 3 (o4 o5
    # received, o6 o7 made); the gradients of the five handed sources wait for stage 1, beside nine of its own.
    assert in_tensors(second) == (2 * 3 + 2, 2 * 2 + 2, 5 + 9, 2)


def test_memory_of_streams_by_hand():
    """Two stages of hyper-connections: four streams cross; each site's streams are kept to mix them."""
    estimate = estimate_layout(tiny("hyper_connections", parallel={"pipeline": 2}), 2)
    # Stage 0, two in flight: the embedding, and the streams before its three other sites.
    assert in_tensors(estimate.memory[0].history) == (0, 2 * (1 + 3 * 4), 0, 2 * 4)
    # Stage 1: the streams received are those of its first site.
    assert in_tensors(estimate.memory[1].history) == (4, 3 * 4, 4, 4)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, []),
        ({"recompute": "selective"}, []),
        ({"recompute": "full"}, ["open 2", "open 4", "open 6", *(f"stream {t}" for t in range(1, 7))]),
        (
            {"recompute": "full", "recompute_sublayers": 2},
            ["open 2", "open 4", "open 6", "stream 2", "stream 4", "stream 6"],
        ),
        ({"recompute": "full", "recompute_method": "block", "recompute_sublayers": 2}, ["stream 1"]),
    ],
)
def test_recomputation_keeps_what_its_runs_start_from(training, expected):
    """Sublayers 1 to 7 of delta_block, blocks of one layer: sites read the block sums, streams and open sums do not."""
    config = tiny("delta_block", parallel={"pipeline": 2, "stage_sublayers": [1, 7]}, training=training)
    found = sorted(map(str, kept(plan_of(config), 1, config.training)))
    assert found == ["block 0", "block 1", "block 2", *expected]


KEPT_BY_BACKWARD = [
    {}, {"recompute": "full"}, {"recompute": "full", "recompute_sublayers": 3},
    {"recompute": "full", "recompute_method": "block", "recompute_sublayers": 2},
]  # fmt: skip


@pytest.mark.parametrize("training", KEPT_BY_BACKWARD, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_kept_is_what_autograd_holds(method, training, one_rank, monkeypatch):
    """Every tensor that a model's history ever had, by its storage: still there after the forward, or not."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from megatron_mhar.depth.history import DepthHistory
    from megatron_mhar.model.build import build_models

    config = tiny(method, training=training, model={"layers": "local"})
    (model,) = build_models(config)
    stack = model.decoder
    storages = {}

    def note(history):
        for name, tensor in history.state().items():
            storages.setdefault(name, StorageWeakRef(tensor.untyped_storage()))

    append, mixed, init = DepthHistory.append, DepthHistory.replace_stream, DepthHistory.__init__
    monkeypatch.setattr(DepthHistory, "append", lambda self, output: (append(self, output), note(self))[0])
    monkeypatch.setattr(DepthHistory, "replace_stream", lambda self, stream: (mixed(self, stream), note(self))[0])
    monkeypatch.setattr(DepthHistory, "__init__", lambda self, *args: (init(self, *args), note(self))[0])
    ids = torch.arange(64).view(2, 32).cuda() % config.model.vocab_size
    loss = model(ids, ids, None, labels=ids).mean()

    # Less what counts as a layer's own: the final norm's input, and the input of each sublayer of the baseline.
    expected = set(map(str, kept(plan_of(config), 0, config.training)))
    own = {"stream 7"} | ({f"stream {t}" for t in range(7)} | {"embedding"} if method == "baseline" else set())
    held = {str(name) for name, storage in storages.items() if not storage.expired()} - (own - expected)
    if method == "delta_block_released":  # its first entry is the embedding, one tensor under two names
        assert storages[Source("entry", 0)].cdata == storages[EMBEDDING].cdata
        held, expected = held - {"entry 0"}, expected - {"entry 0"} | {"embedding"}
    assert held == expected
    cuts = [(first, stop, again) for first, stop, again in stack._units()]
    assert cuts == list(recomputed(config.training, 0, 8))
    loss.backward()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_every_rank_holds_what_is_counted_between_its_passes(method, cached, one_rank):
    """A step of two ranks with two stages each, run in one process with sites, histories and stages as they are.

    After every pass, what was made in each stage in flight and is still there must be what ``kept`` names, and the
    gradients that wait must be those of what was handed over.
    """
    import torch
    from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
    from torch.multiprocessing.reductions import StorageWeakRef

    from megatron_mhar.depth.history import DepthHistory
    from megatron_mhar.model.build import transformer_config
    from megatron_mhar.model.site import build_site
    from megatron_mhar.pipeline.stage import Stage

    config = tiny(method, parallel={"pipeline": 2, "virtual_stages": 2, "stage_sublayers": [3, 1, 2, 2]})
    plan = plan_of(config, cached=cached)
    table, transformer = plan.table, transformer_config(config)
    sites = [build_site(transformer, config.residual, t + 1) for t in range(9)]
    weights = [torch.randn(64, 64).div_(8).requires_grad_() for _ in range(8)]
    stages = []
    for number in range(4):
        stages.append(Stage(plan, number, stages[number - 2] if number > 1 else None))

    def forward(stage, received):
        """What is sent, what was made by name, and the leaves that a later stage of the rank gets."""
        first, stop = plan.starts[stage.number], plan.starts[stage.number + 1]
        state = stage.open(received) if stage.number else {EMBEDDING: torch.randn(4, 2, 64).requires_grad_()}
        history = DepthHistory.after(table, first - 1, state)
        made = {} if stage.number else {EMBEDDING: StorageWeakRef(state[EMBEDDING].untyped_storage())}
        for t in range(first, stop):
            sites[t].write(history, sites[t](history).sin() @ weights[t])
            for name, tensor in history.state().items():
                if name not in state:
                    made.setdefault(name, StorageWeakRef(tensor.untyped_storage()))
        if stage.is_last:
            return (sites[8](history) if table.has_final_site else history.output()).sum(), made, []
        out = stage.close(history.state())
        return out, made, list(stage._waiting[-1].values()) if stage._waiting else []

    def check(flight, waiting):
        for (_, number), (_, _, made, _) in flight.items():
            expected = set(kept(plan, number, config.training))
            if method == "delta_block_released" and number == 0:  # its first entry is the embedding
                made = {name: storage for name, storage in made.items() if name != EMBEDDING}
            held = {name for name, storage in made.items() if not storage.expired()}
            if method == "baseline":  # the stream is each sublayer's input, which counts as the sublayer's own
                held &= expected
            assert held == expected, f"stage {number}"
        for (micro, number), leaves in waiting.items():
            later_done = (micro, number + 2) not in flight and (micro, number) in flight and number + 2 < 4
            assert all((leaf.grad is not None) == later_done for leaf in leaves)

    orders = [passes(rank, ranks=2, chunks=2, microbatches=4, group=2) for rank in range(2)]
    sent, flights, leaves_of, begun = {}, [{}, {}], [{}, {}], set()
    while any(orders):
        rank = next(r for r in (0, 1) if orders[r] and (first_pass(orders[r][0]) or orders[r][0] in sent))
        backward, micro, number = this = orders[rank].pop(0)
        flight, key = flights[rank], (micro, number)
        came = sent.pop(this, None)
        if backward:
            received, out, _, _ = flight.pop(key)
            custom_backward(out, came)
            if number:
                sent[this._replace(stage=number - 1)] = received.grad
            leaves_of[rank].pop(key)
        else:
            received = None if came is None else came.requires_grad_()
            out, made, leaves = forward(stages[number], received)
            if number < 3:
                sent[this._replace(stage=number + 1)] = out.detach().clone()
                deallocate_output_tensor(out, True)
            flight[key], leaves_of[rank][key] = (received, out, made, leaves), leaves
            begun.add(key)
            del out, made, leaves
        del received, came
        waiting = {(m, n): leaves for (m, n), leaves in leaves_of[rank].items() if n + 2 < 4 and (m, n + 2) in begun}
        check(flight, waiting)
    assert not sent and not any(flights)


def first_pass(each):
    """Whether a pass waits for no message."""
    return each.stage == (3 if each.backward else 0)


# --- parameters ---


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [{}, {"tie_embeddings": False, "qk_layernorm": False, "head_dim": 32}])
def test_parameters_of_tiny_models(method, model, one_rank):
    assert_counted(tiny(method, model={"layers": "local", **model}))


EXPERTS = {"pattern": "*E*-*-*E", "num_experts": 4, "moe_ffn_hidden_size": 48}


def test_parameters_of_experts(one_rank):
    assert_counted(tiny(model={"layers": "local", **EXPERTS}))


@pytest.mark.parametrize("name", ["demo/mhar", "demo/baseline", "100m/mhar"])
def test_parameters_of_shipped_configs(name, one_rank):
    assert_counted(shipped(f"{name}.yaml", "model.layers=local"))


def assert_counted(config):
    from megatron_mhar.model.build import build_models

    (model,) = build_models(config)
    number = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(config) == number
    assert sum(stage_parameters(config, 0)) == number


def test_parameters_of_ranks_by_hand():
    """Width 64, four heads and two groups of 16, inner width 96, vocabulary 128; two by two ranks."""
    attention = (64 * 64 * 2 + 64 * 32 * 2) // 2 + 64 + 2 * 16 + 2 * 64
    mlp = 3 * 64 * 96 // 2 + 64 + 2 * 64
    layers = 2 * (attention + mlp)
    tied = tiny(parallel={"pipeline": 2, "tensor": 2})
    assert stage_parameters(tied, 0) == (layers + 128 * 64 // 2, 0)
    # The last stage has a copy of the tied embedding, the final norm and the final site.
    assert stage_parameters(tied, 1) == (layers + 128 * 64 // 2 + 64 + 2 * 64, 0)
    assert estimate_layout(tied, 4).parameters == count_parameters(tiny())


def test_experts_are_shared_out_by_hand():
    """Four experts of 3 x 64 x 48 in each of two sublayers, on two expert-parallel ranks of four data-parallel ones."""
    config = tiny(model=EXPERTS, parallel={"expert": 2})
    dense, experts = stage_parameters(config, 0)
    assert experts == 2 * 2 * 3 * 64 * 48
    assert dense == count_parameters(config) - 2 * experts
    (rank,) = estimate_layout(config, 4).memory
    assert rank.parameters == dense + experts
    assert rank.optimizer == (-(-dense // 4) + experts // 2) * 8


def test_memory_of_the_model_by_hand():
    """Weights, fp32 gradients, and the optimizer's copies over data-parallel ranks."""
    number = count_parameters(tiny())
    (fp32,) = estimate_layout(tiny(), 2).memory
    assert (fp32.parameters, fp32.weights, fp32.gradients) == (number, 4 * number, 4 * number)
    assert fp32.optimizer == -(-number // 2) * 8  # two moments
    (bf16,) = estimate_layout(tiny(training={"precision": "bf16"}, optimizer={"ema_decay": 0.9}), 4).memory
    assert (bf16.weights, bf16.gradients) == (2 * number, 4 * number)
    assert bf16.optimizer == -(-number // 4) * 16  # main copy, two moments, average


# --- time ---


def test_arithmetic_of_8b_by_hand():
    config = shipped("8b/delta_block.yaml")
    attention = 4096 * 128 * (32 + 8 + 8 + 32)
    matrices = 32 * (attention + 3 * 4096 * 14336) + 4096 * 128256
    causal = 32 * 2 * 4096 * 128 * 32  # layers, two products of half a sequence, heads
    assert matrices == 7_504_658_432
    assert forward_flops(config, 0) == 4096 * (2 * matrices + causal)
    staged = shipped("8b/delta_block.yaml", "parallel.pipeline=2", "parallel.virtual_stages=2")
    assert sum(forward_flops(staged, stage) for stage in range(4)) == forward_flops(config, 0)


def test_a_token_meets_the_experts_chosen_for_it_alone():
    plain, mixed = tiny(), tiny(model=EXPERTS)
    # Two of the sublayers: two experts of inner width 48 and the router of four, for one MLP of 96.
    change = 2 * (2 * 2 * 3 * 64 * 48 + 2 * 64 * 4 - 2 * 3 * 64 * 96)
    assert forward_flops(mixed, 0) - forward_flops(plain, 0) == 2 * 32 * change


def test_time_of_one_rank_by_hand():
    config = shipped("8b/delta_block.yaml")
    estimate = estimate_layout(config, 64, Cluster(tflops=500))
    compute = 3 * forward_flops(config, 0) / 4 * 16 / 500e12  # four tensor-parallel ranks, sixteen micro-batches
    time = estimate.time
    assert time.compute == pytest.approx(compute)
    assert time.pipeline == time.blocking == time.baseline == time.configured == pytest.approx(compute)
    assert time.overlapped is None
    assert estimate.links == ()
    assert (estimate.over_baseline, estimate.over_uncached) == (None, None)
    assert (time.bubble_share, time.message_share(time.blocking)) == (0, 0)
    assert estimate.tokens_per_second == pytest.approx(256 * 4096 / compute)


def test_time_of_messages_by_hand():
    """Two ranks, one micro-batch: forward, message, forward, backward, message, backward."""
    config = tiny(batch=2, parallel={"pipeline": 2})
    flops = forward_flops(config, 0) + forward_flops(config, 1)
    for node, speed in ((2, 10e9), (1, 2e9)):
        cluster = Cluster(gpus_per_node=node, intra_gbps=10, inter_gbps=2, tflops=1e-3)
        time = estimate_layout(config, 2, cluster).time
        assert time.pipeline == pytest.approx(3 * flops / 1e9)
        assert time.blocking - time.pipeline == pytest.approx(2 * 5 * TENSOR / speed)
        assert time.baseline - time.pipeline == pytest.approx(2 * TENSOR / speed)


def test_the_configured_step_follows_overlap_p2p():
    parallel = {"pipeline": 2, "virtual_stages": 2}
    off = estimate_layout(tiny(parallel=parallel), 2).time
    on = estimate_layout(tiny(parallel={**parallel, "overlap_p2p": True}), 2).time
    assert (off.configured, on.configured) == (off.blocking, on.overlapped)
    assert (off.blocking, off.overlapped) == (on.blocking, on.overlapped)


# --- what is refused ---


def test_sublayers_that_are_not_counted_are_refused():
    config = tiny(model={"pattern": "M-*-*-*-"})
    with pytest.raises(UserError, match=r"model.pattern: symbol 'M' given, but mhar plan counts attention"):
        estimate_layout(config, 1)


def test_layouts_that_do_not_fit_are_refused_as_by_training():
    from megatron_mhar.train.distributed import check_layout

    config = tiny(parallel={"pipeline": 4, "virtual_stages": 2}, batch=8)
    for gpus in (6, 8, 20):
        with pytest.raises(UserError) as ours:
            estimate_layout(config, gpus)
        with pytest.raises(UserError) as trains:
            check_layout(config, gpus)
        assert str(ours.value) == str(trains.value)
