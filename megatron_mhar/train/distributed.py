"""Ranks: process groups of a run, checks that all ranks make together, and seeds."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import time
from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistNetworkError,
    DistStoreError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from megatron_mhar import platform
from megatron_mhar.config.layout import check_layout as check_layout
from megatron_mhar.config.load import flatten
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError

_ALL_HERE = "all"
_JUDGED_S = datetime.timedelta(seconds=5)  # until everyone has heard of a rank that has not come


def rank() -> int:
    """Rank of this process as its launcher says, 0 without one."""
    return _number("RANK", 0)


def local_rank() -> int:
    """Rank of this process among those of its machine, 0 without a launcher."""
    return _number("LOCAL_RANK", 0)


def world_size() -> int:
    """Number of processes as their launcher says, 1 without one."""
    return _number("WORLD_SIZE", 1)


def _number(key: str, default: int) -> int:
    text = os.environ.get(key) or str(default)
    if not text.isdecimal():
        raise UserError(f"{key}: {text!r} given, but it must be a whole number, as torchrun and launch/node set it")
    return int(text)


def initialize(config: RunConfig) -> torch.device:
    """Join the other ranks, build megatron-core's process groups and seed this rank; groups that are there are used.

    Returns:
        This rank's device.

    Raises:
        UserError: there are fewer GPUs than ranks on this machine, or groups of another layout.
        DistStoreError: other ranks have not come within ``parallel.join_s``.
    """
    if platform.HAS_GPU and local_rank() >= torch.cuda.device_count():
        raise UserError(
            f"rank {local_rank()} of this machine started, but it has {torch.cuda.device_count()} GPUs; "
            "start one process a GPU with torchrun --nproc-per-node"
        )
    device = platform.setup(local_rank())
    if not torch.distributed.is_initialized():
        timeout = datetime.timedelta(seconds=config.parallel.collective_timeout_s)
        if world_size() == 1:
            # One process needs no address to meet at.
            store: Store = HashStore()
            torch.distributed.init_process_group(platform.BACKEND, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            for key in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
                if not os.environ.get(key):
                    raise UserError(
                        f"{key}: missing, with WORLD_SIZE {world_size()}; torchrun and launch/node set it for each rank"
                    )
            if agent_keeps_store():  # and torchrun itself sees to it that all ranks start
                torch.distributed.init_process_group(platform.BACKEND, timeout=timeout)
            else:
                store = _meet(config.parallel.join_s)
                store.set_timeout(timeout)
                torch.distributed.init_process_group(
                    platform.BACKEND, store=store, rank=rank(), world_size=world_size(), timeout=timeout
                )
    try:
        _check_same(config)
    except UserError:
        torch.distributed.destroy_process_group()  # left to the interpreter's end, its threads may abort the process
        raise
    parallel = config.parallel
    sizes = {
        "tensor": (parallel.tensor, parallel_state.get_tensor_model_parallel_world_size),
        "pipeline": (parallel.pipeline, parallel_state.get_pipeline_model_parallel_world_size),
        "context": (parallel.context, parallel_state.get_context_parallel_world_size),
        "expert": (parallel.expert, parallel_state.get_expert_model_parallel_world_size),
    }
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            distributed_timeout_minutes=math.ceil(parallel.collective_timeout_s / 60),
        )
    for key, (asked, found) in sizes.items():
        if found() != asked:
            raise UserError(f"parallel.{key}: {asked} given, but the groups of this process are of size {found()}")
    # Not a group: how many stages a rank has is the run's, and the schedule is chosen by it.
    parallel_state.set_virtual_pipeline_model_parallel_world_size(
        parallel.virtual_stages if parallel.virtual_stages > 1 else None
    )
    if config.training.deterministic:
        platform.use_deterministic_algorithms()
    torch.manual_seed(config.training.seed)
    # A captured step must find its generators as states of the graph. A process may train runs of both kinds in turn.
    captures = config.training.cuda_graph != "none"
    model_parallel_cuda_manual_seed(
        config.training.seed, te_rng_tracker=captures, use_cudagraphable_rng=captures, force_reset_rng=True
    )
    return device


def _meet(join_s: int) -> Store:
    """The store that rank 0 keeps at MASTER_ADDR, once all ranks have come to it.

    torch itself waits as long for ranks that start as for a collective, and does not say who is missing.
    """
    limit, size = datetime.timedelta(seconds=join_s), world_size()
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0)
    where = f"come to {address}:{port} within {join_s} s (parallel.join_s)"
    try:
        store = TCPStore(
            address, port, size, is_master=rank() == 0, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
    except DistNetworkError as error:
        if rank() == 0:
            raise
        raise DistStoreError(f"rank {rank()} does not reach rank 0; it has not {where}: {error}") from None
    met = PrefixStore("mhar/join", store)
    keys = [f"{number}" for number in range(size)]
    try:
        met.set(keys[rank()], "here")
        if met.add("count", 1) == size:
            met.compare_set("outcome", "", _ALL_HERE)
        # Rank 0 judges: it has waited longest of those that have come, and keeps what they wait for.
        with contextlib.suppress(DistStoreError):
            met.wait(["outcome"], limit if rank() == 0 else limit + _JUDGED_S)
        if rank() == 0 and not met.check(["outcome"]):
            missing = [key for key in keys if not met.check([key])]
            shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
            text = f"of {size} ranks {len(missing)} ({shown}) have not {where}: they hang, or their node is lost"
            met.compare_set("outcome", "", text)  # stays as it is if the last one has come meanwhile
        outcome = met.get("outcome").decode()
    except DistError as error:
        raise DistStoreError(f"rank 0 is lost; it had come, but not all others had {where}: {error}") from None
    if outcome != _ALL_HERE:
        if rank() == 0:
            time.sleep(_JUDGED_S.total_seconds())  # for the others to hear
        raise DistStoreError(outcome)
    return store


def agent_keeps_store() -> bool:
    """Whether torchrun's agent keeps the store and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _check_same(config: RunConfig) -> None:
    """Refuse ranks that were started with other configs: each would train its part of the model in its own way."""
    own = flatten(config)
    first = on_first_rank(lambda: own)

    def compare() -> None:
        for key in sorted(own.keys() | first.keys()):
            if own.get(key) != first.get(key):
                raise UserError(
                    f"{key}: {own.get(key)!r} given on rank {rank()}, but {first.get(key)!r} on rank 0; all ranks of a "
                    "run, on every machine, need the same config and command line"
                )

    on_every_rank(compare)


def shut_down() -> None:
    """Leave the process groups."""
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def on_first_rank[T](action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and give its result to all ranks; its UserError is raised on all of them."""
    result: list[T | UserError | None] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            result[0] = action()
        except UserError as error:
            result[0] = error
    torch.distributed.broadcast_object_list(result, src=0)
    outcome = result[0]
    if isinstance(outcome, UserError):
        raise outcome
    return outcome  # type: ignore[return-value]


def on_every_rank[T](action: Callable[[], T]) -> T:
    """Run ``action`` on all ranks; a UserError of one of them, the lowest, is raised on all of them."""
    result: list[T] = []
    error: UserError | None = None
    try:
        result.append(action())
    except UserError as raised:
        error = raised
    if any_rank(error is not None):
        errors: list[UserError | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(errors, error)
        raise next(found for found in errors if found is not None)
    return result[0]


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any rank."""
    if torch.distributed.get_world_size() == 1:
        return flag
    value = torch.tensor([float(flag)], device=torch.cuda.current_device())
    torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
    return bool(value.item())


def mean_of_last_stage(values: torch.Tensor | None, count: int) -> torch.Tensor:
    """Mean over data-parallel and context-parallel ranks of what the last pipeline stage has, on every rank.

    Args:
        values: `[count]` on ranks of the last stage, None on others.
    """
    if values is None:
        values = torch.zeros(count, device=torch.cuda.current_device())
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(values, group=group)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        torch.distributed.all_reduce(values, group=pipeline)
    return values.div_(group.size())
