"""Cross entropy over vocabulary-parallel logits, with the squared log-partition (z-loss) as a second output; and what
routers' auxiliary loss has been."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.utils import VocabUtility
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from torch import Tensor
from torch.autograd.function import once_differentiable


class _CrossEntropyAndLogPartition(torch.autograd.Function):
    """Per-token cross entropy and log-partition; keeps one fp32 softmax for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        start, end = VocabUtility.vocab_range_from_per_partition_vocab_size(
            logits.shape[-1], group.rank(), group.size()
        )
        top = logits.amax(-1).float()
        torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=group)
        softmax = (logits - top.unsqueeze(-1)).exp_()  # the only copy of the logits in fp32
        total = softmax.sum(-1)
        elsewhere = (labels < start) | (labels >= end)
        local = (labels - start).masked_fill(elsewhere, 0)
        picked = (logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).float() - top).masked_fill(elsewhere, 0.0)
        both = torch.stack([total, picked])
        torch.distributed.all_reduce(both, group=group)
        total, picked = both.unbind()
        softmax /= total.unsqueeze(-1)
        ctx.save_for_backward(softmax, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - picked, total.log() + top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, grad_partition: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, elsewhere = ctx.saved_tensors
        # Both outputs have the softmax as derivative; the loss also has the label's one-hot.
        grad = softmax.mul_((grad_loss + grad_partition).unsqueeze(-1))
        grad.scatter_add_(-1, local.unsqueeze(-1), -grad_loss.masked_fill(elsewhere, 0.0).unsqueeze(-1))
        return grad.to(ctx.dtype), None, None


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token loss and squared log-partition.

    Args:
        logits: `[b, s, vocabulary / tp]`, this tensor-parallel rank's part.
        labels: `[b, s]`, int64.

    Returns:
        cross entropy `[b, s]` and squared log-partition `[b, s]`, fp32, the same on all tensor-parallel ranks.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    loss, partition = _CrossEntropyAndLogPartition.apply(logits, labels, group)
    return loss, partition.square()


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
