"""RoutedStack: megatron-core's HybridStack with a routing site before each sublayer and no residual add inside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import WrappedTensor, make_viewless_tensor
from pydantic_core import PydanticCustomError
from torch import Tensor

from megatron_mhar.depth.history import DepthHistory, SiteObserver
from megatron_mhar.depth.residual import ResidualConfig
from megatron_mhar.depth.sites import DepthTable
from megatron_mhar.model.site import RoutingSite, build_site

BiasDropout = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def sublayer_output(training: bool, fused: bool) -> BiasDropout:
    """Stands in a layer's bias-dropout-add field: bias and dropout; adding to the stream is the sites' business."""

    def bias_dropout(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        if bias is not None:
            x = x + bias
        return torch.nn.functional.dropout(x, prob, training) if prob else x

    return bias_dropout


class RoutedStack(HybridStack):
    """Decoder of a HybridModel whose sublayers are joined by a residual method.

    Every sublayer's site is a child ``site`` of its layer, so that its parameters are saved under the sublayer's global
    number (``decoder.layers.<number>.site.query``) and reshard with it.

    Args:
        residual: the method.
        final_norm: builder of the norm before the output layer, called as ``final_norm(config=, hidden_size=, eps=)``.
        post_layer_norm, kwargs: see HybridStack.

    Raises:
        ValueError: the method does not fit the model, or the model asks for what a routed stack does not do (full
            recomputation of more than a sublayer at once, multi-token prediction, fp32 residual connections, pipeline
            stages).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        residual: ResidualConfig,
        final_norm: Callable[..., torch.nn.Module],
        post_layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        _refuse_unsupported(config, kwargs)
        try:
            residual.check(hidden_size=config.hidden_size, num_sublayers=config.num_layers)
        except PydanticCustomError as error:
            raise ValueError(str(error)) from None  # megatron-core's builder raises it again by class and message
        super().__init__(config, submodules, post_layer_norm=False, **kwargs)
        self.residual = residual
        self.table = DepthTable(residual, config.num_layers)
        self.observer: SiteObserver | None = None  # set by probes for the length of a forward
        for layer in self.layers:
            layer.site = build_site(config, residual, layer.layer_number)
        if self.post_process and self.table.has_final_site:
            self.final_site = RoutingSite(config, residual)
        if self.post_process and post_layer_norm:
            self.final_norm = final_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(
        self,
        hidden_states: Tensor | WrappedTensor,
        attention_mask: Tensor | None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Run all sublayers on the embedding.

        Args:
            hidden_states: embedding `[s, b, d]` (`[s / tp, b, d]` under sequence parallelism).

        Returns:
            `[s, b, d]`, normed if the stack has a final norm.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError(
                "inference contexts are not supported by a routed stack: run forwards over whole sequences"
            )
        if isinstance(hidden_states, WrappedTensor):
            hidden_states = hidden_states.unwrap()
        outer, inner = self._quantization_contexts()
        history = DepthHistory(self.table, hidden_states, self.observer)
        with outer:
            for index, layer in enumerate(self.layers):
                arguments: dict[str, Any] = {"attention_mask": attention_mask, "packed_seq_params": packed_seq_params}
                if isinstance(layer, TransformerLayer):
                    arguments |= {"rotary_pos_emb": rotary_pos_emb, "padding_mask": padding_mask}
                with inner(layer.layer_number - 1):
                    output = self._sublayer(layer, arguments, layer.site.inputs(history), self._recomputes(index))
                layer.site.write(history, output)
        out = self.final_site.read(history) if self.table.has_final_site else history.output()
        if hasattr(self, "final_norm"):
            out = self.final_norm(out)
        return make_viewless_tensor(inp=out, requires_grad=out.requires_grad, keep_graph=True)

    def _recomputes(self, index: int) -> bool:
        """Whether sublayer ``index`` of this stage is run again in the backward instead of keeping its activations.

        Sources are kept once in any case, by autograd of whoever made them; a sublayer and its site are the unit.
        """
        if self.config.recompute_granularity != "full" or not self.training:
            return False
        return self.config.recompute_method == "uniform" or index < self.config.recompute_num_layers

    def _sublayer(self, layer: Any, arguments: dict[str, Any], inputs: tuple[Tensor, ...], recompute: bool) -> Tensor:
        """Site and sublayer: what the site took out of the history in, the sublayer's output `[s, b, d]` out."""

        def run(*inputs: Tensor) -> Tensor:
            output = layer(hidden_states=layer.site.mix(*inputs), **arguments)
            return output[0] if isinstance(output, tuple) else output

        # Reentrant checkpoints of inputs without gradients would drop the parameters' gradients in silence.
        if not recompute or not any(tensor.requires_grad for tensor in inputs):
            return run(*inputs)
        if self.config.fp8 or self.config.fp4:
            # Transformer Engine's keeps its scaling state right when the forward is run twice.
            return te_checkpoint(run, False, get_cuda_rng_tracker, self.pg_collection.tp, *inputs)
        return checkpoint(run, False, *inputs)

    def _quantization_contexts(
        self,
    ) -> tuple[AbstractContextManager[Any], Callable[[int], AbstractContextManager[Any]]]:
        """FP8/FP4 contexts around the whole pass (delayed scaling) and around one layer (the other recipes)."""
        config = self.config
        if config.fp8 and config.fp8_recipe == Fp8Recipe.delayed:
            return get_fp8_context(config), lambda _: nullcontext()
        if config.fp8:
            return nullcontext(), lambda layer: get_fp8_context(config, layer)
        if config.fp4:
            return nullcontext(), lambda layer: get_fp4_context(config, layer)
        return nullcontext(), lambda _: nullcontext()


def _refuse_unsupported(config: TransformerConfig, stack_arguments: dict[str, Any]) -> None:
    unsupported = {
        "recompute_method 'uniform' with recompute_num_layers above 1": (
            config.recompute_granularity == "full"
            and config.recompute_method == "uniform"
            and config.recompute_num_layers != 1
        ),
        "multi-token prediction": bool(config.mtp_num_layers) or stack_arguments.get("is_mtp_layer", False),
        "fp32_residual_connection": config.fp32_residual_connection,
        "pipeline parallelism": config.pipeline_model_parallel_size > 1,
    }
    for feature, asked in unsupported.items():
        if asked:
            raise ValueError(f"{feature} is not supported by a routed stack: sources would be lost between sublayers")
