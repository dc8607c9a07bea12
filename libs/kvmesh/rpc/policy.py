"""What a tenant may do."""

from __future__ import annotations

import struct
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from kvmesh.errors import InvalidArgument, PermissionDenied
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.budget import Budget, Price, price_of

MAX_COUNT = 1_000_000_000

CacheRight = Literal["no_cache", "only_if_cached", "max_age", "tau"]


class Policy(BaseModel):
    """What a tenant may do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cache: Literal["off", "exact", "semantic"] = Field(default="semantic", description="Strongest cache mode.")
    cache_scope: Literal["tenant", "user"] = Field(
        default="tenant", description="Who shares answers; with user, a request that names none uses no cache."
    )
    cache_controls: tuple[CacheRight, ...] = Field(
        default=get_args(CacheRight), description="Cache controls that requests may use, no_store apart."
    )
    tau: float | None = Field(default=None, ge=0.0, le=1.0, description="Semantic threshold; None = the router's.")
    models: tuple[str, ...] = Field(default=("*",), description='Models that may be used; "*" = all.')
    max_tokens: int = Field(default=0, ge=0, description="Generated tokens per request; 0 = no limit.")
    max_concurrent: int = Field(default=0, ge=0, le=MAX_COUNT, description="Requests at a time; 0 = no limit.")
    requests_per_minute: int = Field(default=0, ge=0, le=MAX_COUNT, description="0 = no limit.")
    tokens_per_minute: int = Field(default=0, ge=0, le=MAX_COUNT, description="Prompt and output; 0 = no limit.")
    budget: Budget = Field(default=Budget(), description="What may be spent in a period.")
    prices: dict[Annotated[str, StringConstraints(min_length=1, max_length=512)], Price] = Field(
        default={}, max_length=1024, description="Model pattern -> price."
    )
    priority: int = Field(default=0, ge=-100, le=100, description="Higher goes first when workers are full.")
    weight: float = Field(
        default=1.0, ge=0.01, le=100, description="Share of full workers, against others of the same priority."
    )

    @model_validator(mode="after")
    def _priced(self) -> Policy:
        if self.budget.amount and self.budget.unit == "money" and not self.prices:
            raise ValueError("a budget of money needs prices")
        return self

    @property
    def limited(self) -> bool:
        """True when anything of what the tenant takes is counted against a limit."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_concurrent or self.budget.amount)

    def cost(self, model: str, prompt: int, cached: int, completion: int) -> int:
        """Of a request, in the unit of the budget: tokens, or micro-units of money."""
        if self.budget.unit == "tokens":
            return prompt + completion
        return price_of(self.prices, model).of(prompt, cached, completion)

    def allows(self, model: str) -> bool:
        """True when the tenant may use `model`."""
        return "*" in self.models or model in self.models

    def check_model(self, model: str) -> None:
        """Raise PermissionDenied when the tenant may not use `model`."""
        if not self.allows(model):
            raise PermissionDenied(f"no right to use model {model[:128]!r}", details={"field": "model"})

    def check_controls(self, control: pb.CacheControl) -> None:
        """Raise PermissionDenied for a cache control that the tenant may not use, InvalidArgument for a threshold below
        its own. Both name the field."""
        asked: dict[CacheRight, tuple[str, bool]] = {
            "no_cache": ("no_cache", control.no_cache),
            "only_if_cached": ("only_if_cached", control.only_if_cached),
            "max_age": ("max_age_s", control.HasField("max_age_s")),
            "tau": ("tau", control.HasField("tau")),
        }
        for right, (name, used) in asked.items():
            if used and right not in self.cache_controls:
                field = f"cache_control.{name}"
                raise PermissionDenied(f"{field}: this tenant has no right to it", details={"field": field})
        if control.HasField("tau") and self.tau is not None and control.tau < _float32(self.tau):
            field = "cache_control.tau"
            raise InvalidArgument(f"{field}: is below this tenant's {self.tau:g}", details={"field": field})


def _float32(value: float) -> float:
    """As it comes over the wire: what equals the tenant's own threshold there is not below it."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
