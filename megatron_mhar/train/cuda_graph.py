"""Training steps as CUDA graphs: megatron-core's capture of a whole forward-backward, with a state for each trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader, get_shared_capture_stream

# Runs so far, graph, result and input buffers, each of training and validation.
_State = tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]


class CapturedSchedule:
    """A schedule of megatron-core whose run over the micro-batches of a step is captured and then replayed.

    It is called as the schedule. The first runs are eager: kernels are compiled and chosen, and buffers made. What it
    returns, the next call writes over.

    Upstream's wrapper keeps graph, result and input buffers in attributes of its classes, one set a process. Here they
    are this object's, put there for the length of a call: trainers may take turns in one process, and a graph is gone
    with its trainer.

    Args:
        schedule: what ``get_forward_backward_func`` gave.
        warmup_steps: eager runs.
    """

    def __init__(self, schedule: Callable[..., Any], *, warmup_steps: int) -> None:
        # A pool of its own: graphs that share one must not be replayed in turns.
        self._wrapper = FullCudaGraphWrapper(schedule, warmup_steps, use_single_mempool=False)
        self._state = _fresh()

    def __call__(self, **arguments: Any) -> list[dict[str, torch.Tensor]]:
        """Run, capture or replay the schedule over ``data_iterator``'s micro-batches, whose shapes never change."""
        kept = _exchange(self._state)
        try:
            losses: list[dict[str, torch.Tensor]] = self._wrapper(**arguments)
        finally:
            self._state = _exchange(kept)
        return losses

    @property
    def captured(self) -> bool:
        """Whether calls replay a graph."""
        return self._state[1]["training"] is not None

    def release(self) -> None:
        """Forget the graph and its memory. It must be gone before the process groups that it uses are left."""
        self._state = _fresh()


def _fresh() -> _State:
    training, validation = "training", "validation"
    return (
        {training: 0, validation: 0},
        {training: None, validation: None},
        {training: None, validation: None},
        {training: [], validation: []},
    )


def _exchange(state: _State) -> _State:
    upstream, loader = FullCudaGraphWrapper, StaticBufferLoader
    before = (upstream.curr_iteration, upstream.cuda_graph, upstream.result, loader.static_buffers)
    upstream.curr_iteration, upstream.cuda_graph, upstream.result, loader.static_buffers = state
    return before


@contextmanager
def on_capture_stream(captures: bool) -> Iterator[None]:
    """Within the context a data-parallel wrapper is built whose gradient sums can be captured.

    Autograd adds up a parameter's gradients on the stream on which their node was made, and the wrapper keeps the node.

    Args:
        captures: whether there will be a graph; else the context does nothing.
    """
    if not captures:
        yield
        return
    # Eager runs then wait for another stream at each sum; that is how it is meant.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    stream, current = get_shared_capture_stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
