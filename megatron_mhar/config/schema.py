"""The typed run config: every key of a run, its type, default and meaning, and what is refused.

Files, overrides and messages with file and line are the business of :mod:`megatron_mhar.config.load`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megatron_mhar.depth.residual import SUBLAYERS_PER_LAYER, ResidualConfig, problem
from megatron_mhar.pipeline.plan import even_stages


class Section(BaseModel):
    """A group of keys. Unknown keys are refused; a built config never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# A path without its ending; "~" is the home folder, as in a shell.
FilePrefix = Annotated[str, AfterValidator(os.path.expanduser)]


# Symbols of megatron-core's hybrid layer patterns that a run can have.
SUBLAYERS = {"*": "attention", "-": "MLP", "E": "MoE", "M": "Mamba", "G": "gated delta net"}
RECURRENT = frozenset("MG")


class ModelConfig(Section):
    """Shape of the decoder. Every sublayer (attention, MLP, ...) is a layer of megatron-core's HybridModel."""

    num_layers: PositiveInt = Field(description="transformer layers: one attention and one MLP sublayer each")
    hidden_size: PositiveInt = Field(description="model width d")
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt = Field(description="key/value heads of grouped-query attention")
    head_dim: PositiveInt | None = Field(None, description="width of an attention head; hidden_size / heads by default")
    ffn_hidden_size: PositiveInt = Field(description="SwiGLU inner width")
    vocab_size: PositiveInt = Field(description="rows of the embedding; parallel.tensor must divide it")
    pattern: str | None = Field(
        None,
        description="megatron-core's hybrid layer pattern (* attention, - MLP, E mixture of experts; M Mamba and "
        "G gated delta net, in megatron-core's default shapes); '*-' a layer by default",
    )
    num_experts: PositiveInt | None = Field(None, description="experts of each E sublayer; parallel.expert divides it")
    moe_ffn_hidden_size: PositiveInt | None = Field(
        None, description="SwiGLU inner width of an expert; ffn_hidden_size by default"
    )
    moe_router_topk: PositiveInt = Field(2, description="experts of a token")
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss"] = Field(
        "aux_loss", description="what the auxiliary loss balances experts over: a micro-batch, or each sequence"
    )
    moe_aux_loss_coeff: float = Field(
        0.01, ge=0, description="weight of the auxiliary loss, which is in the gradients and not in the reported loss"
    )
    tie_embeddings: bool = True
    qk_layernorm: bool = Field(True, description="RMSNorm on each query and key head, as in Qwen3")
    norm_eps: float = Field(1e-6, gt=0)
    init_std: float = Field(0.02, gt=0, description="all weights are N(0, init_std), output projections too")
    rotary_base: PositiveInt = 10000
    rope_scaling_factor: float | None = Field(None, gt=1, description="llama3 rope scaling factor; off by default")
    layers: Literal["auto", "local", "transformer_engine"] = Field(
        "auto", description="whose linear, norm and attention modules; auto is Transformer Engine where a GPU has it"
    )

    @property
    def layer_pattern(self) -> str:
        """Hybrid layer pattern, one symbol a sublayer."""
        return self.pattern or "*-" * self.num_layers

    @property
    def expert_width(self) -> int:
        """SwiGLU inner width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def kv_channels(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _shapes_fit(self) -> ModelConfig:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise problem(
                "num_attention_heads",
                f"{self.num_attention_heads} given, but it must divide hidden_size "
                f"{self.hidden_size} (or give head_dim)",
            )
        if self.num_attention_heads % self.num_query_groups:
            raise problem(
                "num_query_groups",
                f"{self.num_query_groups} given, but it must divide num_attention_heads {self.num_attention_heads}",
            )
        if self.kv_channels % 2:
            raise problem("head_dim", f"{self.kv_channels} given, but rotary embeddings need an even head width")
        if self.pattern is not None:
            why = {
                "/": ": multi-token prediction is not supported, its layers join their sublayers by plain residuals "
                "and would lose the sources",
                "|": ": pipeline stages are set by parallel.stage_sublayers",
            }
            bad = sorted(set(self.pattern) - set(SUBLAYERS))
            if bad:
                allowed = ", ".join(f"{symbol} ({name})" for symbol, name in SUBLAYERS.items())
                raise problem("pattern", f"symbol {bad[0]!r} given{why.get(bad[0], '')}; allowed: {allowed}")
            if len(self.pattern) != 2 * self.num_layers:
                raise problem(
                    "pattern",
                    f"{len(self.pattern)} sublayers given, but num_layers {self.num_layers} "
                    f"means {2 * self.num_layers}",
                )
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> ModelConfig:
        if "E" in self.layer_pattern:
            if self.num_experts is None:
                raise problem("num_experts", "missing: the pattern has E (mixture of experts) sublayers")
            if self.moe_router_topk > self.num_experts:
                raise problem("moe_router_topk", f"{self.moe_router_topk} given, but num_experts is {self.num_experts}")
            return self
        for key, field in type(self).model_fields.items():
            if key == "num_experts" or key.startswith("moe_"):
                if getattr(self, key) != field.default:
                    raise problem(
                        key, f"{getattr(self, key)} given, but the pattern has no E (mixture of experts) sublayer"
                    )
        return self


class DataConfig(Section):
    """Where packed tokens come from: Megatron .bin/.idx files, named without their ending."""

    train: tuple[FilePrefix, ...] = Field(min_length=1, description="training files (path without .bin/.idx)")
    train_weights: tuple[float, ...] | None = Field(
        None, description="share of each training file; by size if not given"
    )
    valid: tuple[FilePrefix, ...] = Field((), description="validation files (path without .bin/.idx)")
    end_of_document: int = Field(ge=0, description="token id that joins documents in the packed stream")
    document_masks: bool = Field(False, description="not supported: attention and loss cross the ends of documents")
    num_workers: int = Field(2, ge=0, description="loader processes a rank")

    @model_validator(mode="after")
    def _supported(self) -> DataConfig:
        if self.document_masks:
            raise problem(
                "document_masks",
                "true given, but document masks are not supported: documents are packed "
                "and attended across, as the recipes do; allowed: false",
            )
        if self.train_weights is not None and (
            len(self.train_weights) != len(self.train) or min(self.train_weights) <= 0
        ):
            raise problem(
                "train_weights",
                f"{len(self.train_weights)} given; allowed: one positive weight for each of "
                f"the {len(self.train)} training files",
            )
        return self


DecayGroup = Literal["embedding", "norm", "bias", "depth"]


class OptimizerConfig(Section):
    """AdamW, its schedule, and what is done to the weights and the loss."""

    lr: float = Field(gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="decay after warm-up; wsd is warm-up, stable, decay"
    )
    warmup_steps: int = Field(0, ge=0, description="linear warm-up, in steps")
    decay_steps: PositiveInt | None = Field(None, description="step at which min_lr is reached; the last by default")
    wsd_decay_steps: PositiveInt | None = Field(None, description="wsd only: length of the final decay, in steps")
    wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    weight_decay: float = Field(0.1, ge=0)
    no_weight_decay: tuple[DecayGroup, ...] = Field((), description="groups of parameters, by name, without decay")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0, description="largest global gradient norm; 0 turns clipping off")
    ema_decay: float | None = Field(None, gt=0, lt=1, description="keep (and evaluate) a moving average of the weights")
    z_loss: float = Field(0.0, ge=0, description="weight of the squared log-partition of the logits")

    @model_validator(mode="after")
    def _schedule_fits(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise problem("min_lr", f"{self.min_lr} given, but it must not exceed lr {self.lr}")
        if (self.schedule == "wsd") != (self.wsd_decay_steps is not None):
            raise problem(
                "wsd_decay_steps",
                "needed by schedule wsd and by it alone; "
                f"schedule {self.schedule}, wsd_decay_steps {self.wsd_decay_steps} given",
            )
        return self


class ParallelConfig(Section):
    """How the model is spread over ranks. Data parallelism takes what is left of the world size."""

    tensor: PositiveInt = Field(1, description="tensor-parallel size")
    sequence: bool = Field(
        False, description="sequence parallelism: activations between sublayers cut along the sequence"
    )
    pipeline: PositiveInt = Field(1, description="pipeline-parallel size")
    virtual_stages: PositiveInt = Field(1, description="stages of each pipeline rank; above 1 the schedule interleaves")
    stage_sublayers: tuple[NonNegativeInt, ...] | None = Field(
        None,
        description="sublayers of each of the pipeline x virtual_stages stages, in order; the first (embedding) and "
        "the last (loss) may have none. As even as whole layers allow if not given",
    )
    microbatch_group: PositiveInt | None = Field(
        None, description="micro-batches a rank runs of one virtual stage before the next; the pipeline size by default"
    )
    history_cache: bool = Field(
        True, description="a rank keeps the sources that it had for its later virtual stages; off, they are sent anew"
    )
    overlap_p2p: bool = Field(False, description="overlap messages between virtual stages with compute")
    context: PositiveInt = Field(
        1, description="context-parallel size: slices of each sequence; Transformer Engine's attention alone can"
    )
    expert: PositiveInt = Field(
        1, description="expert-parallel size: data- and context-parallel ranks that share out the experts"
    )
    fsdp: bool = Field(False, description="fully sharded data parallelism")
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    join_s: PositiveInt = Field(300, description="seconds that a rank which has started waits for the others to start")
    timeout_s: PositiveInt = Field(
        600, description="seconds of waiting for other ranks after which one that hangs is named, and all end"
    )
    heartbeat_s: PositiveInt = Field(
        30, description="seconds of silence after which a rank is taken for dead and named, and the others end"
    )

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pipeline * self.virtual_stages

    @property
    def collective_timeout_s(self) -> int:
        """Seconds until torch ends a collective without an answer: late enough for the watch to name who hangs."""
        return self.timeout_s + 2 * self.heartbeat_s

    @model_validator(mode="after")
    def _supported(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise problem("sequence", "true given, but sequence parallelism needs tensor > 1")
        if self.fsdp:
            raise problem(
                "fsdp",
                "true given, but FSDP is not supported: the distributed optimizer shards optimizer "
                "states and the weights stay whole; allowed: false",
            )
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise problem("virtual_stages", f"{self.virtual_stages} given, but virtual stages need pipeline > 1")
        for key in ("microbatch_group", "overlap_p2p"):
            if getattr(self, key) and self.virtual_stages == 1:
                raise problem(key, f"{getattr(self, key)} given, but it exists for virtual_stages > 1")
        if self.stage_sublayers is not None:
            stages = ", ".join(map(str, self.stage_sublayers))
            if len(self.stage_sublayers) != self.num_stages:
                raise problem(
                    "stage_sublayers",
                    f"{stages} given, but pipeline {self.pipeline} x virtual_stages {self.virtual_stages} needs "
                    f"{self.num_stages} numbers",
                )
            if 0 in self.stage_sublayers[1:-1]:
                raise problem("stage_sublayers", f"{stages} given, but only the first and the last stage may have none")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise problem("overlap_param_gather", "true given, but it needs overlap_grad_reduce: true")
        return self


class SkipConfig(Section):
    """Steps that leave the weights as they are; one whose loss or gradient norm is not finite always does."""

    spike_factor: float | None = Field(
        None, gt=1, description="skip steps whose gradient norm is over so many times its running median"
    )
    loss_rise: float | None = Field(
        None, gt=0, description="skip steps whose loss is over its running median by so much (one more sum over ranks)"
    )
    spike_window: PositiveInt = Field(
        128, description="steps that the medians are taken over; until so many are made, none is a spike"
    )
    max_in_row: PositiveInt = Field(10, description="so many skipped steps in a row stop the run; 1: the first does")


def _own_format(recipe: str | None) -> str:
    """Format of a recipe of Transformer Engine."""
    return "e4m3" if recipe in ("mxfp8", "blockwise") else "hybrid"


class Fp8Config(Section):
    """How FP8 sees tensors. Weights, their gradients, depth parameters and the history stay bf16 or fp32."""

    recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = Field(
        "tensorwise",
        description="where scales come from: the tensor at hand, the largest values before (delayed; three passes over "
        "the first batch find the first ones), or blocks of it (mxfp8 from Blackwell on, blockwise from Hopper on)",
    )
    format: Literal["hybrid", "e4m3"] | None = Field(
        None,
        description="e4m3 throughout, or e5m2 (hybrid) for gradients of activations; where not given as Transformer "
        "Engine's recipes have it: hybrid with tensorwise and delayed, e4m3 with scales of blocks",
    )
    amax_history: PositiveInt = Field(1024, description="delayed only: forwards whose largest value makes the scale")
    bf16_sublayers: NonNegativeInt = Field(
        0, description="sublayers at each end of the model whose products stay bf16; not with delayed"
    )

    @field_validator("format")
    @classmethod
    def _own_format_is_none(cls, given: str | None, info: ValidationInfo) -> str | None:
        # So that a run that was given what its recipe has anyway, as all were once, is one that was given nothing.
        return None if given == _own_format(info.data.get("recipe")) else given

    @model_validator(mode="after")
    def _recipe_fits(self) -> Fp8Config:
        if self.recipe == "delayed" and self.bf16_sublayers:
            raise problem(
                "bf16_sublayers", f"{self.bf16_sublayers} given, but recipe delayed scales all sublayers together"
            )
        if self.recipe != "delayed" and self.amax_history != type(self).model_fields["amax_history"].default:
            raise problem("amax_history", f"{self.amax_history} given, but it exists for recipe: delayed")
        return self

    @property
    def resolved_format(self) -> str:
        """The format of this run."""
        return self.format or _own_format(self.recipe)

    @property
    def multiple(self) -> int:
        """What both sides of every matrix must be a multiple of."""
        return 32 if self.recipe == "mxfp8" else 16


class TrainingConfig(Section):
    """Length, batch and precision of a run."""

    steps: PositiveInt = Field(description="length of the run, and of its schedule")
    stop_after: PositiveInt | None = Field(None, description="save and stop after this step; the schedule stays")
    global_batch_size: PositiveInt = Field(description="sequences a step over all ranks")
    micro_batch_size: PositiveInt = Field(description="sequences a forward on one rank")
    sequence_length: PositiveInt
    precision: Literal["bf16", "fp32", "fp8"] = Field(
        "bf16", description="fp8 is bf16 but for the products of Transformer Engine's layers in training"
    )
    fp8: Fp8Config = Fp8Config()
    cuda_graph: Literal["none", "full_iteration"] = Field(
        "none",
        description="full_iteration: forward and backward of all micro-batches of a step as one CUDA graph, captured "
        "after three steps. Small micro-batches are then not bound by launches. With fused attention sequences must be "
        "multiples of 128",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="recomputed in the backward: core attention (selective), sublayers and their sites (full)"
    )
    recompute_method: Literal["uniform", "block"] = Field(
        "uniform", description="full only: all sublayers in runs of so many, or the first so many of each stage"
    )
    recompute_sublayers: PositiveInt = Field(1, description="full only: how many")
    seed: int = Field(42, ge=0)
    log_interval: PositiveInt = Field(10, description="steps between log lines")
    deterministic: bool = Field(False, description="bit-identical repeats on a GPU, at some speed")
    skip: SkipConfig = SkipConfig()
    peak_tflops: float | None = Field(
        None, gt=0, description="dense TFLOP/s of a GPU, which MFU is a share of; by the device's name if not given"
    )

    @model_validator(mode="after")
    def _recompute_fits(self) -> TrainingConfig:
        for key in ("recompute_method", "recompute_sublayers"):
            if self.recompute != "full" and getattr(self, key) != type(self).model_fields[key].default:
                raise problem(key, f"{getattr(self, key)} given, but it exists for recompute: full")
        return self

    @model_validator(mode="after")
    def _fp8_fits(self) -> TrainingConfig:
        if self.precision != "fp8" and self.fp8 != Fp8Config():
            raise problem("fp8", f"given, but it exists for precision: fp8, and precision is {self.precision}")
        return self

    @property
    def bf16(self) -> bool:
        """Whether weights and activations are bf16, else fp32."""
        return self.precision != "fp32"


class EvaluationConfig(Section):
    """Validation loss at intervals, always over the same samples."""

    interval: PositiveInt = Field(500, description="steps between evaluations; the last step is always evaluated")
    batches: PositiveInt = Field(16, description="global batches an evaluation")
    tail: PositiveInt = Field(11, description="reported loss: mean of this many last evaluations")


class CheckpointConfig(Section):
    """What is saved beside the log, and what a run starts from."""

    interval: PositiveInt = Field(1000, description="steps between checkpoints; the last step is always saved")
    keep: PositiveInt = Field(2, description="newest complete checkpoints kept; older ones are removed after each save")
    keep_every: PositiveInt | None = Field(
        None, description="checkpoints of steps that are multiples of this are never removed"
    )
    asynchronous: bool = Field(
        False, description="training goes on while a process of each rank writes; costs host memory for a copy"
    )


class TrackingConfig(Section):
    """MLflow. Metrics are written to a journal in the run folder first and sent from another process."""

    enabled: bool = True
    uri: str | None = Field(None, description="MLflow server or store; a sqlite file in output_dir by default")
    experiment: str = Field("megatron_mhar", min_length=1)
    request_timeout_s: PositiveInt = Field(2, description="seconds until one request to the server is given up")
    drain_timeout_s: float = Field(
        30, ge=0, description="longest wait for the server once training has ended; 10 s once it was told to stop"
    )


class ProfileConfig(Section):
    """Ranges by site and sublayer, and a trace of some steps in the run folder's profile/. Off without start_step.

    Steps that replay a CUDA graph (training.cuda_graph) show kernels alone.
    """

    start_step: PositiveInt | None = Field(None, description="first step that is profiled; off by default")
    steps: PositiveInt = Field(3, description="how many are")
    ranks: tuple[NonNegativeInt, ...] = Field((0,), min_length=1, description="ranks that profile")
    tool: Literal["torch", "nsys"] = Field(
        "torch",
        description="torch's profiler writes a trace; nsys: NVTX ranges alone, for nsys profile "
        "--capture-range=cudaProfilerApi around mhar train",
    )


class RunConfig(Section):
    """A whole run."""

    name: str = Field(description="folder of the run below output_dir")
    output_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Path("runs")
    model: ModelConfig
    residual: ResidualConfig = ResidualConfig()
    data: DataConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    parallel: ParallelConfig = ParallelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def stages(self) -> tuple[int, ...]:
        """Sublayers of each pipeline stage."""
        return self.parallel.stage_sublayers or even_stages(
            len(self.model.layer_pattern), self.parallel.num_stages, SUBLAYERS_PER_LAYER
        )

    @property
    def run_dir(self) -> Path:
        """Everything the run writes lies here."""
        return self.output_dir / self.name

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise problem("name", f"{self.name!r} given; allowed: letters, digits, '.', '_' and '-'")
        for key, paths in (
            ("output_dir", (self.output_dir,)), ("data.train", self.data.train), ("data.valid", self.data.valid)
        ):  # fmt: skip
            for path in paths:
                if not str(path).isprintable():
                    raise problem(key, f"{str(path)!r} given, but a path here has no control characters")
        if (first := self.profile.start_step) is not None and first > self.training.steps:
            raise problem("profile.start_step", f"{first} given, but the run ends at step {self.training.steps}")
        try:
            self.residual.check(hidden_size=self.model.hidden_size, num_sublayers=len(self.model.layer_pattern))
        except PydanticCustomError as error:
            assert error.context is not None
            at, message = error.context["at"], error.context["message"].removeprefix(f"{error.context['at']}: ")
            raise problem(f"residual.{at}", message) from None
        model, training, parallel, optimizer = self.model, self.training, self.parallel, self.optimizer
        for key in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size"):
            if getattr(model, key) % parallel.tensor:
                raise problem(
                    "parallel.tensor", f"{parallel.tensor} given, but it must divide model.{key} {getattr(model, key)}"
                )
        self._experts_and_recurrences_fit()
        self._fp8_fits()
        self._cuda_graph_fits()
        sublayers = len(model.layer_pattern)
        if sum(self.stages) != sublayers:
            raise problem(
                "parallel.stage_sublayers",
                f"{', '.join(map(str, self.stages))} given, which are {sum(self.stages)} sublayers, but the model has "
                f"{sublayers}",
            )
        if 0 in self.stages[1:-1]:
            raise problem(
                "parallel.pipeline",
                f"{parallel.num_stages} stages given, but the model has {sublayers} sublayers: only the first and the "
                "last stage may have none",
            )
        # A context rank has an early and a late piece of each sequence: causal attention makes late ones dear.
        pieces = 2 * parallel.context if parallel.context > 1 else 1
        pieces *= parallel.tensor if parallel.sequence else 1
        if training.sequence_length % pieces:
            key = "context" if parallel.context > 1 else "tensor"
            raise problem(
                f"parallel.{key}",
                f"{getattr(parallel, key)} given, but {pieces} must divide training.sequence_length "
                f"{training.sequence_length} (2 x context with context, times tensor with sequence parallelism)",
            )
        if training.global_batch_size % training.micro_batch_size:
            raise problem(
                "training.global_batch_size",
                f"{training.global_batch_size} given, but it must be a multiple "
                f"of training.micro_batch_size {training.micro_batch_size}",
            )
        last = optimizer.decay_steps or training.steps
        if optimizer.warmup_steps >= last:
            raise problem(
                "optimizer.warmup_steps", f"{optimizer.warmup_steps} given, but the schedule ends at step {last}"
            )
        if optimizer.wsd_decay_steps is not None and optimizer.wsd_decay_steps > last - optimizer.warmup_steps:
            raise problem(
                "optimizer.wsd_decay_steps",
                f"{optimizer.wsd_decay_steps} given, but only {last - optimizer.warmup_steps} steps follow the warm-up",
            )
        if self.data.end_of_document >= model.vocab_size:
            raise problem(
                "data.end_of_document", f"{self.data.end_of_document} given, but model.vocab_size is {model.vocab_size}"
            )
        return self

    def _experts_and_recurrences_fit(self) -> None:
        model, parallel = self.model, self.parallel
        if model.num_experts is None:
            if parallel.expert > 1:
                raise problem(
                    "parallel.expert",
                    f"{parallel.expert} given, but the model has no experts (model.pattern with E, model.num_experts)",
                )
        elif model.num_experts % parallel.expert:
            raise problem(
                "parallel.expert", f"{parallel.expert} given, but it must divide model.num_experts {model.num_experts}"
            )
        elif parallel.tensor > 1 and not parallel.sequence:
            raise problem(
                "parallel.sequence",
                f"false given with tensor {parallel.tensor}, but every tensor-parallel rank would send the same tokens "
                "to the experts: needed are tensor: 1, or sequence: true",
            )
        elif model.expert_width % parallel.tensor:
            raise problem(
                "parallel.tensor",
                f"{parallel.tensor} given, but it must divide model.moe_ffn_hidden_size {model.expert_width}",
            )
        recurrent = sorted(set(model.layer_pattern) & RECURRENT)
        for key in ("tensor", "context"):
            if recurrent and getattr(parallel, key) > 1:
                raise problem(
                    f"parallel.{key}",
                    f"{getattr(parallel, key)} given, but {SUBLAYERS[recurrent[0]]} sublayers are not cut over ranks: "
                    "needed is 1",
                )

    def _fp8_fits(self) -> None:
        model, training, parallel, fp8 = self.model, self.training, self.parallel, self.training.fp8
        if training.precision != "fp8":
            return
        recurrent = sorted(set(model.layer_pattern) & RECURRENT)
        if recurrent:
            raise problem("training.precision", f"fp8 given, but {SUBLAYERS[recurrent[0]]} sublayers have none")
        if fp8.bf16_sublayers > (held := len(model.layer_pattern) // parallel.pipeline):
            raise problem(
                "training.fp8.bf16_sublayers",
                f"{fp8.bf16_sublayers} given, but it must not exceed the {held} sublayers of a pipeline rank",
            )
        query = model.num_attention_heads * model.kv_channels // parallel.tensor
        tokens = training.micro_batch_size * training.sequence_length // parallel.context
        sizes = {
            "model.hidden_size": model.hidden_size,
            "the width of a rank's query heads": query,
            "the width of a rank's query, key and value heads": query
            + 2 * model.num_query_groups * model.kv_channels // parallel.tensor,
            "model.ffn_hidden_size / parallel.tensor": model.ffn_hidden_size // parallel.tensor,
            "model.moe_ffn_hidden_size / parallel.tensor": model.expert_width // parallel.tensor,
            "the number of a rank's tokens in a micro-batch": tokens // (parallel.tensor if parallel.sequence else 1),
        }
        for what, size in sizes.items():
            if size % fp8.multiple:
                raise problem(
                    "training.precision",
                    f"fp8 given, but {what} is {size}; recipe {fp8.recipe} needs multiples of {fp8.multiple}",
                )

    def _cuda_graph_fits(self) -> None:
        if self.training.cuda_graph == "none":
            return
        reasons = {
            "parallel.pipeline": (self.parallel.pipeline > 1, "messages between stages are not captured"),
            "parallel.overlap_grad_reduce": (self.parallel.overlap_grad_reduce, "overlapped messages are not captured"),
            "model.num_experts": (
                self.model.num_experts is not None,
                "the host reads how many tokens go to each expert, which a graph cannot wait for",
            ),
        }
        for key, (given, reason) in reasons.items():
            if given:
                section, name = key.split(".")
                value = str(getattr(getattr(self, section), name)).lower()
                raise problem(
                    "training.cuda_graph", f"{self.training.cuda_graph} given with {key} {value}, but {reason}"
                )
