"""What lies in the folder of a run, for whoever writes or reads it.

config.yaml     the resolved config
data.json       what identifies the training files, see data.dataset
log.txt         plain log lines
metrics.jsonl   journal of every metric, see tracking.journal
tracking/       the MLflow run, see tracking.job
checkpoints/    complete checkpoints, see train.checkpoint
index/          shuffled sample indices
routing.npz     mean routing of the last evaluation (routed methods), a RoutingMap
summary.json    written when the last step is done, a RunSummary
evaluation/     what mhar evaluate found, a file a checkpoint, an Evaluation
profile/        traces of profiled steps, a file a rank, see train.profile
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, computed_field

from megatron_mhar.errors import UserError


class RunFiles:
    """Paths in the run folder ``folder``; what each holds stands above."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "config.yaml"
        self.data = folder / "data.json"
        self.log = folder / "log.txt"
        self.journal = folder / "metrics.jsonl"
        self.checkpoints = folder / "checkpoints"
        self.index = folder / "index"
        self.routing = folder / "routing.npz"
        self.summary = folder / "summary.json"
        self.evaluation = folder / "evaluation"
        self.profile = folder / "profile"

    def evaluation_of(self, step: int) -> Path:
        """What was found of the checkpoint of ``step``."""
        return self.evaluation / f"step_{step:08d}.json"


# In the last line of the log of a run that has ended before its last step.
GOES_ON, STARTS_ANEW = "the same command goes on", "the same command starts anew"
PARTIAL = ".partial"  # ends the name of a checkpoint that is not complete
_CHECKPOINT = re.compile(r"step_(\d+)")


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in ``folder``, ascending; a half-written one has another name."""
    if not folder.is_dir():
        return []
    matches = ((_CHECKPOINT.fullmatch(entry.name), entry) for entry in folder.iterdir())
    return sorted(int(match[1]) for match, entry in matches if match and entry.is_dir())


def checkpoint_path(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of ``step``."""
    return folder / f"step_{step:08d}"


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the whole new one."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


class RunSummary(BaseModel):
    """Contents of ``summary.json``, written when a run has ended.

    ``valid_loss`` is the mean of the last evaluations, in nats a token; losses are None without validation data.
    ``tokens_per_second`` is the median over the run, all ranks together; ``peak_memory_bytes`` that of the fullest
    rank. ``data_digests`` tells the contents of the data files apart. ``skipped_steps`` left the weights as they were.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    method: str
    num_heads: int
    parameters: int
    steps: int
    valid_loss: float | None
    valid_loss_last: float | None
    tokens_per_second: float
    peak_memory_bytes: int
    device: str
    routing_backend: str | None = None
    data_digests: dict[str, str] = {}
    skipped_steps: int = 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read summary.json.

        Raises:
            UserError: the file cannot be read or is no summary.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"])) or "content"
            raise UserError(f"{path}: {at}: {first['msg']}") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None

    def write(self, path: Path) -> None:
        """Write summary.json, whole or not at all."""
        write_whole(path, self.model_dump_json(indent=2) + "\n")


class Evaluation(BaseModel):
    """Contents of ``evaluation/step_<step>.json``: a checkpoint on validation data, losses in nats a token.

    ``average_loss`` is that of the weights' average, where one is kept. ``batches`` counts global batches, ``data`` are
    the files, told apart by ``data_digests``.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")

    name: str
    step: int
    batches: int
    sequences: int
    tokens: int
    loss: float
    average_loss: float | None
    data: tuple[str, ...]
    data_digests: dict[str, str]
    device: str
    ranks: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def perplexity(self) -> float:
        """Of the weights."""
        return _exp(self.loss)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def average_perplexity(self) -> float | None:
        """Of their average."""
        return None if self.average_loss is None else _exp(self.average_loss)

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        try:
            write_whole(path, self.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class RoutingMap:
    """Learned routing of a run.

    Attributes:
        weights: `[sites, heads, sources]` fp32, mean depth weight over validation tokens; 0 where not read.
        reads: `[sites, sources]` bool, whether a site reads a source.
        site_names: name of each site, in depth order.
        source_names: name of each source, in depth order.
        entropy: `[sites, heads]` fp32, mean entropy of a token's weights as a share of the largest there can be, the
            logarithm of the number of sources; NaN at a site with one source. None in files of earlier versions.
        gates: `[sites]` fp32, for delta methods.
    """

    weights: NDArray[np.float32]
    reads: NDArray[np.bool_]
    site_names: tuple[str, ...]
    source_names: tuple[str, ...]
    entropy: NDArray[np.float32] | None = None
    gates: NDArray[np.float32] | None = None

    @property
    def finite(self) -> bool:
        """False where the run diverged."""
        return bool(np.isfinite(self.weights).all())

    def metrics(self) -> dict[str, float]:
        """Entropy, mean over heads, of each site that has a choice, and each site's gate, with their means."""
        metrics: dict[str, float] = {}
        for name, values, sites in (
            ("entropy", None if self.entropy is None else self.entropy.mean(1), np.flatnonzero(self.reads.sum(1) > 1)),
            ("gate", self.gates, np.arange(len(self.site_names))),
        ):
            if values is not None and len(sites):
                metrics |= {f"routing/{name}/site_{site:03}": float(values[site]) for site in sites}
                metrics[f"routing/{name}/mean"] = float(values[sites].mean())
        return metrics

    def write(self, path: Path) -> None:
        """Write routing.npz, whole or not at all."""
        partial = path.with_name("partial-" + path.name)
        optional = {"entropy": self.entropy, "gates": self.gates}
        given = {name: array for name, array in optional.items() if array is not None}
        np.savez(partial, weights=self.weights, reads=self.reads, site_names=np.array(self.site_names),
                 source_names=np.array(self.source_names), allow_pickle=False, **given)  # fmt: skip
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read routing.npz.

        Raises:
            UserError: the file cannot be read or its arrays do not fit together.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                weights = arrays["weights"].astype(np.float32)
                reads = arrays["reads"].astype(np.bool_)
                sites, sources = (tuple(map(str, arrays[name])) for name in ("site_names", "source_names"))
                optional = {
                    name: arrays[name].astype(np.float32) for name in ("entropy", "gates") if name in arrays.files
                }
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise UserError(f"{path}: not the routing of a run: {error}") from None
        if weights.ndim != 3 or weights.shape[::2] != reads.shape or reads.shape != (len(sites), len(sources)):
            raise UserError(
                f"{path}: shapes do not fit: weights {weights.shape}, reads {reads.shape}, {len(sites)} site names "
                f"and {len(sources)} source names given; allowed: [sites, heads, sources] and [sites, sources]"
            )
        return cls(weights, reads, sites, sources, **optional)
