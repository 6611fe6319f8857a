"""Cross entropy over vocabulary-parallel logits, with the squared log-partition (z-loss) as a second output."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.utils import VocabUtility
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
