"""Checkpoints in megatron-core's distributed format: one folder a step, whole or not there.

A checkpoint is written to ``step_<n>.<random>.partial`` and renamed to ``step_<n>`` once every rank has written its
part, so a name without the ending is complete: the newest such one is where a run goes on. Of the complete ones the
newest ``checkpoint.keep`` stay, and those of steps that ``checkpoint.keep_every`` divides; the others are removed after
each save. ``integrity.json`` holds the SHA-256 of every file, in the form of megatron-core's own integrity check, but
each rank makes and checks the sums of its share of the files.

Weights, optimizer state, weight average, schedule and the number of samples consumed are all that a run's future
depends on: nothing after initialisation draws random numbers. Tensors are stored under their global names, layers by
their global number, in a form that loads under any other parallel layout.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import queue
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.validation import INTEGRITY_FNAME, StrictHandling
from megatron.core.distributed import DistributedDataParallel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_mhar.config.load import flatten
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError
from megatron_mhar.model.fp8 import check_scales, checked_scales, is_scales
from megatron_mhar.run_files import PARTIAL, checkpoint_path, checkpoint_steps
from megatron_mhar.train.distributed import on_every_rank, on_first_rank
from megatron_mhar.train.optimizer import Optimizer

logger = logging.getLogger("megatron_mhar")

# Optimizer state under the names of the parameters, whichever optimizers of a chain and ranks of it hold them.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class Checkpoints:
    """The checkpoints of a run, written and read by all ranks together.

    As a context manager it ends a save under way when the context is left by an error: what it has written so far is
    not taken for a checkpoint.

    Args:
        config: the run. With ``checkpoint.asynchronous`` a process of each rank writes while training goes on.
        folder: where they lie.
        chunks: model chunks of this rank.
        optimizer: of all chunks.
    """

    def __init__(
        self, config: RunConfig, folder: Path, chunks: Sequence[DistributedDataParallel], optimizer: Optimizer
    ) -> None:
        self.settings, self.folder, self.chunks, self.optimizer = config.checkpoint, folder, chunks, optimizer
        # Two models may have the same tensors and still not be the same; which kernels compute them is of no matter.
        self.model = {
            key: value
            for key, value in flatten(config).items()
            if key.startswith(("model.", "residual.")) and key not in ("model.layers", "residual.backend")
        }
        self._calls = AsyncCallsQueue()
        self._saving: tuple[int, Path] | None = None  # step and folder of a save under way
        self._prunes = True  # once the save under way is complete

    def resume(self, step: int) -> dict[str, Any]:
        """Remove what interrupted saves left behind, and go on from the checkpoint of ``step``, if that is not 0.

        Returns:
            Progress as it was given to :meth:`save`.

        Raises:
            UserError: see :meth:`load`.
        """
        on_first_rank(self._remove_partial)
        if not step:
            return {}
        progress = self.load(step)
        logger.info("continued from %s", checkpoint_path(self.folder, step))
        return progress

    # --- saving

    def save(self, step: int, progress: dict[str, Any], *, prune: bool = True) -> None:
        """Write the checkpoint of ``step``, or begin to, once an earlier one is done; then ``prune`` older ones.

        An asynchronous save has copied all tensors when this returns, and is completed by :meth:`poll` or :meth:`wait`.

        Raises:
            UserError: this checkpoint or the earlier one cannot be written, on one rank or more. The complete ones are
                as they were.
        """
        self.wait()
        self._prunes = prune
        self._saving = step, on_first_rank(lambda: self._begin(step))
        self._attempt(lambda: self._start(progress))
        if not self.settings.asynchronous:
            self._saving = None

    def poll(self) -> None:
        """Complete an asynchronous save if all ranks have written their part. To be called between steps.

        Raises:
            UserError: it could not be written, on one rank or more.
        """
        self._finish(blocking=False)

    def wait(self) -> None:
        """Complete an asynchronous save, waiting until all ranks have written their part.

        Raises:
            UserError: it could not be written, on one rank or more.
        """
        self._finish(blocking=True)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call in self._calls.async_calls:
            call.async_caller.close(abort=True)

    def _begin(self, step: int) -> Path:
        """Make the folder that a checkpoint is written to. No other save writes there, not even one of a killed run."""
        path = checkpoint_path(self.folder, step)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise self._refusal(step, error) from error
        return partial

    def _start(self, progress: dict[str, Any]) -> None:
        """Write this rank's part, or start the process that does."""
        assert self._saving is not None
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                # The optimizer leaves the gather to the next forward: until then, weights are new in a shard alone.
                chunk.start_param_sync(force_sync=True)
        # Megatron-core would start a server process for this queue, which the SIGTERM that ends a job also ends: the
        # last save, the one that matters, would fail.
        filesystem_async._results_queue = _Handover()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        request = dist_checkpointing.save(
            self._state(progress, loading=False),
            str(self._saving[1]),
            FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group),
            content_metadata=self.model,
            async_sharded_save=True,
            async_strategy="mcore",
        )
        assert isinstance(request, AsyncRequest)
        digests = _Handover()
        if request.async_fn is None:  # nothing of the model is this rank's to write
            digests.put({})
        else:
            write = functools.partial(_write, request.async_fn, digests, self.settings.asynchronous)
            request = request._replace(async_fn=write)
        request.add_finalize_fn(functools.partial(self._complete, *self._saving, digests))
        if self.settings.asynchronous:
            self._calls.schedule_async_request(request)
        else:
            request.execute_sync()

    def _finish(self, *, blocking: bool) -> None:
        if self._saving is not None and self._attempt(lambda: self._calls.maybe_finalize_async_calls(blocking)):
            self._saving = None

    def _attempt[T](self, action: Callable[[], T]) -> T:
        """Run a part of the save under way. An error of any rank ends it on all, and what it has written goes."""
        assert self._saving is not None
        step, partial = self._saving

        def attempt() -> T:
            try:
                return action()
            except (CheckpointingException, CheckpointException, OSError, RuntimeError) as error:
                raise self._refusal(step, error) from error

        try:
            return on_every_rank(attempt)
        except UserError:
            self._saving = None
            on_first_rank(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise

    def _complete(self, step: int, partial: Path, digests: _Handover) -> None:
        """Give the checkpoint its name. Called by all ranks once every part is written."""
        parts: list[dict[str, str] | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, digests.take())

        def complete() -> None:
            try:
                if None in parts:
                    raise OSError(0, f"a part of rank {parts.index(None)} could not be read back")
                files = {name: digest for part in parts if part is not None for name, digest in part.items()}
                files |= {name: _digest(partial / name) for name in (".metadata", CONFIG_FNAME)}
                with (partial / INTEGRITY_FNAME).open("w") as manifest:
                    json.dump({"algorithm": "sha256", "files": files}, manifest, indent=1)
                    manifest.flush()
                    os.fsync(manifest.fileno())
                _sync_folder(partial)
                path = checkpoint_path(self.folder, step)
                if path.exists():
                    _remove(path)
                partial.rename(path)
                _sync_folder(self.folder)
            except OSError as error:
                raise self._refusal(step, error) from error
            if self._prunes:
                self._prune()

        on_first_rank(complete)

    def _prune(self) -> None:
        every = self.settings.keep_every
        for step in checkpoint_steps(self.folder)[: -self.settings.keep]:
            if every is None or step % every:
                path = checkpoint_path(self.folder, step)
                try:
                    _remove(path)
                except OSError as error:  # the new one is there all the same
                    logger.warning("%s: the old checkpoint cannot be removed (%s)", path, error.strerror)

    def _refusal(self, step: int, error: BaseException) -> UserError:
        steps = checkpoint_steps(self.folder)
        free = shutil.disk_usage(self.folder).free / 1e6
        return UserError(
            f"{checkpoint_path(self.folder, step)}: the checkpoint cannot be written ({_reason(error)}; {free:,.1f} MB "
            f"are free there). Once this is mended, the same command goes on from step {steps[-1] if steps else 0}"
        )

    def _remove_partial(self) -> None:
        for entry in sorted(self.folder.glob(f"step_*{PARTIAL}")):
            shutil.rmtree(entry, ignore_errors=True)
            logger.info("%s: a half-written checkpoint, passed over and removed", entry)

    def _state(self, progress: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        sharding = dict(_SHARDING)  # megatron-core adds the process groups of now to it
        # Tensors go by their global names: which chunk and rank holds them is of no consequence.
        weights = {
            f"model{i}": chunk.module.sharded_state_dict(metadata=sharding) for i, chunk in enumerate(self.chunks)
        }
        return {
            **weights,
            "optimizer": self.optimizer.megatron.sharded_state_dict(weights, is_loading=loading, metadata=sharding),
            "scheduler": self.optimizer.scheduler.state_dict(),
            "progress": progress,
        }

    # --- loading

    def load(self, step: int) -> dict[str, Any]:
        """Load the checkpoint of ``step``, of whatever layout it is, and return its progress.

        Raises:
            UserError: a file of it is missing or is not what was written, or it is of another model.
        """
        path = checkpoint_path(self.folder, step)
        on_every_rank(lambda: _check_files(path))
        on_first_rank(lambda: self._check_model(path))
        wanted = self._state({}, loading=True)

        def read() -> dict[str, Any]:
            try:
                state, unasked, lacking = dist_checkpointing.load(wanted, str(path), strict=StrictHandling.RETURN_ALL)
            except (Exception, CheckpointException) as error:  # there is no end to what a foreign file can raise
                raise _unloadable(path, _load_reason(error)) from error
            # Megatron-core calls missing what the model does not ask for, and unexpected what is not in the checkpoint.
            for names, what in ((lacking, "it lacks"), (unasked, "this model has no")):
                if tensors := sorted(name for name in names if not is_scales(name)):
                    others = f" and {len(tensors) - 1} others" if len(tensors) > 1 else ""
                    raise _unloadable(path, f"{what} {tensors[0]}{others}")
            for i in range(len(self.chunks)):
                try:
                    check_scales(state[f"model{i}"])
                except ValueError as error:
                    raise _unloadable(path, str(error)) from error
            return state

        state = on_every_rank(read)
        for i, chunk in enumerate(self.chunks):
            with checked_scales():
                keys = chunk.module.load_state_dict(state[f"model{i}"], strict=False)
            if unknown := [name for name in (*keys.missing_keys, *keys.unexpected_keys) if not is_scales(name)]:
                raise RuntimeError(
                    f"{unknown[0]} has no place in checkpoints: its module's sharded_state_dict lacks it"
                )
        self.optimizer.megatron.load_state_dict(state["optimizer"])
        self.optimizer.scheduler.load_state_dict(state["scheduler"])
        return dict(state["progress"])

    def _check_model(self, path: Path) -> None:
        """Refuse a checkpoint of another model."""
        try:
            saved = dist_checkpointing.load_content_metadata(str(path))
        except (Exception, CheckpointException) as error:
            raise _unloadable(path, _load_reason(error)) from error
        # Keys that came later are told by the tensors that they mean.
        for key, value in (saved or {}).items():
            if self.model.get(key) != value:
                raise UserError(
                    f"{path}: the checkpoint cannot be loaded ({key}: {value!r} there, {self.model.get(key)!r} here); "
                    "it is of another model"
                )


class _Handover:
    """What the writer of a rank's part hands to the rank, from this process or from a forked one.

    A queue of one item in an anonymous file. Megatron-core calls :meth:`put` and :meth:`get_nowait`.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()

    def put(self, item: Any) -> None:
        pickle.dump(item, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except EOFError:
            raise queue.Empty from None

    def take(self) -> Any:
        """The item, or None if there is none."""
        with suppress(queue.Empty):
            return self.get_nowait()
        return None


def _write(
    write: Callable[..., None],
    digests: _Handover,
    in_background: bool,
    rank: int,
    buckets: Sequence[filesystem_async.WriteBucket],
    results: _Handover,
) -> None:
    """Write a rank's files by megatron-core's ``write`` and hand over their sums."""
    if in_background:
        _stay_in_background()
    write(rank, buckets, results)
    with suppress(OSError):  # of a file that could not be written: megatron-core hands that over
        digests.put({Path(file).name: _digest(Path(file)) for file, *_ in buckets})


def _stay_in_background() -> None:
    """Make this forked process one that writes a checkpoint to its end unless its rank dies."""
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to all processes of a job: the rank waits for this one
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # what belongs to the rank's device must not be freed here
    os.nice(10)
    rank = multiprocessing.parent_process()
    assert rank is not None

    def follow() -> None:
        rank.join()
        os._exit(1)  # it holds the rank's files open, the run folder's lock among them

    threading.Thread(target=follow, daemon=True).start()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a complete checkpoint; if this is interrupted, it is no complete one."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    path.rename(partial)
    shutil.rmtree(partial)


def _check_files(path: Path) -> None:
    """Hold this rank's share of a checkpoint's files against their sums."""
    files = _manifest(path)
    share: Iterable[str] = sorted(files)[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
    for name in share:
        try:
            digest = _digest(path / name)
        except FileNotFoundError:
            raise _unloadable(path, f"{name} is missing") from None
        except OSError as error:
            raise _unloadable(path, f"{name} cannot be read: {error.strerror}") from error
        if digest != files[name]:
            raise _unloadable(path, f"{name} is not the file that was written: it is cut off, changed or of another")


def _manifest(path: Path) -> dict[str, str]:
    """SHA-256 of each file by its name, as integrity.json has it."""
    try:
        files = json.loads((path / INTEGRITY_FNAME).read_bytes())["files"]
        if CONFIG_FNAME in files and all(isinstance(entry, str) for item in files.items() for entry in item):
            return dict(files)
    except FileNotFoundError:
        raise _unloadable(path, f"{INTEGRITY_FNAME} is missing") from None
    except OSError as error:
        raise _unloadable(path, f"{INTEGRITY_FNAME} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise _unloadable(path, f"{INTEGRITY_FNAME} does not list the files of a checkpoint")


def _unloadable(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path}: the checkpoint cannot be loaded ({reason}); it is damaged or of another model. "
        "Remove it, and the one before it is used, or the run starts anew if there is none"
    )


def _load_reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


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
    if "results_queue should not be empty" in str(error):
        return "the process that writes it was ended"
    return f"{type(error).__name__}: {error}".splitlines()[0]
