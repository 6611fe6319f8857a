"""The folder of a run as the trainer sees it: may it be written, does a run go on there, is it in use."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_mhar.config.load import dump_config, flatten, load_config
from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError
from megatron_mhar.run_files import RunFiles, RunSummary, checkpoint_steps, write_whole

# A run may go on with other values of these keys; any other key would make it another run.
CHANGEABLE = (
    "output_dir", "parallel.", "checkpoint.", "tracking.", "data.num_workers", "data.train", "data.valid",
    "training.stop_after", "training.micro_batch_size", "training.log_interval", "training.recompute",
    "training.cuda_graph", "training.skip.", "training.peak_tflops", "model.layers", "residual.backend",
    "evaluation.interval", "evaluation.tail", "profile.",
)  # fmt: skip


class RunFolder:
    """The folder of the run of ``config``."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = config.run_dir
        self.files = RunFiles(self.path)

    def prepare(self, digests: Mapping[str, str] | None = None) -> int:
        """Make the folder, or check that this run may go on in it. Called by rank 0 alone, with the folder locked.

        Args:
            digests: of each data file by its name in the config, as check_data gives them.

        Returns:
            Step of the newest complete checkpoint, 0 without one.

        Raises:
            UserError: the folder cannot be written, or belongs to a run of another config or of other data.
        """
        digests = digests or {}
        data = self.config.data
        sets = {"train": data.train, "valid": data.valid}
        contents = {name: [digests[file] for file in files if file in digests] for name, files in sets.items()}
        with self._made():
            steps = checkpoint_steps(self.files.checkpoints)
            if self.begun:
                self.refuse_another_run()
                if self.files.data.is_file() and digests:
                    self._refuse_other_data(contents)
            write_whole(self.files.config, dump_config(self.config))
            if digests:
                write_whole(self.files.data, json.dumps(contents, indent=1))
        return steps[-1] if steps else 0

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run: one that failed before its first step is none yet."""
        journal = self.files.journal
        return bool(checkpoint_steps(self.files.checkpoints)) or (journal.is_file() and journal.stat().st_size > 0)

    @contextmanager
    def _made(self) -> Iterator[None]:
        """Within the context the folder is there and can be written; if not, nothing is left of it."""
        missing: list[Path] = []
        try:
            for folder in (self.path, *self.path.parents):
                if folder.exists():
                    break
                missing.append(folder)
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.write_text("")
            probe.unlink()
            yield
        except OSError as error:
            for folder in missing:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise UserError(
                f"{self.path}: the run folder cannot be written ({error.strerror}); "
                "choose another by output_dir=... or name=..."
            ) from error

    def refuse_another_run(self) -> None:
        """Refuse to go on with the run that the folder holds, if this is another one.

        Raises:
            UserError: it is, and which keys differ.
        """
        if not self.files.config.is_file():
            raise UserError(
                f"{self.path}: holds a run without its config.yaml; bring it back, give this run another name=..., "
                "or remove the folder"
            )
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

    def _refuse_other_data(self, now: Mapping[str, list[str]]) -> None:
        """One curve is of one set of data; validation data may come to a run that had none."""
        try:
            read = json.loads(self.files.data.read_text())
            earlier = {name: list(read[name]) for name in now}
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.files.data}: does not hold the digests of the run's data ({type(error).__name__}: {error}); "
                "bring it back, or remove it if the data are the same"
            ) from None
        hints = {"train": "", "valid": " (mhar evaluate takes other validation data)"}
        for name, done in (("train", "trained"), ("valid", "evaluated")):
            if earlier[name] != now[name] and (name == "train" or earlier[name]):
                files = ", ".join(getattr(self.config.data, name)) or "none"
                raise UserError(
                    f"{self.path}: was {done} on other data: the contents of data.{name} ({files}) have changed since. "
                    f"Bring the files back, give this run another name=..., or remove the folder{hints[name]}"
                )

    def finished(self) -> RunSummary | None:
        """Summary of the run if its last step is done."""
        if not self.files.summary.is_file():
            return None
        summary = RunSummary.read(self.files.summary)
        return summary if summary.steps == self.config.training.steps else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder where it is missing, and hold it for this process.

        Raises:
            UserError: another process trains in it, or it cannot be written.
        """
        with self._made():
            file = (self.path / ".lock").open("a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise UserError(f"{self.path}: another process is training in this folder ({holder})") from None
            except OSError:
                pass  # some network file systems have no locks
            with contextlib.suppress(OSError):  # a full disk is told by what must be written
                file.truncate(0)
                file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
                file.flush()
            yield
