"""Profiles of some steps of a run: a trace for chrome://tracing or Perfetto, with ranges by site and sublayer.

While steps are profiled, forward and backward of every site and sublayer run in ranges of their own names, which
torch's profiler shows and, on a GPU, Nsight Systems too (NVTX). Before and after, nothing stands in their way.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_mhar import platform
from megatron_mhar.config.schema import SUBLAYERS, ProfileConfig

logger = logging.getLogger("megatron_mhar")


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Within the context the profilers show ``name``."""
    with ExitStack() as stack:
        if platform.HAS_GPU:
            torch.cuda.nvtx.range_push(name)
            stack.callback(torch.cuda.nvtx.range_pop)
        stack.enter_context(torch.profiler.record_function(name))
        yield


def _name_backward(name: str, output: Any, hidden: Tensor | None) -> None:
    """Give the backward of a call a range: from the gradient of its output on, to that of its input.

    Args:
        output: what it returned, or a tuple that begins with it.
        hidden: its input; None for a site, whose read is one node of the graph, and the range is that node's.
    """
    node = (output[0] if isinstance(output, tuple) else output).grad_fn
    if node is None:
        return
    opened = ExitStack()

    def begin(*_: Any) -> None:
        opened.enter_context(named_range(name))

    def end(*_: Any) -> None:
        opened.close()

    node.register_prehook(begin)
    if hidden is not None and hidden.requires_grad:
        hidden.register_hook(end)
    else:
        node.register_hook(end)


@contextmanager
def ranges(models: Sequence[HybridModel]) -> Iterator[None]:
    """Within the context forward and backward of every site and sublayer of these models have ranges.

    The modules' ``forward`` is replaced. A site that is called for its hooks alone, see RoutingSite, has none.
    """
    named: list[tuple[torch.nn.Module, str]] = []
    for model in models:
        stack: Any = model.decoder
        for number, layer in enumerate(stack.layers, stack.first_sublayer):
            kind = SUBLAYERS.get(stack.layer_type_list[number - stack.first_sublayer], type(layer).__name__)
            named += [(layer.site, f"site {number}"), (layer, f"sublayer {number} {kind}")]
        if hasattr(stack, "final_site"):
            named.append((stack.final_site, f"site {stack.table.num_sublayers} final"))

    def within(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(forward)
        def ranged(*arguments: Any, **keywords: Any) -> Any:
            if not (arguments or keywords):
                return forward()
            with named_range(name):
                output = forward(*arguments, **keywords)
            _name_backward(f"{name} backward", output, keywords.get("hidden_states"))
            return output

        return ranged

    for module, name in named:
        module.forward = within(module.forward, name)
    try:
        yield
    finally:
        for module, _ in named:
            del module.forward  # what the class has shows again


class StepProfiler:
    """Profiles ``profile.steps`` steps from ``profile.start_step`` on, on the ranks that are asked for.

    Args:
        config: what is profiled.
        models: whose sites and sublayers are named.
        folder: where traces go, ``steps_<first>-<last>_rank_<rank>.json``.
        rank: this process's.
        patience: what the end of a profile is put into: torch holds Python's lock for seconds then, or for minutes.
    """

    def __init__(
        self,
        config: ProfileConfig,
        models: Sequence[HybridModel],
        folder: Path,
        rank: int,
        patience: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._patience = patience
        self._config, self._models, self._folder, self._rank = config, models, folder, rank
        self._wanted = config.start_step is not None and rank in config.ranks
        self._profiled = ExitStack()
        self._profiler: torch.profiler.profile | None = None
        self._first = self._last = 0  # steps that are being profiled

    def begin_step(self, step: int) -> None:
        """Called before ``step``, the number of the step to come."""
        start, steps = self._config.start_step, self._config.steps
        if self._first and start is not None and step >= start + steps:
            self._finish()
        elif self._first:
            self._last = step
        elif self._wanted and start is not None and start <= step < start + steps:
            self._first = self._last = step
            self._profiled.enter_context(ranges(self._models))
            if self._config.tool == "torch":
                activities = [torch.profiler.ProfilerActivity.CPU]
                activities += [torch.profiler.ProfilerActivity.CUDA] * platform.HAS_GPU
                self._profiler = self._profiled.enter_context(torch.profiler.profile(activities=activities))
            elif platform.HAS_GPU:
                self._profiled.enter_context(torch.cuda.profiler.profile())

    def _finish(self) -> None:
        """Stop, and write the trace."""
        first, self._first, self._wanted = self._first, 0, False
        platform.synchronize()
        with self._patience():
            self._profiled.close()
            self._export(first)

    def _export(self, first: int) -> None:
        if self._profiler is None:
            return
        path = self._folder / f"steps_{first}-{self._last}_rank_{self._rank}.json"
        profiler, self._profiler = self._profiler, None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # no reason to lose the run
            logger.warning("%s: the profile cannot be written (%s); the run goes on", path, error)
        else:
            logger.info("profile of steps %d to %d: %s", first, self._last, path)

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first and kind is None:
            self._finish()
        self._profiled.close()
