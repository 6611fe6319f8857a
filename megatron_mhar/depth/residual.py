"""The one typed description of a residual method: what flows across depth and how a sublayer reads it."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Method = Literal[
    "baseline",
    "attnres",
    "mhar",
    "attnres_block",
    "mhar_block",
    "delta",
    "delta_block",
    "hyper_connections",
]
METHODS: tuple[Method, ...] = get_args(Method)

# Which methods each feature exists for. A feature set on another method is refused, never ignored.
MULTI_HEAD: frozenset[str] = frozenset({"mhar", "mhar_block", "delta", "delta_block"})
BLOCK: frozenset[str] = frozenset({"attnres_block", "mhar_block", "delta_block"})
DELTA: frozenset[str] = frozenset({"delta", "delta_block"})
ROUTED: frozenset[str] = MULTI_HEAD | BLOCK | frozenset({"attnres"})
REPLACEMENT: frozenset[str] = ROUTED - DELTA  # a read is a sublayer's whole input, where delta adds it to a stream

SUBLAYERS_PER_LAYER = 2  # attention and MLP


def problem(at: str, message: str) -> PydanticCustomError:
    """An error about one key of a config; ``at`` is its dotted path below the object that raises."""
    # The message travels as context so that braces in it are never taken for placeholders.
    return PydanticCustomError("config_problem", "{message}", {"message": f"{at}: {message}", "at": at})


class ResidualConfig(BaseModel):
    """Method, heads, blocks, null source and gate of a model's residual path.

    Raises:
        pydantic.ValidationError: a value is out of range or the method has no such feature. The
            message names the key, what was given and what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: Method = Field("baseline", description="residual method")
    num_heads: int = Field(1, ge=1, description="routing heads H; hidden_size must be divisible by it")
    block_layers: int | None = Field(
        None, ge=1, description="transformer layers (two sublayers each) in a block; block methods only"
    )
    allow_partial_block: bool = Field(
        False, description="let the last block take what is left where block_layers does not divide the depth"
    )
    block_form: Literal["paper", "released"] = Field(
        "paper", description="delta_block only: the paper's sources, or those of the authors' released code"
    )
    null_source: bool | None = Field(
        None, description="delta methods only: a learned source shared by all tokens (on where not given)"
    )
    gate_init: float | None = Field(
        None, description="delta methods only: initial output gate (0 where not given; 1 from scratch)"
    )
    num_streams: int = Field(4, ge=2, description="hyper_connections only: residual streams n")
    eps: float = Field(1e-6, gt=0, description="epsilon of the routing keys' RMSNorm")
    backend: Literal["auto", "reference", "torch", "triton"] = Field(
        "auto", description="routing backend, see megatron_mhar.routing"
    )

    @model_validator(mode="after")
    def _features_exist(self) -> ResidualConfig:
        given = self.model_fields_set
        method = self.method
        if method not in MULTI_HEAD and self.num_heads != 1:
            raise problem(
                "num_heads",
                f"{self.num_heads} given, but {method} has one head; methods with heads: {_names(MULTI_HEAD)}",
            )
        if method in BLOCK and self.block_layers is None:
            raise problem("block_layers", f"missing: {method} needs the number of transformer layers in a block")
        only = {
            "block_layers": BLOCK,
            "allow_partial_block": BLOCK,
            "block_form": frozenset({"delta_block"}),
            "null_source": DELTA,
            "gate_init": DELTA,
            "num_streams": frozenset({"hyper_connections"}),
            "backend": ROUTED,
        }
        for key, methods in only.items():
            default = type(self).model_fields[key].default
            if key in given and getattr(self, key) != default and method not in methods:
                raise problem(
                    key,
                    f"{getattr(self, key)!r} given, but {method} has no such feature; it exists for {_names(methods)}",
                )
        if self.block_form == "released" and self.null_source is False:
            raise problem("null_source", "false given, but block_form 'released' reads the null source alone at site 0")
        return self

    @property
    def has_null_source(self) -> bool:
        """Whether every site owns a null source."""
        return self.method in DELTA and self.null_source is not False

    @property
    def initial_gate(self) -> float:
        """Output gate of the delta methods before training."""
        return 0.0 if self.gate_init is None else self.gate_init

    def check(self, *, hidden_size: int, num_sublayers: int) -> None:
        """Refuse what does not fit a model of ``num_sublayers`` sublayers of width ``hidden_size``.

        Raises:
            PydanticCustomError: a ValueError that names the key, what was given and what is allowed.
        """
        if hidden_size % self.num_heads:
            allowed = [h for h in range(1, min(hidden_size, 64) + 1) if hidden_size % h == 0]
            raise problem(
                "num_heads",
                f"{self.num_heads} given, but it must divide hidden_size {hidden_size}; "
                f"allowed up to 64: {', '.join(map(str, allowed))}",
            )
        if self.block_layers is not None and not self.allow_partial_block:
            width = SUBLAYERS_PER_LAYER * self.block_layers
            if num_sublayers % width:
                layers = num_sublayers / SUBLAYERS_PER_LAYER
                allowed = [
                    b for b in range(1, num_sublayers // 2 + 1) if num_sublayers % (SUBLAYERS_PER_LAYER * b) == 0
                ]
                raise problem(
                    "block_layers",
                    f"{self.block_layers} given, but it must divide the {layers:g} transformer layers; "
                    f"allowed: {', '.join(map(str, allowed)) or 'none'} "
                    "(or set allow_partial_block: true, and the last block takes what is left)",
                )


def _names(methods: frozenset[str]) -> str:
    return ", ".join(m for m in METHODS if m in methods)
