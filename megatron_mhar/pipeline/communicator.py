"""Pipeline parallelism of routed stacks: stages of the model chunks of a rank, and the messages between ranks.

    pipeline = connect_stages(model_chunks)
    losses = get_forward_backward_func()(..., **pipeline.schedule_arguments(num_microbatches))

megatron-core's schedules are used as they are. They send one tensor a hop and expect one of the same shape; our
communicator knows from the plan how many sources the next message holds.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

from megatron_mhar.pipeline.plan import PipelinePlan, check_microbatches
from megatron_mhar.pipeline.stage import Stage


class HistoryCommunicator(P2PCommunicator):
    """megatron-core's communicator, told the shapes of one run of a schedule by the plan.

    Stock, it takes every shape to be `[s, b, d]`, or asks the other side each time (``variable_seq_lengths``), which
    crosses or hangs in interleaved schedules. Here both sides know them.

    Args:
        plan: what crosses where.
        pp_group: ranks of the pipeline.
        config: the model's.
        num_microbatches: of this run of the schedule.
    """

    def __init__(self, plan: PipelinePlan, pp_group: Any, config: Any, num_microbatches: int) -> None:
        # In the communicator alone this makes it ask _communicate_shapes below; the schedule reads the model's config.
        config = copy.copy(config)
        config.variable_seq_lengths = True
        # With two ranks the previous and the next one are the same, and messages of one batched call would cross.
        config.batch_p2p_comm = False
        super().__init__(pp_group, config)
        forward, backward = arrivals(plan, pp_group.rank(), num_microbatches, config.microbatch_group_size_per_vp_stage)
        self._forward, self._backward = iter(map(plan.hop, forward)), iter(map(plan.hop, backward))
        self._one: Sequence[int] = ()  # shape of one source, as the schedule gives it

    def _communicate(self, *, tensor_shape: Sequence[int] | None, **kwargs: Any) -> tuple[Any, Any, Any]:
        if tensor_shape is not None:
            self._one = tensor_shape
        result: tuple[Any, Any, Any] = super()._communicate(tensor_shape=tensor_shape, **kwargs)
        return result

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Sequence[int] | None, Sequence[int] | None]:
        return (
            (next(self._forward), *self._one) if recv_prev else None,
            (next(self._backward), *self._one) if recv_next else None,
        )


def arrivals(plan: PipelinePlan, rank: int, num_microbatches: int, group: int) -> tuple[list[int], list[int]]:
    """Hops that a rank's messages of one run of a schedule have taken, in the order in which they come in.

    A hop is named by the stage into which it leads forward; gradients take it backwards. Messages of a link keep their
    order, and every rank runs its stages in the order of megatron-core's schedule table.

    Returns:
        Hops of the activations, and of the gradients.
    """
    ranks, chunks = plan.num_ranks, plan.num_chunks
    forward = [
        chunk for _, chunk in get_schedule_table(num_microbatches, chunks, group if chunks > 1 else num_microbatches)
    ]
    backward = [chunks - 1 - chunk for chunk in forward]
    previous, following = (rank - 1) % ranks, (rank + 1) % ranks
    sent_by_previous = [chunk * ranks + previous + 1 for chunk in forward]
    # A gradient that comes in has left the stage after this rank's: the hop is named by that stage.
    sent_by_following = [chunk * ranks + following for chunk in backward]
    return (
        [stage for stage in sent_by_previous if stage < plan.num_stages],
        [stage for stage in sent_by_following if stage > 0],
    )


class Pipeline:
    """The stages of one rank, and what megatron-core's schedules need to run them.

    Args:
        plan: what crosses where.
        stages: of this rank, in order.
        models: the model chunks, in the same order.
    """

    def __init__(self, plan: PipelinePlan, stages: Sequence[Stage], models: Sequence[HybridModel]) -> None:
        self.plan, self.stages = plan, stages
        self._groups, self._config = models[0].pg_collection, models[0].config

    def schedule_arguments(self, num_microbatches: int) -> dict[str, Any]:
        """Keyword arguments of one call of a megatron-core schedule, beside its usual ones.

        Raises:
            ValueError: the interleaved schedule cannot take so many micro-batches.
        """
        for stage in self.stages:
            stage.forget()
        if self.plan.num_ranks == 1:
            return {}
        if self.plan.num_chunks > 1:
            group, ranks = self._config.microbatch_group_size_per_vp_stage, self.plan.num_ranks
            check_microbatches(num_microbatches, ranks, group)
        communicator = HistoryCommunicator(self.plan, self._groups.pp, self._config, num_microbatches)
        return {"p2p_communicator": communicator, "pg_collection": self._groups}


def connect_stages(models: Sequence[HybridModel], *, cached: bool = True) -> Pipeline:
    """Tell the routed stacks of a rank's model chunks which stages they are. Called by all ranks of a pipeline.

    Args:
        models: the chunks, in the order in which the schedule gets them; without data-parallel wrappers.
        cached: whether a rank keeps what it had for its later stages, rather than getting it anew.

    Raises:
        ValueError: the chunks of all ranks do not make up the model, or one but the first and the last is empty.
    """
    stacks = [model.decoder for model in models]
    group = models[0].pg_collection.pp
    own = [(stack.first_sublayer, len(stack.layers)) for stack in stacks]
    everyone: list[list[tuple[int, int]]] = [own] * group.size()
    if group.size() > 1:
        torch.distributed.all_gather_object(everyone, own, group=group)
    stages = tuple(chunks[chunk] for chunk in range(len(own)) for chunks in everyone)
    plan = PipelinePlan(stacks[0].table, tuple(count for _, count in stages), group.size(), cached)
    if any(count and first != start for (first, count), start in zip(stages, plan.starts, strict=False)):
        raise ValueError(f"pipeline stages of sublayers {list(stages)} (first, number) do not follow each other")
    connected: list[Stage] = []
    for chunk, stack in enumerate(stacks):
        number = chunk * group.size() + group.rank()
        stack.stage = Stage(plan, number, connected[-1] if connected else None)
        connected.append(stack.stage)
    return Pipeline(plan, connected, models)
