"""RMSNorm for layers without Transformer Engine; megatron-core's own wrapper refuses sequence parallelism."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_mhar.model.fusions import apex_rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, statistics in fp32, weight of ones in ``config.params_dtype``.

    apex's kernel where it is built, else torch's. Its constructor is the one megatron-core's layer specs call.

    Raises:
        ValueError: the config asks for another norm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"normalization={config.normalization!r}, layernorm_zero_centered_gamma="
                f"{config.layernorm_zero_centered_gamma} given, but local layers, and sites that compute the norm of "
                "their sublayer, have an RMS norm whose weight begins at one: set normalization='RMSNorm', or take "
                "routed_stack_spec(layers='transformer_engine', site_norms=False)"
            )
        self.eps = eps
        self._apex = apex_rms_norm()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Under sequence parallelism each rank sees a part of the tokens: megatron-core then sums the gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden_size]` -> the same, in the input's dtype."""
        return self.normalize(x)

    def normalize(self, x: Tensor) -> Tensor:
        """What :meth:`forward` gives."""
        if self._apex is not None:
            return self._apex(x, self.weight, self.weight.shape, self.eps)
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SiteNorm(RMSNorm):
    """A sublayer's norm where the site before it computes it, as the end of its read: the sublayer's input is normed.

    It holds the weight, under the name and in the place that a norm has in a layer, and passes its input on.
    """

    def forward(self, x: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        """``x`` itself. Without it nothing, but hooks that wait for the weight have run."""
        return x
