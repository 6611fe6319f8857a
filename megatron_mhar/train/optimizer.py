"""Megatron-core's distributed AdamW and schedule: decay by parameter name, a weight average, and exact resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import (
    OptimizerConfig as MegatronOptimizerConfig,
)
from megatron.core.optimizer.optimizer_config import (
    ParamKey,
    ParamWithNamePredicate,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import Tensor

from megatron_mhar.config.schema import OptimizerConfig, RunConfig

ParameterGroup = Literal["embedding", "norm", "bias", "depth", "weight"]


def parameter_group(name: str) -> ParameterGroup:
    """Group of a parameter by its name alone: what is decayed must not depend on its shape.

    "depth" is everything a residual method adds (queries, key norms, gates, null sources, hyper-connections), "norm"
    the norms of sublayers and heads and the final one, also where Transformer Engine fuses them into a linear layer.
    """
    parts = name.split(".")
    if "site" in parts or "final_site" in parts:
        return "depth"
    if "word_embeddings" in parts or "position_embeddings" in parts:
        return "embedding"
    if parts[-1].endswith("bias"):
        return "bias"
    if parts[-1] == "layer_norm_weight" or (len(parts) > 1 and parts[-2].endswith("norm")):
        return "norm"
    return "weight"


class ResumableOptimizer(DistributedOptimizer):
    """DistributedOptimizer with a weight average kept beside its state, and without the faults of 0.19 at resume.

    Megatron-core constructs its own class; :func:`build_optimizer` makes its objects ones of this class.
    """

    # Average of each fp32 main parameter shard, keyed by the shard; None where no average is kept. Sharded over
    # data-parallel ranks and saved as one more optimizer state, it reshards as the moments do.
    averages: dict[Tensor, Tensor] | None
    # `[1]` fp32, counted with the gradients in their norm.
    counted: Tensor | None = None

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[Tensor]:
        """Gradients whose norm is taken, and what is counted with them."""
        grads = cast(list[Tensor], super().get_grads_for_grad_norm(grad_norm_group))
        return grads if self.counted is None or grad_norm_group is not None else [*grads, self.counted]

    def prepare(self, *, keep_average: bool) -> None:
        """Allocate the state now, so that saving before the first step and loading see the same tensors."""
        hyperparameters = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0  # the dummy step then moves no weight
        self._init_optimizer_states_with_dummy_values()
        for group, (lr, decay) in zip(self.optimizer.param_groups, hyperparameters, strict=True):
            group["lr"], group["weight_decay"] = lr, decay
            if "step" in group:  # fused optimizers count in the group, torch's in the state
                group["step"] = 0
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        shards = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.averages = {p: p.detach().clone() for p in shards} if keep_average else None

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        """State tensors that are saved, the average among them."""
        keys = cast(tuple[str, ...], super().optimizer_state_keys)
        return keys if self.averages is None else (*keys, "average")

    def _main_shard(self, model_param: Tensor) -> Tensor:
        group, order = self.model_param_group_index_map[model_param]
        return self.optimizer.param_groups[group]["params"][order]

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        if self.averages is not None:
            tensors["average"] = self.averages[self._main_shard(model_param)]
        return tensors

    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        shard = self._main_shard(model_param)
        if self.averages is not None:
            self.averages[shard].copy_(tensors["average"])
        # The checkpoint keeps torch's step count once, in the group, from where load_state_dict has taken it.
        state = self.optimizer.state[shard]
        steps = {"step": state["step"]} if isinstance(state.get("step"), Tensor) else {}
        super()._set_main_param_and_optimizer_states(model_param, tensors | steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load; each parameter keeps a step count of its own (upstream gives all of them one tensor, so that every
        step counts once a parameter and the run diverges in silence)."""
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    @torch.no_grad()
    def update_average(self, decay: float) -> None:
        """average := decay * average + (1 - decay) * weights."""
        assert self.averages is not None
        for shard, average in self.averages.items():
            average.lerp_(shard.float(), 1 - decay)

    @torch.no_grad()
    def swap_average(self) -> None:
        """Exchange weights and average, in the main shards and in the model on every rank."""
        assert self.averages is not None
        for shard, average in self.averages.items():
            kept = shard.detach().clone()
            shard.copy_(average)
            average.copy_(kept)
        self._copy_main_params_to_model_params()
        for chunk in self.model_chunks:
            chunk.start_param_sync(force_sync=True)


class ResumableChain(ChainedOptimizer):
    """A rank's optimizers: of the shared weights and, under expert parallelism, of its experts. Saved as one.

    Upstream's form of a chain of two does not load into a chain of one: its entries are numbered, and groups of
    parameters are told apart by whether they hold shared-out experts. Here the expert-parallel size leaves no trace.

    Attributes:
        norm: of all gradients, before clipping; a tensor where the norm was taken on the device.
        accepts: told it before the weights change; if it says no, they do not. Upstream's own threshold lets NaN
            through, and leaves ranks without parameters waiting for the others.
    """

    norm: float | Tensor
    accepts: Callable[[float], bool]

    def get_grad_norm(self) -> float | Tensor:
        """Norm of all gradients."""
        self.norm = super().get_grad_norm()
        return self.norm

    def step_with_ready_grads(self) -> bool:
        """Update the weights, if the step is accepted; whether they were."""
        self.norm = float(self.norm)
        return self.accepts(self.norm) and bool(super().step_with_ready_grads())

    def sharded_state_dict(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """State of all parts: hyperparameters once (experts have those of other matrices), tensors by part."""
        self._synchronize_steps()
        states = {
            number: part.sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
            for number, part in self._parts_with_parameters()
        }
        return states[0] | {"param_state": {number: state["param_state"] for number, state in states.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`sharded_state_dict` gave, under any expert-parallel size."""
        for number, part in self._parts_with_parameters():
            experts = {"is_expert_parallel": part.param_groups[0]["is_expert_parallel"]}
            groups = [group | experts for group in state_dict["optimizer"]["param_groups"]]
            tensors = state_dict["param_state"][number]
            part.load_state_dict(state_dict | {"optimizer": {"param_groups": groups}, "param_state": tensors})
        self._synchronize_steps()

    def _parts_with_parameters(self) -> list[tuple[int, ResumableOptimizer]]:
        """Not the experts' on a pipeline stage without any, which could not say how many steps it has done."""
        return [(number, part) for number, part in enumerate(self.chained_optimizers) if part.buffers]


class Optimizer:
    """AdamW over a rank's model chunks, its schedule and, if asked for, the moving average of the weights."""

    def __init__(self, config: RunConfig, chunks: Sequence[torch.nn.Module]) -> None:
        settings, bf16 = config.optimizer, config.training.bf16
        exempt = frozenset(settings.no_weight_decay)
        overrides: dict[ParamKey, ParamGroupOverride] = {}
        if exempt:
            # An output layer tied to the embedding of another stage is the embedding.
            undecayed = ParamWithNamePredicate(
                "no_weight_decay",
                lambda parameter, name: (
                    ("embedding" if getattr(parameter, "shared_embedding", False) else parameter_group(name)) in exempt
                ),
            )
            overrides[ParamKey(with_name_predicate=undecayed)] = ParamGroupOverride(wd_mult=0.0)
        self.megatron = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                clip_grad=settings.clip_grad,
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                use_distributed_optimizer=True,
                overlap_param_gather=config.parallel.overlap_param_gather,
            ),
            list(chunks),
            config_overrides=overrides,  # not None: megatron-core's default goes by shape
        )
        self.megatron.__class__ = ResumableChain
        self.parts: list[ResumableOptimizer] = []
        for part in self.megatron.chained_optimizers:
            part.__class__ = ResumableOptimizer
            part.prepare(keep_average=settings.ema_decay is not None)
            self.parts.append(part)
        self.ema_decay = settings.ema_decay
        self.scheduler = build_scheduler(settings, config.training.steps, self.megatron)

    def step(self, loss: Tensor | None = None, accepts: Callable[[float], bool] = math.isfinite) -> tuple[bool, float]:
        """Clip, update, average, and move the schedule on; or nothing of all this.

        Args:
            loss: of this rank, where it has one.
            accepts: whether the step is made, by the gradient norm; the same on all ranks.

        Returns:
            Whether it was made, and the gradient norm before clipping. It is NaN also where a rank's loss is not
            finite.
        """
        # Zero, or NaN: all ranks learn of it by the norm, without a message of its own.
        self.parts[0].counted = None if loss is None else (loss.detach().float() * 0).reshape(1)
        self.megatron.accepts = accepts
        updated, _, _ = self.megatron.step()
        if updated:
            if self.ema_decay is not None:
                for part in self.parts:
                    part.update_average(self.ema_decay)
            self.scheduler.step(increment=1)
        return updated, float(self.megatron.norm)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.megatron.param_groups[0]["lr"])

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within the context the model holds the average of its weights, if one is kept."""
        averaging = self.parts if self.ema_decay is not None else []
        for part in averaging:
            part.swap_average()
        try:
            yield
        finally:
            for part in averaging:
                part.swap_average()


def build_scheduler(settings: OptimizerConfig, steps: int, optimizer: Any) -> OptimizerParamScheduler:
    """Megatron-core's scheduler, counted in steps: linear warm-up from 0, then the decay; constant weight decay."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.decay_steps or steps,
        lr_decay_style=settings.schedule if settings.schedule != "wsd" else "WSD",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        wsd_decay_steps=settings.wsd_decay_steps,
        lr_wsd_decay_style=settings.wsd_decay_style,
    )
