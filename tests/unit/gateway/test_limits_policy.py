"""Limits in the key file: what they say, what is refused, and what tokens cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvmesh.rpc.budget import Budget, Price, price_of
from kvmesh.rpc.credentials import Credentials
from kvmesh.rpc.keyfile import hash_key
from kvmesh.rpc.policy import Policy

FILE = f"""
[[keys]]
sha256 = "{hash_key("key")}"
tenant = "acme"
[tenants.acme]
requests_per_minute = 600
tokens_per_minute = 200_000
max_concurrent = 16
budget = {{ amount = 50_000_000, period = "day", unit = "money" }}
[tenants.acme.prices."SmolLM2*"]
prompt = 150_000
cached = 75_000
completion = 600_000
[tenants.acme.prices."*"]
prompt = 1_000_000
"""


async def test_a_key_file_with_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    policy = (await Credentials(path).identify("Bearer key", None)).policy
    assert (policy.requests_per_minute, policy.tokens_per_minute, policy.max_concurrent) == (600, 200_000, 16)
    assert policy.budget == Budget(amount=50_000_000, period="day", unit="money")
    assert policy.prices["SmolLM2*"] == Price(prompt=150_000, cached=75_000, completion=600_000)
    assert policy.limited
    assert not Policy().limited
    assert not Policy(prices={"*": Price()}).limited


@pytest.mark.parametrize(
    "fields",
    [
        {"requests_per_minute": -1},
        {"requests_per_minute": 1.5},
        {"requests_per_minute": 10**10},
        {"tokens_per_minute": -5},
        {"tokens_per_minute": "many"},
        {"max_concurrent": -1},
        {"budget": 5},
        {"budget": {"amount": -1}},
        {"budget": {"amount": 1 << 60}},
        {"budget": {"amount": float("nan")}},
        {"budget": {"amount": 1, "period": "week"}},
        {"budget": {"amount": 1, "unit": "euro"}},
        {"budget": {"amount": 1, "limit": 2}},
        {"budget": {"amount": 1, "unit": "money"}},
        {"prices": {"m": {"prompt": -1}}},
        {"prices": {"m": {"output": 1}}},
        {"prices": {"": {"prompt": 1}}},
        {"prices": {"m": {"completion": 10**13}}},
        {"request_per_minute": 1},
    ],
)
def test_what_is_no_limit_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Policy.model_validate(fields)


def test_the_most_exact_price_counts() -> None:
    prices = {name: Price(prompt=number) for number, name in enumerate(("*", "a*", "a-b*", "a-b"))}
    assert [price_of(prices, model).prompt for model in ("x", "a", "a-bc", "a-b")] == [0, 1, 2, 3]
    dearest = price_of({"a": Price(prompt=5), "b": Price(prompt=1, cached=0, completion=9)}, "c")
    assert dearest == Price(prompt=5, completion=9)


def test_costs_are_rounded_up_once_a_request() -> None:
    price = Price(prompt=150_000, cached=75_000, completion=600_000)
    assert price.of(0, 0, 0) == 0
    assert price.of(1, 0, 0) == 1
    assert price.of(10, 4, 8) == 6
    assert price.of(10, 4, 9) == 7
    assert price.of(4, 9, 0) == price.of(4, 4, 0)
    assert Price(prompt=1_000_000).of(7, 7, 3) == 7


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**12))
def test_costs_never_fall_with_output(prompt: int, cached: int, completion: int, price: int) -> None:
    of = Price(prompt=price, cached=price // 2, completion=price).of
    assert of(prompt, cached, completion) <= of(prompt, cached, completion + 1)
    assert of(prompt, cached, completion) <= of(prompt, 0, completion)


def test_periods_are_of_utc() -> None:
    at = 1_764_547_199.0
    names = [Budget(period=period, unit="money").name(at + 1) for period in ("day", "month", "none")]
    assert names == ["money:2025-12-01", "money:2025-12", "money:all"]
    assert Budget(period="day").name(at) == "tokens:2025-11-30"
