"""Whether a run's parallel layout fits a number of ranks."""

from __future__ import annotations

import math

from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError
from megatron_mhar.pipeline.plan import check_microbatches


def check_layout(config: RunConfig, world: int) -> int:
    """Number of data-parallel ranks of ``config`` on ``world`` ranks.

    Raises:
        UserError: the layout does not fit the number of ranks, or the batch the layout.
    """
    parallel, training = config.parallel, config.training
    if config.profile.start_step is not None and (none := [r for r in config.profile.ranks if r >= world]):
        raise UserError(f"profile.ranks: {none[0]} given, but the run has ranks 0 to {world - 1}")
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
    model_ranks = math.prod(sizes.values())
    if world % model_ranks:
        given = {key: size for key, size in sizes.items() if size > 1}
        product = "" if len(given) == 1 else f" = {model_ranks}"
        raise UserError(
            f"parallel.{' x '.join(given)}: {' x '.join(map(str, given.values()))}{product} given, but it must divide "
            f"the number of ranks, {world} (torchrun --nproc-per-node, or nodes x GPUs of a job)"
        )
    data_parallel = world // model_ranks
    replicas = data_parallel * parallel.context
    if replicas % parallel.expert:
        raise UserError(
            f"parallel.expert: {parallel.expert} given, but on {world} ranks it must divide {replicas} "
            f"({data_parallel} data-parallel x {parallel.context} context-parallel ranks, which share out the experts)"
        )
    step = training.micro_batch_size * data_parallel
    if training.global_batch_size % step:
        raise UserError(
            f"training.global_batch_size: {training.global_batch_size} given, but on {world} ranks it must be a "
            f"multiple of {step} (micro_batch_size {training.micro_batch_size} x {data_parallel} data-parallel ranks)"
        )
    if parallel.virtual_stages > 1:
        group = parallel.microbatch_group or parallel.pipeline
        for what, count in (("", 1), (" of an evaluation", config.evaluation.batches)):
            try:
                check_microbatches(count * training.global_batch_size // step, parallel.pipeline, group)
            except ValueError as error:
                raise UserError(f"training.global_batch_size: {training.global_batch_size}{what}: {error}") from None
    return data_parallel
