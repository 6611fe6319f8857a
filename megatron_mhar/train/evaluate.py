"""Validation loss of a checkpoint, apart from training and under any layout."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch

from megatron_mhar import platform
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.data.dataset import check_data, count_valid_samples
from megatron_mhar.errors import UserError
from megatron_mhar.model.build import check_layers
from megatron_mhar.run_files import Evaluation, RunFiles, checkpoint_path, checkpoint_steps
from megatron_mhar.train.distributed import (
    check_layout,
    initialize,
    local_rank,
    on_every_rank,
    on_first_rank,
    shut_down,
    world_size,
)
from megatron_mhar.train.loop import Trainer
from megatron_mhar.train.progress import ProgressLog
from megatron_mhar.train.run_folder import RunFolder
from megatron_mhar.train.watch import Watch


def evaluate(
    run_dir: Path, config: RunConfig, *, step: int | None = None, batches: int | Literal["all"] | None = None
) -> Evaluation:
    """Evaluate a checkpoint of the run in ``run_dir``, and write what was found there; called by every rank.

    The run may be training at the same time. Optimizer state is loaded with the weights, for their average is part of
    it: the memory is that of training without activations kept for a backward.

    Args:
        run_dir: folder of the run.
        config: of the run, perhaps with another layout, micro-batch or validation set.
        step: of the checkpoint; the newest complete one by default.
        batches: global batches, instead of ``evaluation.batches``; "all" takes each sample once, but for what is left
            of the last one.

    Raises:
        UserError: there is no such checkpoint, it cannot be loaded, or config, data and layout do not fit.
    """
    # The run may have been moved since.
    config = config.model_copy(update={"output_dir": run_dir.parent, "name": run_dir.name})
    check_layout(config, world_size())
    check_layers(config)
    alone = not torch.distributed.is_initialized()
    device = initialize(config)
    try:
        folder = RunFolder(config)
        watch = Watch(folder.files, config.parallel)
        with ExitStack() as stack, watch:
            found = on_first_rank(lambda: _choose(folder.files, step))
            checked = on_every_rank(lambda: check_data(config, train=False) if local_rank() == 0 else {})
            digests = on_first_rank(lambda: checked)
            if batches is not None:
                count = on_first_rank(lambda: _global_batches(config, batches))
                evaluation = config.evaluation.model_copy(update={"batches": count})
                config = config.model_copy(update={"evaluation": evaluation})
            progress = stack.enter_context(ProgressLog(None, total=config.training.steps, start=found))
            trainer = Trainer(
                config, folder, device, progress, None, digests, trains=False, patience=watch.patience
            )  # fmt: skip
            found = _load(trainer, folder.files, found, step)
            watch.steps_done, watch.passes = lambda: found, lambda: trainer.passes
            loss = trainer.evaluate(average=False)
            averaged = config.optimizer.ema_decay is not None
            sequences = config.evaluation.batches * config.training.global_batch_size
            result = Evaluation(
                name=config.name,
                step=found,
                batches=config.evaluation.batches,
                sequences=sequences,
                tokens=sequences * config.training.sequence_length,
                loss=loss,
                average_loss=trainer.evaluate() if averaged else None,
                data=config.data.valid,
                data_digests=digests,
                device=platform.device_name(),
                ranks=torch.distributed.get_world_size(),
            )
            on_first_rank(lambda: result.write(folder.files.evaluation_of(found)))
            return result
    finally:
        if alone:
            shut_down()


def _choose(files: RunFiles, asked: int | None) -> int:
    """Step of the checkpoint to evaluate, once it is clear that the result can be written."""
    steps = checkpoint_steps(files.checkpoints)
    if not steps:
        raise UserError(f"{files.checkpoints}: no complete checkpoint; the run has saved none yet")
    step = steps[-1] if asked is None else asked
    if step not in steps:
        raise UserError(
            f"{checkpoint_path(files.checkpoints, step)}: no complete checkpoint; there are those of "
            f"{'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}"
        )
    path = files.evaluation_of(step)
    try:
        path.parent.mkdir(exist_ok=True)
        probe = path.with_suffix(".writable")
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be made: {error.strerror}") from error
    return step


def _load(trainer: Trainer, files: RunFiles, found: int, asked: int | None) -> int:
    """Load the checkpoint that was chosen, or a newer one if the run, which goes on, has removed it in the meantime."""
    while True:
        path = checkpoint_path(files.checkpoints, found)
        try:
            trainer.checkpoints.load(found)
            return found
        except UserError:
            if on_first_rank(path.is_dir):
                raise
            found = on_first_rank(lambda: _choose(files, asked))


def _global_batches(config: RunConfig, asked: int | Literal["all"]) -> int:
    """Global batches to evaluate, of samples each taken once."""
    samples = count_valid_samples(config)
    count = samples // config.training.global_batch_size
    if not count:
        raise UserError(
            f"data.valid: {samples} samples of {config.training.sequence_length} tokens, fewer than a global batch; "
            f"with training.global_batch_size={samples} all of them are evaluated"
        )
    if asked != "all" and asked > count:
        raise UserError(f"--batches: {asked} given, but data.valid has {count} whole global batches; all takes these")
    return count if asked == "all" else asked
