"""What routers' auxiliary loss has been."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker


def take_balancing_loss(num_layers: int, micro_batches: int) -> float:
    """Mean auxiliary loss of the routers of experts, without its coefficient: 1 where experts have equal shares of the
    tokens, more where they have not. What megatron-core has recorded of it is taken away. Called by all ranks.

    Args:
        num_layers: mixture-of-experts sublayers of the model.
        micro_batches: of one data-parallel rank, since the last call.
    """
    tracker = get_moe_metrics_tracker()
    total = torch.zeros((), device=torch.cuda.current_device())
    for entry in tracker.metrics.values():
        total += entry.values.sum()
    tracker.clear()
    # Tensor- and context-parallel ranks record parts of a sum, and pipeline stages the layers that they have.
    torch.distributed.all_reduce(total)
    return float(total) / (num_layers * micro_batches * parallel_state.get_data_parallel_world_size())
