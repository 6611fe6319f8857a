"""The folder of a run as the trainer sees it: may it be written, does a run go on there, is it in use."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_mhar.config.load import dump_config, flatten, load_config
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError
from megatron_mhar.run_files import RunFiles, RunSummary, write_whole
from megatron_mhar.train.checkpoint import checkpoint_steps, remove_partial

# A run may go on with other values of these keys; any other key would make it another run.
CHANGEABLE = (
    "output_dir", "parallel.", "checkpoint.", "tracking.", "data.num_workers", "data.train", "data.valid",
    "training.stop_after", "training.micro_batch_size", "training.log_interval", "training.recompute", "model.layers",
    "residual.backend", "evaluation.",
)  # fmt: skip


class RunFolder:
    """The folder of the run of ``config``."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = config.run_dir
        self.files = RunFiles(self.path)

    def prepare(self) -> int:
        """Make the folder, or check that this run may go on in it. Called by rank 0 alone.

        Returns:
            Step of the newest complete checkpoint, 0 without one.

        Raises:
            UserError: the folder cannot be written, belongs to another config, or is in use.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"{self.path}: the run folder cannot be written ({error.strerror}); "
                "choose another by output_dir=... or name=..."
            ) from error
        if self.files.config.exists():
            self._refuse_another_run()
        write_whole(self.files.config, dump_config(self.config))
        remove_partial(self.files.checkpoints)
        steps = checkpoint_steps(self.files.checkpoints)
        return steps[-1] if steps else 0

    def _refuse_another_run(self) -> None:
        earlier, now = flatten(load_config(self.files.config)), flatten(self.config)
        changed = [
            f"{key}: {earlier.get(key)!r} there, {value!r} given"
            for key, value in now.items()
            if earlier.get(key) != value and not key.startswith(CHANGEABLE)
        ]
        if changed:
            raise UserError(
                f"{self.path}: holds a run with another config ({'; '.join(changed)}). "
                "Give this run another name=..., or remove the folder"
            )

    def finished(self) -> RunSummary | None:
        """Summary of the run if its last step is done."""
        if not self.files.summary.is_file():
            return None
        summary = RunSummary.read(self.files.summary)
        return summary if summary.steps == self.config.training.steps else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process.

        Raises:
            UserError: another process trains in it.
        """
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.path}: another process is training in this folder") from None
            except OSError:
                pass  # some network file systems have no locks
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
