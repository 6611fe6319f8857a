"""Stack specs for megatron-core's HybridModel: any hybrid stack spec, routed.

    from megatron_mhar import ResidualConfig, routed_stack_spec
    spec = routed_stack_spec(ResidualConfig(method="mhar", num_heads=8), layers="transformer_engine")
    model = HybridModel(config, hybrid_stack_spec=spec, hybrid_layer_pattern="*-*-", ...)

``config.num_layers`` is the number of sublayers, that is of the pattern's symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_mhar.depth.residual import REPLACEMENT, ResidualConfig
from megatron_mhar.model.norm import RMSNorm, SiteNorm
from megatron_mhar.model.stack import RoutedStack, sublayer_output

Layers = Literal["local", "transformer_engine"]
# Names in checkpoints are those of Transformer Engine's layers, whose norm is part of the product that follows.
ATTENTION_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
MLP_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
BIAS_DROPOUT_ADD_FIELDS = ("self_attn_bda", "cross_attn_bda", "mlp_bda", "mamba_bda")


def routed_stack_spec(
    residual: ResidualConfig,
    *,
    layers: Layers | HybridStackSubmodules = "local",
    qk_layernorm: bool = False,
    num_experts: int | None = None,
    final_norm: Callable[..., torch.nn.Module] | None = None,
    site_norms: bool = True,
) -> ModuleSpec:
    """Spec of a decoder whose sublayers are joined by ``residual``, for ``HybridModel(hybrid_stack_spec=...)``.

    Args:
        residual: the method.
        layers: "local" (megatron-core's own modules), "transformer_engine" (megatron-core's hybrid stack spec: Mamba,
            gated delta net and MoE too, where their libraries are installed), or submodules of your own. They are taken
            as they are, but that a sublayer's output is not added to its input inside the layer.
        qk_layernorm: norms on query and key heads ("local" and "transformer_engine").
        num_experts: experts of MoE sublayers in "local" layers; without it the pattern can hold none.
        final_norm: norm before the output layer; by default Transformer Engine's for its layers, else our RMSNorm.
        site_norms: whether sites compute the norms of attention, MLP and MoE sublayers as the end of their reads
            ("local" and "transformer_engine", methods without a stream: a grafted model keeps its own norms to the
            bit). Leave it off for FP8: Transformer Engine's product quantises in the same pass as it norms; and where
            the config has another norm than RMSNorm, which is refused when the model is built.

    Raises:
        ImportError: Transformer Engine layers are asked for and the library is not installed.
        ValueError: ``layers`` is another word.
    """
    norm: Callable[..., Any] = RMSNorm
    site_norms = site_norms and residual.method in REPLACEMENT
    if layers == "local":
        submodules = _local_submodules(qk_layernorm, num_experts, SiteNorm if site_norms else RMSNorm)
    elif layers == "transformer_engine":
        submodules, norm = _transformer_engine_submodules(qk_layernorm, site_norms)
    elif isinstance(layers, str):
        raise ValueError(f"layers: {layers!r} given; allowed: 'local', 'transformer_engine', or submodules")
    else:
        submodules = layers
    return ModuleSpec(
        module=RoutedStack,
        params={"residual": residual, "final_norm": final_norm or norm},
        submodules=_without_residual_add(submodules),
    )


def _without_residual_add(submodules: HybridStackSubmodules) -> HybridStackSubmodules:
    """New submodules; the given ones, often another module's global, stay as they are."""
    changed: dict[str, Any] = {"mtp_block_spec": None}
    for field in fields(submodules):
        spec = getattr(submodules, field.name)
        if isinstance(spec, ModuleSpec) and is_dataclass(spec.submodules) and not isinstance(spec.submodules, type):
            adds = {
                name: sublayer_output
                for name in BIAS_DROPOUT_ADD_FIELDS
                # A layer without that sublayer holds a no-op there, which stays.
                if getattr(spec.submodules, name, IdentityFuncOp) not in (IdentityFuncOp, IdentityOp)
            }
            if adds:
                changed[field.name] = replace(spec, submodules=replace(spec.submodules, **adds))
    return replace(submodules, **changed)


def _local_submodules(
    qk_layernorm: bool, num_experts: int | None, norm: type[RMSNorm] = RMSNorm
) -> HybridStackSubmodules:
    head_norm = RMSNorm if qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    optional: dict[str, Any] = {}
    if num_experts is not None:
        optional["moe_layer"] = ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=get_moe_module_spec(use_te=False, num_experts=num_experts, moe_grouped_gemm=False),
                mlp_bda=get_bias_dropout_add,
            ),
        )
    return HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=ModuleSpec(
                    module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
                ),
                self_attn_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map=dict(ATTENTION_NORM_KEYS),
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
                mlp_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map=dict(MLP_NORM_KEYS),
            ),
        ),
        **optional,
    )


def _transformer_engine_submodules(
    qk_layernorm: bool, site_norms: bool
) -> tuple[HybridStackSubmodules, Callable[..., Any]]:
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEColumnParallelLinear, TENorm, TERowParallelLinear
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    if not HAVE_TE:
        raise ImportError(
            "layers 'transformer_engine' needs Transformer Engine, which is not installed: "
            "see Install in README, or use layers 'local'"
        )
    submodules: HybridStackSubmodules = hybrid_stack_spec.submodules
    if qk_layernorm:
        layer = submodules.attention_layer
        attention = layer.submodules.self_attention
        normed = replace(attention.submodules, q_layernorm=TENorm, k_layernorm=TENorm)
        attention = replace(attention, submodules=normed)
        layer = replace(layer, submodules=replace(layer.submodules, self_attention=attention))
        submodules = replace(submodules, attention_layer=layer)
    if site_norms:
        layer = submodules.attention_layer.submodules
        attention = layer.self_attention
        plain = replace(attention, submodules=replace(attention.submodules, linear_qkv=TEColumnParallelLinear))
        layer = replace(
            layer, input_layernorm=SiteNorm, self_attention=plain, sharded_state_dict_keys_map=dict(ATTENTION_NORM_KEYS)
        )
        mlp = MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
        mlp_layer = replace(
            submodules.mlp_layer.submodules,
            pre_mlp_layernorm=SiteNorm,
            mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
            sharded_state_dict_keys_map=dict(MLP_NORM_KEYS),
        )
        moe_layer = replace(submodules.moe_layer.submodules, pre_mlp_layernorm=SiteNorm)
        submodules = replace(
            submodules,
            attention_layer=replace(submodules.attention_layer, submodules=layer),
            mlp_layer=replace(submodules.mlp_layer, submodules=mlp_layer),
            moe_layer=replace(submodules.moe_layer, submodules=moe_layer),
        )
    return submodules, TENorm
