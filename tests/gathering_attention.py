"""Core attention under context parallelism that gathers all keys and values: for tests without Transformer Engine."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def positions(context: torch.distributed.ProcessGroup, rank: int, length: int) -> Tensor:
    """Global positions `[length]` of a context rank's part of a sequence: of 2 x cp pieces, one from each end."""
    pieces = torch.arange(length * context.size()).view(2 * context.size(), -1)
    return pieces[[rank, 2 * context.size() - 1 - rank]].flatten()


class GatheringAttention(MegatronModule):
    """Stands in for DotProductAttention, whose constructor and forward it has; causal by global positions."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        assert attn_mask_type == AttnMaskType.causal and config.attention_dropout == 0
        self.context = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """`[s / cp, b, heads, width]` and twice `[s / cp, b, groups, width]` -> `[s / cp, b, heads * width]`."""
        length, ranks = query.shape[0], range(self.context.size())
        every = torch.cat([positions(self.context, rank, length) for rank in ranks])
        # In the order of positions; the backward of the gather sums what the ranks' queries give to a key.
        keys, values = (
            gather_from_sequence_parallel_region(x, group=self.context)[every.argsort()] for x in (key, value)
        )
        visible = positions(self.context, self.context.rank(), length).unsqueeze(1) >= every.sort().values
        heads_of_group = query.shape[2] // key.shape[2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, keys, values))  # [b, heads, s, width]
        k, v = (x.repeat_interleave(heads_of_group, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * query.shape[-1] ** -0.5
        out = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v
        return out.permute(2, 0, 1, 3).flatten(2)
