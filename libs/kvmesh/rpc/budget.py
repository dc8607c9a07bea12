"""What a tenant may spend, and what tokens cost it. All money is whole micro-units (a millionth of the currency), so
that sums are exact in every place that adds them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MILLION = 1_000_000
MAX_AMOUNT = 1 << 50
"""Redis' scripts count in doubles, which are exact up to 2^53."""

MAX_PRICE = 10**12
"""Micro-units per million tokens. The longest request at this price stays below what a double holds exactly."""


class Price(BaseModel):
    """Micro-units per million tokens. `cached`: prompt tokens that a prefix cache had; None = as the others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: int = Field(default=0, ge=0, le=MAX_PRICE)
    cached: int | None = Field(default=None, ge=0, le=MAX_PRICE)
    completion: int = Field(default=0, ge=0, le=MAX_PRICE)

    def of(self, prompt: int, cached: int, completion: int) -> int:
        """Micro-units of one request, rounded up once. `cached` is part of `prompt`."""
        cached = min(cached, prompt)
        cheap = self.prompt if self.cached is None else self.cached
        return -(-((prompt - cached) * self.prompt + cached * cheap + completion * self.completion) // MILLION)


class Budget(BaseModel):
    """`amount` per period, in tokens (prompt + completion) or in micro-units of money. 0 = no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    amount: int = Field(default=0, ge=0, le=MAX_AMOUNT)
    period: Literal["day", "month", "none"] = "month"
    unit: Literal["tokens", "money"] = "tokens"

    def name(self, at_s: float) -> str:
        """Of the period that holds a moment (seconds since 1970; UTC): what spend is added up under."""
        day = dt.datetime.fromtimestamp(at_s, dt.UTC).date().isoformat()
        return f"{self.unit}:{day if self.period == 'day' else day[:7] if self.period == 'month' else 'all'}"


def price_of(prices: Mapping[str, Price], model: str) -> Price:
    """The price of the most exact pattern that fits; of a model that none fits, the dearest of all."""
    fitting = [pattern for pattern in prices if fnmatchcase(model, pattern)]
    if fitting:
        return prices[max(fitting, key=lambda pattern: (pattern == model, len(pattern.replace("*", ""))))]
    return Price(
        prompt=max((price.prompt for price in prices.values()), default=0),
        completion=max((price.completion for price in prices.values()), default=0),
    )
