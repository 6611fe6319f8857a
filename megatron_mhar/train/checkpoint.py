"""Checkpoints in megatron-core's distributed format: one folder a step, whole or not there.

A checkpoint is written to ``step_<n>.partial`` and renamed once every rank has written its part, so a name without the
ending is complete. Weights, optimizer state, weight average, schedule and the number of samples consumed are all that
a run's future depends on: nothing after initialisation draws random numbers. Tensors are stored under their global
names, layers by their global number, in a form that reshards.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_mhar.errors import UserError
from megatron_mhar.train.distributed import on_every_rank, on_first_rank
from megatron_mhar.train.optimizer import Optimizer

_NAME = re.compile(r"step_(\d+)")
_PARTIAL = ".partial"
# Saves here write from this process, so a plain queue does. For its asynchronous saves megatron-core starts a server
# process, which the SIGTERM that ends a job also ends: the last save, the one that matters, would fail.
filesystem_async._results_queue = queue.Queue()
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in ``folder``, ascending."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir())
    return sorted(int(m[1]) for m, entry in matches if m and (entry / "metadata.json").is_file())


def checkpoint_path(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of ``step``."""
    return folder / f"step_{step:08d}"


def _state(
    chunks: Sequence[DistributedDataParallel], optimizer: Optimizer, progress: dict[str, Any], *, loading: bool
) -> dict[str, Any]:
    metadata = dict(_METADATA)  # megatron-core adds the process groups of now to it
    # Tensors go by their global names: which chunk and rank holds them is of no consequence.
    weights = {f"model{i}": chunk.module.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    return {
        **weights,
        "optimizer": optimizer.megatron.sharded_state_dict(weights, is_loading=loading, metadata=metadata),
        "scheduler": optimizer.scheduler.state_dict(),
        "progress": progress,
    }


def save(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: Optimizer,
    progress: dict[str, Any],
    *,
    step: int,
    keep: int,
) -> Path:
    """Write the checkpoint of ``step`` and remove all but the newest ``keep`` complete ones. Called by all ranks.

    Raises:
        UserError: the checkpoint cannot be written, on one rank or more. The earlier ones are as they were.
    """
    target = checkpoint_path(folder, step)
    partial = target.with_name(target.name + _PARTIAL)

    def refuse(error: BaseException) -> UserError:
        steps = checkpoint_steps(folder)
        free = shutil.disk_usage(folder).free / 1e6
        return UserError(
            f"{target}: the checkpoint cannot be written ({_reason(error)}; {free:,.1f} MB are free there). "
            f"Once this is mended, the same command goes on from step {steps[-1] if steps else 0}"
        )

    def begin() -> None:
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            raise refuse(error) from error

    def write() -> None:
        try:
            dist_checkpointing.save(_state(chunks, optimizer, progress, loading=False), str(partial))
        except (CheckpointingException, CheckpointException, OSError, RuntimeError) as error:
            raise refuse(error) from error

    def finish() -> None:
        try:
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            descriptor = os.open(folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            for old in checkpoint_steps(folder)[:-keep]:
                shutil.rmtree(checkpoint_path(folder, old))
        except OSError as error:
            raise refuse(error) from error

    on_first_rank(begin)
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            # The optimizer leaves the gather to the next forward: until then, weights are new in a rank's shard alone.
            chunk.start_param_sync(force_sync=True)
    try:
        on_every_rank(write)
    except UserError:
        on_first_rank(lambda: remove_partial(folder))
        raise
    on_first_rank(finish)
    return target


def _reason(error: BaseException) -> str:
    """What went wrong on the disk, out of what megatron-core and torch have put around it."""
    if isinstance(error, CheckpointException) and error.failures:
        return _reason(next(iter(error.failures.values()))[0])
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if error.__cause__ is not None:
        return _reason(error.__cause__)
    if "Worker failure" in str(error):  # megatron-core's writers pass on no more than the class of their error
        return "one of its files could not be written"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def load(
    folder: Path, chunks: Sequence[DistributedDataParallel], optimizer: Optimizer, *, step: int
) -> dict[str, Any]:
    """Load the checkpoint of ``step`` and return its progress. Called by all ranks.

    Raises:
        UserError: the checkpoint cannot be read or is of another model.
    """
    path = checkpoint_path(folder, step)
    wanted = _state(chunks, optimizer, {}, loading=True)
    try:
        state = dist_checkpointing.load(wanted, str(path))
    except (Exception, CheckpointException) as error:  # there is no end to what a damaged file can raise
        cause: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:
            cause = next(iter(error.failures.values()))[0]
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise UserError(
            f"{path}: the checkpoint cannot be loaded ({reason[:300]}); it is damaged or of another "
            "model. Remove it, and the one before it is used"
        ) from error
    for i, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state[f"model{i}"])
    optimizer.megatron.load_state_dict(state["optimizer"])
    optimizer.scheduler.load_state_dict(state["scheduler"])
    return dict(state["progress"])


def remove_partial(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    for entry in folder.glob(f"step_*{_PARTIAL}"):
        shutil.rmtree(entry, ignore_errors=True)
