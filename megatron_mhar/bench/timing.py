"""Times of calls that are compared with each other: taken in turns, so that drift of the machine meets all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from megatron_mhar import platform


def free() -> None:
    """Give back the memory of what is not there any more."""
    gc.collect()
    if platform.HAS_GPU:
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Timing:
    """Median and the quantiles at 10% and 90% of some samples, in milliseconds."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    samples: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Self:
        """Summary of one sample or more."""
        if len(milliseconds) == 1:
            return cls(milliseconds[0], milliseconds[0], milliseconds[0], 1)
        tenths = statistics.quantiles(milliseconds, n=10, method="inclusive")
        return cls(statistics.median(milliseconds), tenths[0], tenths[-1], len(milliseconds))

    def __str__(self) -> str:
        digits = 3 if self.median_ms < 1 else 2 if self.median_ms < 100 else 1
        return f"{self.median_ms:.{digits}f} ({self.p10_ms:.{digits}f}-{self.p90_ms:.{digits}f})"


def time_call(call: Callable[[], object]) -> float:
    """Milliseconds of one call, all that it starts on the device included; the device is idle before it."""
    platform.synchronize()
    if not platform.HAS_GPU:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event)


def time_in_turns[K: Hashable](calls: Mapping[K, Callable[[], object]], *, rounds: int) -> dict[K, Timing]:
    """Time each call ``rounds`` times, in every round one after the other; rounds of warm-up do not count."""
    samples: dict[K, list[float]] = {name: [] for name in calls}
    warm_up = 2 if platform.HAS_GPU else 0
    for number in range(warm_up + rounds):
        for name, call in calls.items():
            milliseconds = time_call(call)
            if number >= warm_up:
                samples[name].append(milliseconds)
    return {name: Timing.of(found) for name, found in samples.items()}


class Graphs:
    """Captures calls as CUDA graphs that share one pool of memory: they are replayed one at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()  # torch refuses a pool again once all graphs in it have gone
        with torch.cuda.graph(self._anchor, pool=self._pool):
            torch.zeros(1, device="cuda")

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call's replay. What the call reads from outside must stay where it is; what it returns is let go."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and loaded before the capture
            call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the stream had
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            call()
        return graph.replay
