"""What a layout costs before there is a cluster: messages, memory of the depth history, and time of a step.

    estimate = estimate_layout(config, num_gpus=512, cluster=Cluster())

What crosses which link is exact (:mod:`megatron_mhar.pipeline.plan`), and so are numbers of parameters and of tensors;
times follow from the speeds given. Imports neither torch nor megatron-core.

Memory of the history, per pipeline rank, counted in tensors `[s, b, d]` (one rank's part of them):

- received: for each micro-batch and stage in flight, the packed buffer that came in; its sources are views of it.
- made: for each of them the sources, open sums and streams that came to be in the stage and that its backward needs:
  those its sites read, those handed to a later stage of the same rank (which holds them without a copy), and under full
  recomputation those that recomputed sublayers start from. What a sublayer keeps for itself is an activation and not
  counted, its input among it: each method has one of those a sublayer, the baseline's being the stream.
- gradients: during a stage's backward those of the history at its widest cut; between the backwards of two stages of
  one rank those of what the earlier one handed to the later.
- messages: the packed tensor that is sent, with the gradient that comes in for the next backward; in a backward the
  gradient that came in, with the one that goes out.

How many are in flight follows from the order of megatron-core's schedules (:mod:`megatron_mhar.pipeline.timeline`); the
figures are those of the moment at which their sum is largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_mhar.config.layout import check_layout
from megatron_mhar.config.schema import RunConfig, TrainingConfig
from megatron_mhar.depth.residual import DELTA, ROUTED, ResidualConfig
from megatron_mhar.depth.sites import EMBEDDING, NULL, DepthTable, Source
from megatron_mhar.errors import UserError
from megatron_mhar.pipeline.plan import PipelinePlan, recomputed_runs
from megatron_mhar.pipeline.timeline import Pass, passes, step_seconds

_FP32 = 4  # bytes


@dataclass(frozen=True)
class Cluster:
    """Speeds of a cluster.

    Args:
        gpus_per_node: ranks are laid out node after node.
        intra_gbps: GB/s (10^9 bytes) between two GPUs of a node, one direction.
        inter_gbps: GB/s of a GPU to another node, one direction.
        tflops: model TFLOP/s that a GPU achieves inside a stage: routing, recomputation, tensor- and context-parallel
            collectives slow it down and are in it.
    """

    gpus_per_node: int = 8
    intra_gbps: float = 450.0  # NVLink 4
    inter_gbps: float = 50.0  # one 400 Gb/s adapter a GPU
    tflops: float = 400.0


@dataclass(frozen=True)
class Layout:
    """How a step's work is spread over the GPUs."""

    num_gpus: int
    tensor: int
    context: int
    data: int
    pipeline: int
    virtual_stages: int
    stage_sublayers: tuple[int, ...]
    micro_batches: int  # of a pipeline and step
    tensor_bytes: int  # of one source of one micro-batch on one rank


@dataclass(frozen=True)
class Link:
    """What a rank of a pipeline sends the next one in a step, on each of its tensor- and context-parallel ranks.

    As much goes back: a gradient for each source.
    """

    sender: int
    receiver: int
    crosses_nodes: bool  # in at least one of the pipelines
    messages: int
    sent_bytes: int
    uncached_bytes: int  # if ranks kept nothing for their later stages
    baseline_bytes: int


@dataclass(frozen=True)
class HistoryMemory:
    """Bytes of the depth history on a rank at the moment at which it has most; see this module's rule."""

    in_flight: int  # most micro-batches between forward and backward, each stage of the rank counted by itself
    received: int
    made: int
    gradients: int
    messages: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.received + self.made + self.gradients + self.messages


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the GPUs of one pipeline rank. Activations inside sublayers, logits and libraries are not counted."""

    rank: int
    parameters: int  # a number, not bytes
    weights: int
    gradients: int
    optimizer: int
    history: HistoryMemory
    history_uncached: HistoryMemory
    history_baseline: HistoryMemory

    @property
    def total(self) -> int:
        """Bytes of all that is counted."""
        return self.weights + self.gradients + self.optimizer + self.history.total


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. Data-parallel reductions, the optimizer, loading and latencies are not counted."""

    compute: float  # of the busiest rank
    pipeline: float  # with the bubble, messages taking no time
    blocking: float  # no message overlaps with its ranks' compute
    overlapped: float | None  # messages pass beside compute (overlap_p2p); None where the schedule cannot
    uncached: float  # as blocking, without the cache
    baseline: float  # as blocking, with the messages of the baseline
    configured: float  # blocking or overlapped, as overlap_p2p says

    @property
    def bubble_share(self) -> float:
        """Share of a step without messages in which the busiest rank waits for others."""
        return max(0.0, 1 - self.compute / self.pipeline)  # rounding may go below

    def message_share(self, step: float) -> float:
        """Share of a step of so many seconds by which messages make it longer."""
        return max(0.0, 1 - self.pipeline / step)


@dataclass(frozen=True)
class Estimate:
    """All that is foretold of one layout."""

    layout: Layout
    parameters: int  # of the whole model
    links: tuple[Link, ...]
    memory: tuple[RankMemory, ...]
    time: StepTime
    tokens_per_second: float

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank that needs most memory."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def over_baseline(self) -> float | None:
        """Bytes on the links over those of the baseline; None without links."""
        return _ratio([link.sent_bytes for link in self.links], [link.baseline_bytes for link in self.links])

    @property
    def over_uncached(self) -> float | None:
        """Bytes on the links over those without the cache; None without links."""
        return _ratio([link.sent_bytes for link in self.links], [link.uncached_bytes for link in self.links])


def _ratio(part: Sequence[int], whole: Sequence[int]) -> float | None:
    return sum(part) / sum(whole) if whole else None


def estimate_layout(config: RunConfig, num_gpus: int, cluster: Cluster | None = None) -> Estimate:
    """What ``config`` costs on ``num_gpus`` GPUs.

    Raises:
        UserError: the layout does not fit the number of GPUs, or the model has sublayers that are not counted here.
    """
    _refuse_uncounted(config)
    cluster = cluster or Cluster()
    layout, plan = layout_of(config, num_gpus), plan_of(config)
    uncached = plan_of(config, cached=False)
    baseline = plan_of(config, residual=ResidualConfig())
    orders = [
        passes(
            rank, ranks=layout.pipeline, chunks=layout.virtual_stages, microbatches=layout.micro_batches,
            group=config.parallel.microbatch_group or layout.pipeline,
        )
        for rank in range(layout.pipeline)
    ]  # fmt: skip
    links = tuple(
        Link(
            sender=rank,
            receiver=(rank + 1) % layout.pipeline,
            crosses_nodes=crosses_nodes(layout, cluster, rank),
            messages=layout.micro_batches * plan.link_messages(rank),
            sent_bytes=layout.micro_batches * plan.link_tensors(rank) * layout.tensor_bytes,
            uncached_bytes=layout.micro_batches * uncached.link_tensors(rank) * layout.tensor_bytes,
            baseline_bytes=layout.micro_batches * baseline.link_tensors(rank) * layout.tensor_bytes,
        )
        for rank in range(layout.pipeline)
        if plan.link_messages(rank) and layout.pipeline > 1
    )
    training = config.training
    memory = tuple(
        RankMemory(
            rank,
            *_model_memory(config, layout, rank),
            *(history_memory(each, orders[rank], layout, training) for each in (plan, uncached, baseline)),
        )
        for rank in range(layout.pipeline)
    )
    time = _step_time(config, layout, cluster, orders, plan, uncached, baseline)
    tokens = training.global_batch_size * training.sequence_length
    return Estimate(layout, count_parameters(config), links, memory, time, tokens / time.configured)


def layout_of(config: RunConfig, num_gpus: int) -> Layout:
    """How ``config`` is spread over ``num_gpus`` GPUs.

    Raises:
        UserError: it cannot be.
    """
    model, training, parallel = config.model, config.training, config.parallel
    data = check_layout(config, num_gpus)
    pieces = parallel.context * (parallel.tensor if parallel.sequence else 1)
    return Layout(
        num_gpus=num_gpus,
        tensor=parallel.tensor,
        context=parallel.context,
        data=data,
        pipeline=parallel.pipeline,
        virtual_stages=parallel.virtual_stages,
        stage_sublayers=config.stages,
        micro_batches=training.global_batch_size // (training.micro_batch_size * data),
        tensor_bytes=training.sequence_length // pieces * training.micro_batch_size * model.hidden_size
        * _element_bytes(training),
    )  # fmt: skip


def plan_of(config: RunConfig, *, residual: ResidualConfig | None = None, cached: bool | None = None) -> PipelinePlan:
    """What crosses where in a run, also with another residual method or with and without the cache."""
    table = DepthTable(residual or config.residual, len(config.model.layer_pattern))
    cached = config.parallel.history_cache if cached is None else cached
    return PipelinePlan(table, config.stages, config.parallel.pipeline, cached)


def crosses_nodes(layout: Layout, cluster: Cluster, rank: int) -> bool:
    """Whether a message from pipeline rank ``rank`` to the next leaves its node, in at least one of the pipelines.

    Megatron-core numbers ranks tensor, context, data, pipeline, the tensor-parallel ones fastest: all ranks of a
    pipeline rank follow each other.
    """
    width, node = layout.num_gpus // layout.pipeline, cluster.gpus_per_node
    here, there = rank * width, (rank + 1) % layout.pipeline * width
    return any((here + i) // node != (there + i) // node for i in range(width))


# --- memory ---


def recomputed(training: TrainingConfig, first: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """Runs of a stage's sublayers and whether the backward repeats them."""
    method = training.recompute_method if training.recompute == "full" else None
    return recomputed_runs(first, stop, method, training.recompute_sublayers)


def kept(plan: PipelinePlan, stage: int, training: TrainingConfig) -> tuple[Source, ...]:
    """What comes to be in ``stage`` and is held until its backward; see this module's rule."""
    table = plan.table
    mixes_streams = table.config.method == "hyper_connections"
    names: list[Source] = []
    for first, stop, repeated in recomputed(training, plan.starts[stage], plan.starts[stage + 1]):
        if repeated:
            names += table.used_by(first, stop)
        elif mixes_streams:
            names += [Source("stream", t - 1) if t else EMBEDDING for t in range(first, stop)]
        else:
            names += [source for reads in table.reads[first:stop] for source in reads]
    if stage == plan.num_stages - 1 and table.has_final_site:
        names += table.reads[-1]
    if stage + plan.num_ranks < plan.num_stages:
        names += plan.handed(stage + plan.num_ranks)
    return tuple(name for name in dict.fromkeys(names) if name != NULL and plan.made_in(name) == stage)


def widest_cut(plan: PipelinePlan, stage: int) -> int:
    """Tensors of the history at the sublayer of ``stage`` before or after which there are most of them."""
    cuts = range(plan.starts[stage] - 1, plan.starts[stage + 1])
    return max(sum(map(plan.table.num_tensors, plan.table.state_after(cut))) for cut in cuts)


def history_memory(
    plan: PipelinePlan, order: Sequence[Pass], layout: Layout, training: TrainingConfig
) -> HistoryMemory:
    """Memory of the history on the rank whose passes of a step are ``order``."""
    stages = sorted({each.stage for each in order})
    size = partial(_tensors, plan)
    received = {stage: plan.hop(stage) for stage in stages}
    sent = {stage: plan.hop(stage + 1) if stage + 1 < plan.num_stages else 0 for stage in stages}
    made = {stage: size(kept(plan, stage, training)) for stage in stages}
    handed = {stage: size(plan.handed(stage)) for stage in stages}
    widest = {stage: widest_cut(plan, stage) for stage in stages}

    in_flight = most = now_received = now_made = waiting = 0
    parts = (0, 0, 0, 0)
    for backward, _, stage in order:
        if backward:
            waiting -= handed.get(stage + plan.num_ranks, 0)
            parts = max(
                parts, (now_received, now_made, waiting + widest[stage], sent[stage] + received[stage]), key=sum
            )
            waiting += handed[stage]
        sign = -1 if backward else 1
        in_flight += sign
        now_received += sign * received[stage]
        now_made += sign * made[stage]
        if not backward:
            most = max(most, in_flight)
            parts = max(parts, (now_received, now_made, waiting, 2 * sent[stage]), key=sum)
    return HistoryMemory(most, *(count * layout.tensor_bytes for count in parts))


def _tensors(plan: PipelinePlan, names: Sequence[Source]) -> int:
    return sum(map(plan.table.num_tensors, names))


def _element_bytes(training: TrainingConfig) -> int:
    return 2 if training.bf16 else _FP32


def _model_memory(config: RunConfig, layout: Layout, rank: int) -> tuple[int, int, int, int]:
    """Parameters of a pipeline rank, and bytes of weights, gradients (fp32) and optimizer state.

    The distributed optimizer spreads over data- and context-parallel ranks two fp32 moments of each parameter, its fp32
    main copy where weights are bf16, and its average where one is kept. Experts are replicated on fewer ranks.
    """
    dense, experts = (
        sum(counts)
        for counts in zip(
            *(stage_parameters(config, stage) for stage in range(rank, len(config.stages), layout.pipeline)),
            strict=True,
        )
    )
    copies = 2 + config.training.bf16 + (config.optimizer.ema_decay is not None)
    replicas = layout.data * layout.context
    shard = -(-dense // replicas) + -(-experts * config.parallel.expert // replicas)
    number = dense + experts
    return number, number * _element_bytes(config.training), number * _FP32, shard * copies * _FP32


# --- parameters and arithmetic ---

COUNTED = "*-E"


def _refuse_uncounted(config: RunConfig) -> None:
    others = sorted(set(config.model.layer_pattern) - set(COUNTED))
    if others:
        raise UserError(
            f"model.pattern: symbol {others[0]!r} given, but mhar plan counts attention (*), MLP (-) and "
            "mixture-of-experts (E) sublayers only"
        )


def stage_parameters(config: RunConfig, stage: int) -> tuple[int, int]:
    """Parameters of a stage on one GPU, outside and inside of experts.

    With d the width, H_q and H_kv heads of width k, f the inner width and T the tensor-parallel size:

        attention   d + d k (H_q + 2 H_kv) / T + k H_q d / T, with norms on heads + 2 k
        MLP         d + 3 d f / T
        experts     d + d N (the router), and on each of the expert-parallel ranks N / E experts of 3 d f / T
        site        2 d (query and key norm); delta: + 1 (gate) + d (null source); hyper-connections: n (n + 2)
        first       V d / T (embedding)
        last        d (norm), the final site, and V d / T (output layer) if untied or if the embedding is elsewhere
    """
    parallel = config.parallel
    return _stage_parameters(config, config.stages, stage, tensor=parallel.tensor, expert=parallel.expert)


def count_parameters(config: RunConfig) -> int:
    """Parameters of the whole model, each counted once."""
    return sum(_stage_parameters(config, (len(config.model.layer_pattern),), 0, tensor=1, expert=1))


def _stage_parameters(
    config: RunConfig, stages: Sequence[int], stage: int, *, tensor: int, expert: int
) -> tuple[int, int]:
    model, residual = config.model, config.residual
    width, first = model.hidden_size, sum(stages[:stage])
    pattern = model.layer_pattern[first : first + stages[stage]]
    table = DepthTable(residual, len(model.layer_pattern))
    routing = 2 * width
    if residual.method in DELTA:
        routing += 1 + (width if residual.has_null_source else 0)
    site = routing if residual.method in ROUTED else 0
    if residual.method == "hyper_connections":
        site = residual.num_streams * (residual.num_streams + 2)
    dense = experts = 0
    for symbol in pattern:
        dense += width + site
        if symbol == "*":
            dense += _attention_matrices(config) // tensor + (2 * model.kv_channels if model.qk_layernorm else 0)
        elif symbol == "-":
            dense += 3 * width * model.ffn_hidden_size // tensor
        else:
            dense += width * _num_experts(config)
            experts += _num_experts(config) // expert * _expert_matrices(config) // tensor
    embedding = model.vocab_size * width // tensor
    if stage == 0:
        dense += embedding
    if stage == len(stages) - 1:
        dense += width + (routing if table.has_final_site else 0)
        dense += embedding if not model.tie_embeddings or stage > 0 else 0
    return dense, experts


def _attention_matrices(config: RunConfig) -> int:
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    return model.hidden_size * model.kv_channels * (2 * heads + 2 * groups)


def _num_experts(config: RunConfig) -> int:
    assert config.model.num_experts is not None  # the config refuses a pattern with E otherwise
    return config.model.num_experts


def _expert_matrices(config: RunConfig) -> int:
    return 3 * config.model.hidden_size * config.model.expert_width


def forward_flops(config: RunConfig, stage: int) -> int:
    """Floating-point operations of one micro-batch's forward through ``stage``, over all ranks that share it.

    Two a token and parameter of every matrix that the token meets (the output layer too, the embedding not), and in
    each attention two products with half of the sequence (causal): 2 s k H_q a token. A backward takes twice as many.
    """
    model, training = config.model, config.training
    first = sum(config.stages[:stage])
    pattern = model.layer_pattern[first : first + config.stages[stage]]
    token = 0
    for symbol in pattern:
        if symbol == "*":
            token += 2 * _attention_matrices(config)
            token += 2 * training.sequence_length * model.kv_channels * model.num_attention_heads
        elif symbol == "-":
            token += 2 * 3 * model.hidden_size * model.ffn_hidden_size
        else:
            token += 2 * model.hidden_size * _num_experts(config)
            token += 2 * model.moe_router_topk * _expert_matrices(config)
    if stage == len(config.stages) - 1:
        token += 2 * model.vocab_size * model.hidden_size
    return token * training.micro_batch_size * training.sequence_length


# --- time ---


def _step_time(
    config: RunConfig,
    layout: Layout,
    cluster: Cluster,
    orders: Sequence[Sequence[Pass]],
    plan: PipelinePlan,
    uncached: PipelinePlan,
    baseline: PipelinePlan,
) -> StepTime:
    speed = cluster.tflops * 1e12 * layout.tensor * layout.context  # FLOP/s of the ranks that share a stage
    forward = [forward_flops(config, stage) / speed for stage in range(plan.num_stages)]
    rates = [
        1e9 * (cluster.inter_gbps if crosses_nodes(layout, cluster, rank) else cluster.intra_gbps)
        for rank in range(layout.pipeline)
    ]

    def seconds(each: Pass) -> float:
        return forward[each.stage] * (2 if each.backward else 1)

    def messages(plan: PipelinePlan) -> list[float]:
        """Seconds over the link into each stage."""
        return [
            plan.hop(stage) * layout.tensor_bytes / rates[(stage - 1) % layout.pipeline]
            for stage in range(plan.num_stages)
        ]

    def step(plan: PipelinePlan, overlap: bool = False) -> float:
        into = messages(plan)
        return step_seconds(orders, seconds, lambda each: into[each.stage + (not each.backward)], overlap=overlap)

    blocking = step(plan)
    overlapped = step(plan, overlap=True) if layout.virtual_stages > 1 else None
    return StepTime(
        compute=max(sum(map(seconds, order)) for order in orders),
        pipeline=step_seconds(orders, seconds),
        blocking=blocking,
        overlapped=overlapped,
        uncached=step(uncached) if layout.virtual_stages > 1 else blocking,
        baseline=step(baseline),
        configured=overlapped if config.parallel.overlap_p2p and overlapped is not None else blocking,
    )
