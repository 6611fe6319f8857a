"""Mean routing weights of a model over the tokens it sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from megatron_mhar.depth.sites import DepthTable, Source
from megatron_mhar.model.stack import RoutedStack
from megatron_mhar.routing import depth_weights
from megatron_mhar.run_files import RoutingMap

SUBLAYER_NAMES = {
    "*": "attention",
    "-": "MLP",
    "E": "MoE",
    "M": "Mamba",
    "G": "gated delta net",
    "D": "DSA",
    "+": "MLA",
}


def _column(source: Source) -> str:
    # Each open sum is read by one site alone: they share a column.
    return "open block" if source.kind == "open" else str(source)


class RoutingRecorder:
    """Observer of a stack that sums its routing weights over tokens."""

    def __init__(self, stack: RoutedStack) -> None:
        self.table: DepthTable = stack.table
        self.num_heads, self.eps = stack.residual.num_heads, stack.residual.eps
        self.symbols = stack.layer_type_list
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
def record_routing(stack: RoutedStack) -> Iterator[RoutingRecorder]:
    """Within the context, every forward of ``stack`` adds to the recorder."""
    recorder = RoutingRecorder(stack)
    stack.observer = recorder
    try:
        yield recorder
    finally:
        stack.observer = None
