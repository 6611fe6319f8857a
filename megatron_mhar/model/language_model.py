"""LanguageModel: megatron-core's HybridModel with a loss that knows the log-partition of the logits (z-loss) and reads
them once in the forward and once in the backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.utils import VocabUtility
from torch import Tensor
from torch.autograd.function import once_differentiable


class LanguageModel(HybridModel):
    """A HybridModel that tells, where it is asked to, the squared log-partition beside the loss."""

    _tells_partition = False

    def forward(self, *args: Any, tell_partition: bool = False, **kwargs: Any) -> Tensor:
        """As HybridModel: logits `[b, s, vocabulary / tp]`; with ``labels`` losses of the tokens `[b, s]`, fp32.

        Args:
            tell_partition: losses and squared log-partitions come back, `[2, b, s]`.
        """
        self._tells_partition = tell_partition
        return super().forward(*args, **kwargs)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """What :meth:`forward` returns with labels.

        Args:
            labels: `[b, s]`, int64.
            logits: `[s, b, vocabulary / tp]`; the backward overwrites them.
        """
        loss, squared = cross_entropy(logits, labels.transpose(0, 1).contiguous())
        told = torch.stack([loss, squared]) if self._tells_partition else loss
        return told.transpose(-1, -2).contiguous()


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and squared log-partition of every token.

    Args:
        logits: `[..., vocabulary / tp]`, this tensor-parallel rank's part. The backward turns them into their gradient,
            in place: with a large vocabulary nothing else in a step is as large. Who needs them after, or in another
            backward, takes a copy.
        labels: `[...]`, int64.

    Returns:
        cross entropy `[...]` and squared log-partition `[...]`, fp32, the same on all tensor-parallel ranks.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    loss, partition = _CrossEntropyAndLogPartition.apply(logits, labels, group)
    return loss, partition.square()


class _CrossEntropyAndLogPartition(torch.autograd.Function):
    """Cross entropy and log-partition; the backward takes the softmax from the logits anew."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        start, end = VocabUtility.vocab_range_from_per_partition_vocab_size(
            logits.shape[-1], group.rank(), group.size()
        )
        own_top, own_total = _top_and_total(logits.detach())
        top = own_top.clone()
        torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=group)
        own_total = own_total.masked_fill(own_top == -math.inf, 0.0)  # all of the rank's part may be masked
        elsewhere = (labels < start) | (labels >= end)
        local = (labels - start).masked_fill(elsewhere, 0).unsqueeze(-1)
        picked = (logits.gather(-1, local).squeeze(-1).float() - top).masked_fill(elsewhere, 0.0)
        both = torch.stack([own_total * (own_top - top).exp(), picked])
        torch.distributed.all_reduce(both, group=group)
        total, picked = both.unbind()
        ctx.save_for_backward(logits, local, elsewhere, top, total)
        return total.log() - picked, total.log() + top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, grad_partition: Tensor) -> tuple[Tensor, None, None]:
        logits, local, elsewhere, top, total = ctx.saved_tensors
        grad = logits.detach()
        # Both outputs have the softmax as derivative; the loss also has the label's one-hot. The exponent is relative
        # to the largest logit: relative to the partition its rounding would be an error of the whole softmax.
        scale = (grad_loss + grad_partition) / total
        at_label = (grad.gather(-1, local).squeeze(-1).float() - top).exp() * scale
        at_label -= grad_loss.masked_fill(elsewhere, 0.0)
        _scaled_exp_(grad, top, scale)
        grad.scatter_(-1, local, at_label.unsqueeze(-1).to(grad.dtype))
        return grad, None, None


# Compiled on a GPU, where each is one pass over the logits, with fp32 in registers alone; see megatron_mhar.platform.


@torch.compile
def _top_and_total(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit, and sum of exponentials relative to it, `[...]`, fp32."""
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)  # the dimension is kept for the compiler to see that both are found together
    return top.squeeze(-1), (logits - top).exp().sum(-1, keepdim=True).squeeze(-1)


@torch.compile
def _scaled_exp_(logits: Tensor, top: Tensor, scale: Tensor) -> None:
    """Turn logits into ``scale`` times their exponentials relative to ``top``."""
    logits.copy_((logits.float() - top.unsqueeze(-1)).exp_().mul_(scale.unsqueeze(-1)))
