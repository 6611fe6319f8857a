"""RoutedStack: megatron-core's HybridStack with a routing site before each sublayer and no residual add inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import WrappedTensor, make_viewless_tensor
from pydantic_core import PydanticCustomError
from torch import Tensor

from megatron_mhar.depth.history import DepthHistory, SiteObserver
from megatron_mhar.depth.residual import ResidualConfig
from megatron_mhar.depth.sites import EMBEDDING, DepthTable
from megatron_mhar.model.fp8 import without_fp8
from megatron_mhar.model.norm import SiteNorm
from megatron_mhar.model.site import RoutingSite, build_site
from megatron_mhar.pipeline.plan import recomputed_runs
from megatron_mhar.pipeline.stage import Stage, State
from megatron_mhar.routing import resolve_backend

if TYPE_CHECKING:
    from megatron_mhar.routing.chain import Reader

BiasDropout = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def sublayer_output(training: bool, fused: bool) -> BiasDropout:
    """Stands in a layer's bias-dropout-add field: bias and dropout; adding to the stream is the sites' business."""

    def bias_dropout(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        if bias is not None:
            x = x + bias
        x = torch.nn.functional.dropout(x, prob, training) if prob else x
        return _viewless(x) if torch.compiler.is_compiling() else x

    return bias_dropout


@torch.compiler.disable
def _viewless(x: Tensor) -> Tensor:
    """What megatron-core's layer does next, outside of the compiler: torch 2.11's inductor gets its sizes wrong."""
    return make_viewless_tensor(inp=x, requires_grad=x.requires_grad, keep_graph=True)


class RoutedStack(HybridStack):
    """Decoder of a HybridModel whose sublayers are joined by a residual method.

    Every sublayer's site is a child ``site`` of its layer, so that its parameters are saved under the sublayer's global
    number (``decoder.layers.<number>.site.query``) and reshard with it.

    Args:
        residual: the method.
        final_norm: builder of the norm before the output layer, called as ``final_norm(config=, hidden_size=, eps=)``.
        post_layer_norm, kwargs: see HybridStack.

    Attributes:
        first_sublayer: number of this stage's first sublayer over the whole model.
        stage: this stack's place in a pipeline, set by :func:`megatron_mhar.pipeline.connect_stages`.

    Raises:
        ValueError: the method does not fit the model, or the model asks for what a routed stack does not do
            (multi-token prediction, fp32 residual connections).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        residual: ResidualConfig,
        final_norm: Callable[..., torch.nn.Module],
        post_layer_norm: bool = True,
        pp_layer_offset: int = 0,
        **kwargs: Any,
    ) -> None:
        _refuse_unsupported(config, kwargs)
        try:
            residual.check(hidden_size=config.hidden_size, num_sublayers=config.num_layers)
        except PydanticCustomError as error:
            raise ValueError(str(error)) from None  # megatron-core's builder raises it again by class and message
        super().__init__(config, submodules, post_layer_norm=False, pp_layer_offset=pp_layer_offset, **kwargs)
        self._refuse_other_sublayers(pp_layer_offset)
        self.residual = residual
        self.table = DepthTable(residual, config.num_layers)
        self.first_sublayer = pp_layer_offset
        self.stage: Stage | None = None
        self._received: Tensor | None = None
        self.observer: SiteObserver | None = None  # set by probes for the length of a forward
        for layer in self.layers:
            layer.site = build_site(config, residual, layer.layer_number)
        self._norms = [
            _site_norm(layer, residual.method, config) for layer in self.layers
        ]  # a plain list: they are the layers' own
        if self.post_process and self.table.has_final_site:
            self.final_site = RoutingSite(config, residual)
        if self.post_process and post_layer_norm:
            self.final_norm = final_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def _refuse_other_sublayers(self, first: int) -> None:
        """Refuse a pattern of another length than the depth that sites read, or with sublayers that have no module."""
        count, depth = len(self.layers), self.config.num_layers
        if first + count > depth or (self.pre_process and self.post_process and count != depth):
            raise ValueError(
                f"num_layers is {depth}, but the pattern has {first + count} sublayers; num_layers counts sublayers, "
                "of which '*-' is two"
            )
        for kind, layer in zip(self.layer_type_list, self.layers, strict=True):
            if isinstance(layer, IdentityOp):
                hint = "; experts need num_experts in routed_stack_spec" if kind == "E" else ""
                raise ValueError(f"the pattern has {kind!r}, for which the spec's layers have no module{hint}")

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """The sites before everything else, under their names in the layers.

        Data parallelism cuts parameters into buckets in this order. In a chain the gradients of all sites come last,
        and their parameters are needed first: spread over the layers' buckets they would hold up every one.
        """
        if not remove_duplicate:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        memo = set() if memo is None else memo
        if self in memo:
            return
        memo.add(self)
        yield prefix, self
        start = f"{prefix}." if prefix else ""
        for number, layer in enumerate(self.layers):
            yield from layer.site.named_modules(memo, f"{start}layers.{number}.site")
        if hasattr(self, "final_site"):
            yield from self.final_site.named_modules(memo, f"{start}final_site")
        for name, module in self.named_children():
            yield from module.named_modules(memo, f"{start}{name}")

    @property
    def computes_norms(self) -> bool:
        """Whether sites compute norms of sublayers, see SiteNorm."""
        return any(norm is not None for norm in self._norms)

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Take what the stage before sent, `[k, s, b, d]`, for the next forward; None on the first stage."""
        self._received = input_tensor
        # HybridModel reads the sequence length off this attribute.
        self.input_tensor = None if input_tensor is None else input_tensor.detach()[0]

    def forward(
        self,
        hidden_states: Tensor | WrappedTensor | None,
        attention_mask: Tensor | None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Run this stage's sublayers.

        Args:
            hidden_states: on the first stage the embedding `[s, b, d]` (`[s / (tp * cp), b, d]` under sequence and
                context parallelism); on others it is not read, see :meth:`set_input_tensor`.

        Returns:
            On the last stage `[s, b, d]`, normed if the stack has a final norm; on others what the next one receives,
            `[k, s, b, d]`.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError(
                "inference contexts are not supported by a routed stack: run forwards over whole sequences"
            )
        if isinstance(hidden_states, WrappedTensor):
            hidden_states = hidden_states.unwrap()
        if self.stage is None and self.pp_group.size() > 1:
            raise RuntimeError(
                "a routed stack is one of several pipeline stages, but does not know which: call "
                "megatron_mhar.pipeline.connect_stages(model_chunks), and run the schedule with its arguments"
            )
        if self.pre_process:
            assert hidden_states is not None
            state = {EMBEDDING: hidden_states}
        else:
            assert self.stage is not None and self._received is not None
            state = self.stage.open(self._received)
        self._received = self.input_tensor = hidden_states = None
        fused = self._fused_reads(next(iter(state.values())))
        if fused is not None and not self.pre_process:
            for name, row in self.table.rows.items():
                if name in state:
                    state[name] = fused.add(row, state[name])

        def run_layer(layer: Any, hidden: Tensor) -> Tensor:
            arguments: dict[str, Any] = {"attention_mask": attention_mask, "packed_seq_params": packed_seq_params}
            if isinstance(layer, TransformerLayer):
                arguments |= {"rotary_pos_emb": rotary_pos_emb, "padding_mask": padding_mask}
            output = layer(hidden_states=hidden, **arguments)
            return output[0] if isinstance(output, tuple) else output

        outer, inner = self._quantization_contexts()
        with outer:
            for first, stop, recompute in self._units():
                state = self._run(run_layer, inner, state, fused, first, stop, recompute)
        if self.stage is not None and not self.stage.is_last:
            out = self.stage.close(state)
        else:
            history = DepthHistory.after(self.table, self.table.num_sublayers - 1, state, self.observer, fused)
            out = self.final_site(history) if self.table.has_final_site else history.output()
            if hasattr(self, "final_norm"):
                out = self.final_norm(out)
        return make_viewless_tensor(inp=out, requires_grad=out.requires_grad, keep_graph=True)

    def _fused_reads(self, like: Tensor) -> Reader | None:
        """A chain for one forward of this stage's sites, where the backend has one."""
        if not self.table.num_sites or resolve_backend(self.residual.backend, like.device) != "triton":
            return None
        from megatron_mhar.routing.chain import SiteParameters, start

        sites: dict[int, Any] = {self.first_sublayer + i: layer.site for i, layer in enumerate(self.layers)}
        if hasattr(self, "final_site"):
            sites[self.table.num_sublayers] = self.final_site
        if not sites:
            return None
        for site in sites.values():
            site()
        parameters = {t: SiteParameters(s.query, s.norm_weight, s.null_source, s.gate) for t, s in sites.items()}
        return start(self.table.read_plan, parameters)

    def _units(self) -> Iterator[tuple[int, int, bool]]:
        """Runs of this stage's sublayers, see :func:`recomputed_runs`.

        Sources are kept once in any case, by autograd of whoever made them.
        """
        config = self.config
        method = config.recompute_method if config.recompute_granularity == "full" and self.training else None
        first = self.first_sublayer
        return recomputed_runs(first, first + len(self.layers), method, config.recompute_num_layers)

    def _run(
        self,
        run_layer: Callable[[Any, Tensor], Tensor],
        quantization: Callable[[int], AbstractContextManager[Any]],
        state: State,
        fused: Reader | None,
        first: int,
        stop: int,
        recompute: bool,
    ) -> State:
        """Sites and sublayers ``first`` to ``stop - 1``: from the state before them to the state after."""
        used, made = self.table.used_by(first, stop), self.table.made(first, stop)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            # The ticket goes in and out as sources do: what is run again in the backward has its own.
            here = None if fused is None else fused.at(tensors[-1])
            known = dict(zip(used, tensors, strict=False))
            history = DepthHistory.after(self.table, first - 1, known, self.observer, here)
            for number in range(first, stop):
                layer, norm = self.layers[number - self.first_sublayer], self._norms[number - self.first_sublayer]
                if norm is not None:
                    norm()
                with quantization(number):
                    output = run_layer(layer, layer.site(history) if norm is None else layer.site(history, norm))
                layer.site.write(history, output)
            return (*history.state(made).values(), *(() if here is None else (here.ticket,)))

        inputs = [*(state[name] for name in used), *(() if fused is None else (fused.ticket,))]
        # Reentrant checkpoints of inputs without gradients would drop the parameters' gradients in silence.
        if not recompute or not any(tensor.requires_grad for tensor in inputs):
            outputs = run(*inputs)
        elif self.config.fp8 or self.config.fp4:
            # Transformer Engine's keeps its scaling state right when the forward is run twice.
            outputs = te_checkpoint(run, False, get_cuda_rng_tracker, self.pg_collection.tp, *inputs)
        else:
            outputs = checkpoint(run, False, *inputs)
        if fused is not None:
            fused.ticket = outputs[-1]
        known = state | dict(zip(made, outputs, strict=False))
        return {name: known[name] for name in self.table.state_after(stop - 1)}

    def _quantization_contexts(
        self,
    ) -> tuple[AbstractContextManager[Any], Callable[[int], AbstractContextManager[Any]]]:
        """FP8/FP4 contexts around the whole pass (delayed scaling) and around one layer (the other recipes).

        Recomputed forwards enter the same: the inner ones are part of what is run again, and te_checkpoint enters again
        the outer one that it found. Evaluations are bf16.
        """
        config = self.config
        if (config.fp8 or config.fp4) and not self.training:
            return without_fp8(self), lambda _: nullcontext()
        if config.fp8 and config.fp8_recipe == Fp8Recipe.delayed:
            return get_fp8_context(config), lambda _: nullcontext()
        if config.fp8:
            return nullcontext(), lambda layer: get_fp8_context(config, layer)
        if config.fp4:
            return nullcontext(), lambda layer: get_fp4_context(config, layer)
        return nullcontext(), lambda _: nullcontext()


def _site_norm(layer: Any, method: str, config: TransformerConfig) -> SiteNorm | None:
    """The norm of a layer's sublayer, if its site computes it."""
    parts = (getattr(layer, name, None) for name in ("input_layernorm", "pre_mlp_layernorm"))
    norm = next((part for part in parts if isinstance(part, SiteNorm)), None)
    if norm is None:
        return None
    if not isinstance(layer.site, RoutingSite) or layer.site.gate is not None:
        raise ValueError(f"a layer has a SiteNorm, but sites of the method {method} compute no norms: take RMSNorm")
    if config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ()):
        raise ValueError(
            "recompute_modules has layernorm, but norms are computed by sites: take RMSNorm, or leave it out"
        )
    if config.fine_grained_activation_offloading and {"attn_norm", "mlp_norm"} & {*(config.offload_modules or ())}:
        # It would free the norm's input once the norm has run; here that is what the sublayer has kept.
        raise ValueError(
            "offload_modules has attn_norm or mlp_norm, but norms are computed by sites: leave them out, or take "
            "routed_stack_spec(site_norms=False)"
        )
    return norm


def _refuse_unsupported(config: TransformerConfig, stack_arguments: dict[str, Any]) -> None:
    unsupported = {
        "multi-token prediction": bool(config.mtp_num_layers) or stack_arguments.get("is_mtp_layer", False),
        "fp32_residual_connection": config.fp32_residual_connection,
    }
    for feature, asked in unsupported.items():
        if asked:
            raise ValueError(f"{feature} is not supported by a routed stack: sources would be lost between sublayers")
