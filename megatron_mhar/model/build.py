"""From the run config to megatron-core: TransformerConfig and the LanguageModels of a rank."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.ssm.gated_delta_net import HAVE_FLA
from megatron.core.ssm.mamba_mixer import HAVE_EINOPS, HAVE_MAMBA_SSM
from megatron.core.transformer import TransformerConfig

from megatron_mhar import platform
from megatron_mhar.config.schema import RECURRENT, SUBLAYERS, ModelConfig, ParallelConfig, RunConfig
from megatron_mhar.depth.residual import REPLACEMENT
from megatron_mhar.errors import UserError
from megatron_mhar.model.fp8 import check_recipe, fp8_settings
from megatron_mhar.model.fusions import APEX_ACCUMULATES
from megatron_mhar.model.initialize import initialize_weights
from megatron_mhar.model.language_model import LanguageModel
from megatron_mhar.model.specs import Layers, routed_stack_spec
from megatron_mhar.routing import resolve_backend


def resolve_layers(asked: str) -> Layers:
    """Layer family that ``asked`` means here.

    Raises:
        UserError: Transformer Engine is asked for and there is none, or no GPU to run it.
    """
    usable = HAVE_TE and platform.HAS_GPU
    if asked == "transformer_engine" and not usable:
        missing = "it is not installed (see Install in README)" if not HAVE_TE else "this machine has no GPU"
        raise UserError(f"model.layers: transformer_engine given, but {missing}; allowed here: auto, local")
    return "transformer_engine" if usable and asked != "local" else "local"


def check_layers(config: RunConfig) -> Layers:
    """Layer family of a run that has what the run's model and layout need.

    Raises:
        UserError: see :func:`resolve_layers`; also where context parallelism, recurrent sublayers or FP8 lack
            Transformer Engine's layers, a recurrent sublayer the library that computes it, a routing backend or CUDA
            graphs their device, or an FP8 recipe a GPU that runs it.
    """
    try:
        resolve_backend(config.residual.backend, "cuda" if platform.HAS_GPU else "cpu")
    except ValueError as error:
        raise UserError(f"residual.backend: {error}") from None
    layers, context = resolve_layers(config.model.layers), config.parallel.context
    recurrent = sorted(set(config.model.layer_pattern) & RECURRENT)
    if config.training.cuda_graph != "none" and not platform.HAS_GPU:
        raise UserError(
            f"training.cuda_graph: {config.training.cuda_graph} given, but this machine has no GPU; allowed here: none"
        )
    given = [f"parallel.context: {context} given"] * (context > 1)
    given += ["training.precision: fp8 given"] * (config.training.precision == "fp8")
    given += [f"model.pattern: {symbol} ({SUBLAYERS[symbol]}) given" for symbol in recurrent]
    if given and layers == "local":
        raise UserError(
            f"{given[0]}, but it needs Transformer Engine's layers, and those here are local (model.layers: "
            f"{config.model.layers}, {'a' if platform.HAS_GPU else 'no'} GPU, Transformer Engine "
            f"{'installed' if HAVE_TE else 'not installed'})"
        )
    libraries = {
        "M": ("mamba-ssm and einops", HAVE_MAMBA_SSM and HAVE_EINOPS),
        "G": ("flash-linear-attention", HAVE_FLA),
    }
    for symbol in recurrent:
        library, installed = libraries[symbol]
        if not installed:
            raise UserError(
                f"model.pattern: {symbol} ({SUBLAYERS[symbol]}) given, but it needs {library}: pip install it"
            )
    if config.training.precision == "fp8":
        check_recipe(config.training.fp8)
    _check_capture(config, layers)
    return layers


def _check_capture(config: RunConfig, layers: Layers) -> None:
    """Refuse sequences whose attention cannot be captured.

    The backward of cuDNN's fused attention (has_workaround_padding_mask in cudnn-frontend) copies their lengths from
    host memory that is gone when a graph is replayed: the gradients would be garbage.
    """
    training, context = config.training, config.parallel.context
    # A context-parallel rank attends over an early and a late piece of each sequence.
    piece = training.sequence_length // (2 * context if context > 1 else 1)
    if training.cuda_graph != "none" and layers == "transformer_engine" and training.bf16 and piece % 128:
        pieces = f" in {2 * context} pieces (parallel.context {context})" if context > 1 else ""
        raise UserError(
            f"training.sequence_length: {training.sequence_length}{pieces} given with training.cuda_graph "
            f"{training.cuda_graph}, but the backward of fused attention can be captured for multiples of 128 alone; "
            "model.layers: local has no such limit"
        )


def _experts(model: ModelConfig, parallel: ParallelConfig, layers: Layers) -> dict[str, Any]:
    """Settings of TransformerConfig for mixture-of-experts sublayers; none without them."""
    if model.num_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.expert_width,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        # The softmax over the one expert that was chosen would be 1, and the router without a gradient.
        "moe_router_pre_softmax": model.moe_router_topk == 1,
        "moe_router_dtype": "fp32",
        # Over tensor-parallel ranks too, all-to-all gathers parts of unequal sizes, which gloo refuses.
        "moe_token_dispatcher_type": "alltoall" if platform.HAS_GPU or parallel.tensor == 1 else "allgather",
        "moe_grouped_gemm": layers == "transformer_engine",
    }


def transformer_config(config: RunConfig) -> TransformerConfig:
    """Megatron-core's config of a run. ``num_layers`` counts sublayers, as HybridModel does."""
    model, training, parallel = config.model, config.training, config.parallel
    layers = resolve_layers(model.layers)
    dtype = torch.bfloat16 if training.bf16 else torch.float32

    return TransformerConfig(
        num_layers=len(model.layer_pattern),
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_layernorm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        is_hybrid_model=True,
        perform_initialization=False,  # see model.initialize; output projections are not scaled down by depth
        bf16=training.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages if parallel.virtual_stages > 1 else None,
        microbatch_group_size_per_vp_stage=parallel.microbatch_group,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=parallel.overlap_p2p,
        batch_p2p_comm=False,  # see HistoryCommunicator
        recompute_granularity=None if training.recompute == "none" else training.recompute,
        recompute_modules=["core_attn"] if training.recompute == "selective" else None,
        recompute_method=training.recompute_method if training.recompute == "full" else None,
        recompute_num_layers=training.recompute_sublayers if training.recompute == "full" else None,
        deterministic_mode=training.deterministic and platform.HAS_GPU,
        cuda_graph_impl=training.cuda_graph,
        # Fusions are for where their kernels are: apex's or Transformer Engine's, and torch's compiler on a GPU.
        gradient_accumulation_fusion=APEX_ACCUMULATES,
        bias_activation_fusion=platform.HAS_GPU,
        bias_dropout_fusion=False,
        apply_rope_fusion=layers == "transformer_engine",
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        **fp8_settings(training),
        **_experts(model, parallel, layers),
    )


def norms_at_sites(config: RunConfig) -> bool:
    """Whether sites compute the norms of their sublayers, see :func:`~megatron_mhar.model.specs.routed_stack_spec`."""
    return config.residual.method in REPLACEMENT and config.training.precision != "fp8"


def build_models(config: RunConfig) -> list[LanguageModel]:
    """Model chunks of this rank, one a virtual stage, on its device; process groups and seeds must be set."""
    transformer, model, parallel = transformer_config(config), config.model, config.parallel
    spec = routed_stack_spec(
        config.residual,
        layers=resolve_layers(model.layers),
        qk_layernorm=model.qk_layernorm,
        num_experts=model.num_experts,
        site_norms=norms_at_sites(config),
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for chunk in range(parallel.virtual_stages):
        stage = chunk * parallel.pipeline + rank
        hybrid = LanguageModel(
            transformer,
            spec,
            vocab_size=model.vocab_size,
            max_sequence_length=config.training.sequence_length,
            hybrid_layer_pattern=_staged(model.layer_pattern, config.stages),
            pre_process=stage == 0,
            post_process=stage == parallel.num_stages - 1,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,
            share_embeddings_and_output_weights=model.tie_embeddings,
            vp_stage=chunk if parallel.virtual_stages > 1 else None,
        )
        if model.rope_scaling_factor is not None:
            # HybridModel does not hand llama3's scaling on.
            hybrid.rotary_pos_emb = RotaryEmbedding(
                kv_channels=transformer.kv_channels,
                rotary_percent=1.0,
                rotary_base=model.rotary_base,
                rope_scaling=True,
                rope_scaling_factor=model.rope_scaling_factor,
                cp_group=hybrid.pg_collection.cp,
            )
        initialize_weights(hybrid, seed=config.training.seed, std=model.init_std)
        chunks.append(hybrid)
    return chunks


def _staged(pattern: str, stages: tuple[int, ...]) -> str:
    """Pattern with megatron-core's mark between stages: ("*-*-", (2, 2)) -> "*-|*-"."""
    ends = [sum(stages[: stage + 1]) for stage in range(len(stages))]
    return "|".join(pattern[end - size : end] for end, size in zip(ends, stages, strict=True))
