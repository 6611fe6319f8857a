"""Which steps leave the weights as they are: those whose loss or gradients are not finite, or spike.

As in megatron-core, a skipped step counts as a step and its samples as consumed, but weights, optimizer state, average
and learning-rate schedule stay where they were.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from megatron_mhar.config.schema import SkipConfig


class Skips:
    """Decides by gradient norm and mean loss, which all ranks have in common: they all come to the same decision.

    Attributes:
        in_row: steps skipped since the last one that was made.
        total: steps skipped in the whole run.
        why: of the last skipped step.
    """

    def __init__(self, settings: SkipConfig) -> None:
        self.settings = settings
        self.in_row = self.total = 0
        self.why = ""
        self._norms: deque[float] = deque(maxlen=settings.spike_window)
        self._losses: deque[float] = deque(maxlen=settings.spike_window)

    def accepts(self, norm: float, loss: float | None = None) -> bool:
        """Whether the step with this gradient norm and mean loss, if that is known, is made; it is counted."""
        self.why = self._objection(norm, loss)
        if self.why:
            self.in_row += 1
            self.total += 1
        else:
            self.in_row = 0
            self._norms.append(norm)
            if loss is not None:
                self._losses.append(loss)
        return not self.why

    def _objection(self, norm: float, loss: float | None) -> str:
        factor, rise, window = self.settings.spike_factor, self.settings.loss_rise, self.settings.spike_window
        if not (math.isfinite(norm) and (loss is None or math.isfinite(loss))):
            return "loss or gradients are not finite"
        if factor is not None and len(self._norms) == window:
            median = statistics.median(self._norms)
            if norm > factor * median:
                return f"the gradient norm is over {factor:g} times {median:.4g}, the median of the last {window}"
        if rise is not None and loss is not None and len(self._losses) == window:
            median = statistics.median(self._losses)
            if loss > median + rise:
                return f"the loss is over {median:.4g}, the median of the last {window}, by more than {rise:g}"
        return ""

    @property
    def exhausted(self) -> bool:
        """Whether as many steps in a row were skipped as stop the run."""
        return self.in_row >= self.settings.max_in_row

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers, exactly."""
        return {"in_row": self.in_row, "total": self.total, "norms": list(self._norms), "losses": list(self._losses)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave, also with another window."""
        self.in_row, self.total = state["in_row"], state["total"]
        self._norms = deque(state["norms"], maxlen=self.settings.spike_window)
        self._losses = deque(state.get("losses", ()), maxlen=self.settings.spike_window)  # older checkpoints have none
