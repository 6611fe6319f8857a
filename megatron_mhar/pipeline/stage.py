"""The ends of one stage: what a micro-batch's depth history is made of when it comes in, and where it goes.

A stage packs what the next one must receive into one tensor `[k, s, b, d]`, and hands what a later stage of its own
rank will need to that stage without a copy. The two stages' graphs are run backwards one after the other, the later
first, so a source that is handed over enters the later graph as a leaf, and its gradient is added where the source left
the earlier graph: summed on the rank, and sent back once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mhar.depth.sites import Source
from megatron_mhar.pipeline.plan import PipelinePlan

State = dict[Source, Tensor]


class Stage:
    """Stage ``number`` of a pipeline.

    Args:
        plan: what crosses where.
        number: over the whole model.
        previous: the stage before this one on the same rank; None for a rank's first.
    """

    def __init__(self, plan: PipelinePlan, number: int, previous: Stage | None) -> None:
        self.plan, self.number, self.previous = plan, number, previous
        self._sent = () if self.is_last else plan.received(number + 1)
        later = number + plan.num_ranks
        self._handed = plan.handed(later) if later < plan.num_stages else ()
        # One entry a micro-batch that this stage has done and the rank's next stage has not: schedules run the
        # micro-batches of every stage in one order.
        self._waiting: deque[State] = deque()

    @property
    def is_last(self) -> bool:
        """Whether there is no stage after this one."""
        return self.number == self.plan.num_stages - 1

    def open(self, packed: Tensor) -> State:
        """State before this stage's first sublayer.

        Args:
            packed: `[k, s, b, d]`, what the stage before sent.

        Raises:
            RuntimeError: a micro-batch comes in that this rank's earlier stage has not seen.
        """
        names = self.plan.received(self.number)
        sizes = [self.plan.table.num_tensors(name) for name in names]
        parts = packed.split(sizes)  # one node: the gradients of all parts are joined once
        state = {name: _unpacked(part) for name, part in zip(names, parts, strict=True)}
        if self.plan.handed(self.number):
            if self.previous is None or not self.previous._waiting:
                raise RuntimeError(
                    f"pipeline stage {self.number}: a micro-batch came in that stage "
                    f"{self.number - self.plan.num_ranks} on this rank has not run; every stage must run the "
                    "micro-batches in one order"
                )
            state |= self.previous._waiting.popleft()
        return state

    def close(self, state: State) -> Tensor:
        """Pack what the next stage receives, `[k, s, b, d]`, and hand over what this rank needs again.

        Args:
            state: after this stage's last sublayer.
        """
        names = [*self._sent, *(name for name in self._handed if name not in self._sent)]
        handed = [names.index(name) for name in self._handed]
        tensors = [state[name] for name in names]
        leaves = [tensors[i].detach().requires_grad_(tensors[i].requires_grad) for i in handed]
        if self._handed:
            self._waiting.append(dict(zip(self._handed, leaves, strict=True)))
        return _Close.apply(len(self._sent), handed, leaves, *tensors)

    def forget(self) -> None:
        """Let go of micro-batches that an interrupted step left behind."""
        self._waiting.clear()


def _unpacked(part: Tensor) -> Tensor:
    """`[1, s, b, d]` -> `[s, b, d]`; a stream of several stays as it is."""
    return part.squeeze(0) if part.shape[0] == 1 else part


class _Close(torch.autograd.Function):
    """Packs the first ``num_sent`` tensors; in the backward each tensor at ``handed`` also gets its leaf's gradient."""

    @staticmethod
    def forward(ctx: Any, num_sent: int, handed: Sequence[int], leaves: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.handed, ctx.leaves, ctx.count = handed, leaves, len(tensors)
        parts = [t if t.dim() > 3 else t.unsqueeze(0) for t in tensors[:num_sent]]
        ctx.sizes = [part.shape[0] for part in parts]
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_packed: Tensor) -> tuple[Any, ...]:
        grads: list[Tensor | None] = [_unpacked(part) for part in grad_packed.split(ctx.sizes)]
        grads += [None] * (ctx.count - len(grads))
        for index, leaf in zip(ctx.handed, ctx.leaves, strict=True):
            both = [grad for grad in (grads[index], leaf.grad) if grad is not None]
            grads[index] = both[0] + both[1] if len(both) == 2 else next(iter(both), None)
            leaf.grad = None
        ctx.leaves = ()
        return (None, None, None, *grads)
