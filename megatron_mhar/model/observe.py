"""How a model routes the tokens it sees: mean weights, their entropy, and gates."""

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
    """Observer of a rank's stacks that sums their routing weights, and their entropy, over tokens.

    Args:
        stacks: of this rank.
        pattern: layer symbols of the whole model.
        micro_batches: so many are looked at, the first ones; all by default.
    """

    def __init__(self, stacks: Sequence[RoutedStack], pattern: str, micro_batches: int | None = None) -> None:
        self.stacks = stacks
        self.table: DepthTable = stacks[0].table
        self.num_heads, self.eps = stacks[0].residual.num_heads, stacks[0].residual.eps
        self.symbols = pattern
        names = [[_column(source) for source in site] for site in self.table.reads]
        self.columns = list(dict.fromkeys(name for site in names for name in site))
        device, sites = torch.cuda.current_device(), self.table.num_sites
        self._index = [torch.tensor([self.columns.index(name) for name in site], device=device) for site in names]
        self.sums = torch.zeros(sites, self.num_heads, len(self.columns), dtype=torch.float64, device=device)
        self.entropy = torch.zeros(sites, self.num_heads, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(sites, dtype=torch.float64, device=device)
        self._left = [micro_batches] * sites

    @torch.no_grad()
    def __call__(self, site: int, sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor) -> None:
        """Add one site's weights over the tokens of one micro-batch. Nothing waits for the device."""
        if (left := self._left[site]) is not None:
            if not left:
                return
            self._left[site] = left - 1
        weights = depth_weights(sources, query, norm_weight, num_heads=self.num_heads, eps=self.eps)
        per_source = weights.flatten(1, -2) if weights.dim() > 2 else weights.unsqueeze(1)  # [N, tokens, H]
        self.tokens[site] += per_source.shape[1]
        self.sums[site].index_add_(1, self._index[site], per_source.sum(1, dtype=torch.float64).t())
        self.entropy[site] += torch.special.entr(per_source).sum((0, 1), dtype=torch.float64)

    @torch.no_grad()
    def result(self) -> RoutingMap:
        """Means over all tokens seen on all ranks, and the gates as they are; every rank must call it."""
        sums, entropy, tokens, gates = map(_over_ranks, (self.sums, self.entropy, self.tokens, self._gates()))
        reads = np.array([[c in {_column(s) for s in site} for c in self.columns] for site in self.table.reads])
        names = [f"{t} {SUBLAYER_NAMES.get(symbol, symbol)}" for t, symbol in enumerate(self.symbols)]
        names += ["final"] * self.table.has_final_site
        tokens = tokens.clamp_min(1)
        largest = torch.from_numpy(np.log(reads.sum(1))).to(entropy)  # zero with one source: 0 / 0
        return RoutingMap(
            (sums / tokens.view(-1, 1, 1)).float().cpu().numpy(),
            reads,
            tuple(names),
            tuple(self.columns),
            entropy=(entropy / (tokens * largest).view(-1, 1)).float().cpu().numpy(),
            gates=(gates[0] / gates[1]).float().cpu().numpy() if gates[1].any() else None,
        )

    def _gates(self) -> Tensor:
        """`[2, sites]`: gates of this rank's sites, and ones where it has one."""
        gates = torch.zeros(2, self.table.num_sites, dtype=torch.float64, device=self.sums.device)
        for stack in self.stacks:
            for site, layer in enumerate(stack.layers, stack.first_sublayer):
                if layer.site.gate is not None:
                    gates[:, site] = torch.stack([layer.site.gate[0].double(), gates.new_ones(())])
        return gates


def _over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return total


@contextmanager
def record_routing(models: Sequence[HybridModel], micro_batches: int | None = None) -> Iterator[RoutingRecorder]:
    """Within the context, forwards of a rank's model chunks add to the recorder: all, or those of ``micro_batches``."""
    stacks = [model.decoder for model in models]
    recorder = RoutingRecorder(stacks, models[0].hybrid_layer_pattern.replace("|", ""), micro_batches)
    for stack in stacks:
        stack.observer = recorder
    try:
        yield recorder
    finally:
        for stack in stacks:
            stack.observer = None
