"""What lies in the folder of a run, for whoever writes or reads it.

config.yaml     the resolved config
data.json       what identifies the training files, see data.dataset
log.txt         plain log lines
metrics.jsonl   journal of every metric, see tracking.journal
tracking/       the MLflow run, see tracking.job
checkpoints/    complete checkpoints, see train.checkpoint
index/          shuffled sample indices
routing.npz     mean routing weights of the last evaluation (routed methods), a RoutingMap
summary.json    written when the last step is done, a RunSummary
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

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
    rank. ``data_digests`` tells the contents of the data files apart.
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


@dataclass(frozen=True)
class RoutingMap:
    """Learned routing of a run.

    Attributes:
        weights: `[sites, heads, sources]` fp32, mean depth weight over validation tokens; 0 where not read.
        reads: `[sites, sources]` bool, whether a site reads a source.
        site_names: name of each site, in depth order.
        source_names: name of each source, in depth order.
    """

    weights: NDArray[np.float32]
    reads: NDArray[np.bool_]
    site_names: tuple[str, ...]
    source_names: tuple[str, ...]

    @property
    def finite(self) -> bool:
        """False where the run diverged."""
        return bool(np.isfinite(self.weights).all())

    def write(self, path: Path) -> None:
        """Write routing.npz, whole or not at all."""
        partial = path.with_name("partial-" + path.name)
        np.savez(partial, weights=self.weights, reads=self.reads, site_names=np.array(self.site_names),
                 source_names=np.array(self.source_names))  # fmt: skip
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
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise UserError(f"{path}: not the routing of a run: {error}") from None
        if weights.ndim != 3 or weights.shape[::2] != reads.shape or reads.shape != (len(sites), len(sources)):
            raise UserError(
                f"{path}: shapes do not fit: weights {weights.shape}, reads {reads.shape}, {len(sites)} site names "
                f"and {len(sources)} source names given; allowed: [sites, heads, sources] and [sites, sources]"
            )
        return cls(weights, reads, sites, sources)
