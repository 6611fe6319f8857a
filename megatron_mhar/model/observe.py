"""Mean routing weights of a model over the tokens it sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_mhar.config.schema import SUBLAYERS
from megatron_mhar.depth.sites import DepthTable, Source
from megatron_mhar.model.stack import RoutedStack
from megatron_mhar.routing import depth_weights
from megatron_mhar.run_files import RoutingMap

# Of runs, and of stacks with submodules of their own.
SUBLAYER_NAMES = SUBLAYERS | {"D": "DSA", "+": "MLA"}


def _column(source: Source) -> str:
    # Each open sum is read by one site alone: they share a column.
    return "open block" if source.kind == "open" else str(source)


class RoutingRecorder:
    """Observer of a rank's stacks that sums their routing weights over tokens.

    Args:
        stack: one of them.
        pattern: layer symbols of the whole model.
    """

    def __init__(self, stack: RoutedStack, pattern: str) -> None:
        self.table: DepthTable = stack.table
        self.num_heads, self.eps = stack.residual.num_heads, stack.residual.eps
        self.symbols = pattern
        self.columns = list(dict.fromkeys(_column(s) for site in self.table.reads for s in site))
        shape = (self.table.num_sites, self.num_heads, len(self.columns))
        self.sums = torch.zeros(shape, dtype=torch.float64)
        self.tokens = torch.zeros(shape[0], dtype=torch.float64)

    @torch.no_grad()
    def __call__(self, site: int, sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor) -> None:
        """Add one site's weights over the tokens of one micro-batch."""
        weights = depth_weights(sources, query, norm_weight, num_heads=self.num_heads, eps=self.eps)
        per_source = weights.flatten(1, -2) if weights.dim() > 2 else weights.unsqueeze(1)  # [N, tokens, H]
        self.tokens[site] += per_source.shape[1]
        for source, weight in zip(self.table.reads[site], per_source, strict=True):
            self.sums[site, :, self.columns.index(_column(source))] += weight.double().sum(0).cpu()

    def result(self) -> RoutingMap:
        """Means over all tokens seen on all ranks; every rank must call it."""
        sums = self.sums.to(torch.cuda.current_device())
        tokens = self.tokens.to(torch.cuda.current_device())
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(tokens)
        reads = np.array([[c in {_column(s) for s in site} for c in self.columns] for site in self.table.reads])
        names = [f"{t} {SUBLAYER_NAMES.get(symbol, symbol)}" for t, symbol in enumerate(self.symbols)]
        names += ["final"] * self.table.has_final_site
        weights = (sums / tokens.clamp_min(1).view(-1, 1, 1)).float().cpu().numpy()
        return RoutingMap(weights, reads, tuple(names), tuple(self.columns))


@contextmanager
def record_routing(models: Sequence[HybridModel]) -> Iterator[RoutingRecorder]:
    """Within the context, every forward of a rank's model chunks adds to the recorder."""
    stacks = [model.decoder for model in models]
    recorder = RoutingRecorder(stacks[0], models[0].hybrid_layer_pattern.replace("|", ""))
    for stack in stacks:
        stack.observer = recorder
    try:
        yield recorder
    finally:
        for stack in stacks:
            stack.observer = None
