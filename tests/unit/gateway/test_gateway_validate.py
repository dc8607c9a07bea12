from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import InvalidArgument, TooLarge
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import Policy
from services.gateway import validate
from services.gateway.prepare import cache_mode
from services.gateway.validate import Bounds, check_common, check_messages, check_token_ids, effective_sampling

BOUNDS = Bounds(vocab_size=1000, max_model_len=100, max_prompt_bytes=1000)
NAN, INF = math.nan, math.inf

BAD: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, 100.1, NAN, INF, -INF)),
    ("top_k", 1001),
    *(("top_p", value) for value in (0.0, -0.1, 1.1, NAN, INF)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, 10.1, NAN)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, NAN)),
    ("logit_bias", {1000: 1.0}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: NAN}),
    ("logit_bias", {1: -INF}),
    ("max_tokens", 0),
    ("stop_token_ids", [1000]),
    ("stop_token_ids", list(range(65))),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", ["é" * 129]),
    ("n", 0),
    ("n", 17),
    ("best_of", 0),
    ("best_of", 17),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("min_tokens", 91),
    ("grammar", pb.Grammar()),
    ("grammar", pb.Grammar(json_object=False)),
    ("grammar", pb.Grammar(regex="x" * (64 << 10))),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        effective_sampling(pb.SamplingParams(**{field: value}), 10, BOUNDS)
    assert raised.value.details["field"] == field
    assert field in raised.value.message


def test_every_field_has_a_bad_value_but_those_that_have_none() -> None:
    always_good = {"seed", "ignore_eos"}
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == {field for field, _ in BAD} | always_good


GOOD: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (0.0, 100.0)),
    *(("top_k", value) for value in (0, 1, 1000)),
    *(("top_p", value) for value in (1e-6, 1.0)),
    *(("min_p", value) for value in (0.0, 1.0)),
    *(("repetition_penalty", value) for value in (1e-6, 10.0)),
    *(("frequency_penalty", value) for value in (-2.0, 2.0)),
    *(("presence_penalty", value) for value in (-2.0, 2.0)),
    ("logit_bias", {0: -100.0, 999: 100.0}),
    *(("seed", value) for value in (0, 2**64 - 1)),
    *(("max_tokens", value) for value in (1, 90)),
    ("min_tokens", 90),
    ("grammar", pb.Grammar(regex="a+")),
    ("ignore_eos", True),
    ("stop_token_ids", [0, 999]),
    ("stop", ["é" * 128]),
    *(("n", value) for value in (1, 16)),
    *(("logprobs", value) for value in (0, 20)),
    *(("prompt_logprobs", value) for value in (0, 20)),
]


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_a_good_value_is_kept(field: str, value: Any) -> None:
    given_ = pb.SamplingParams(**{field: value})
    assert getattr(effective_sampling(given_, 10, BOUNDS), field) == getattr(given_, field)


def test_defaults_are_filled() -> None:
    out = effective_sampling(pb.SamplingParams(), 10, BOUNDS)
    absent = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence} - {
        field.name for field, _ in out.ListFields()
    }
    # Everything that has a default is there, so that a worker never has to know one.
    assert absent == {"grammar", "logprobs", "prompt_logprobs"}
    assert (out.temperature, out.top_p, out.repetition_penalty) == (1.0, 1.0, 1.0)
    assert (out.n, out.best_of, out.max_tokens) == (1, 1, 90)


def test_drawn_seeds_differ() -> None:
    seeds = {effective_sampling(pb.SamplingParams(), 10, BOUNDS).seed for _ in range(20)}
    assert len(seeds) == 20


def test_best_of_follows_n() -> None:
    assert effective_sampling(pb.SamplingParams(n=3), 10, BOUNDS).best_of == 3
    assert effective_sampling(pb.SamplingParams(n=2, best_of=5), 10, BOUNDS).best_of == 5
    with pytest.raises(InvalidArgument, match="best_of"):
        effective_sampling(pb.SamplingParams(n=3, best_of=2), 10, BOUNDS)


@given(st.integers(1, 99), st.none() | st.integers(1, 2**32 - 1), st.none() | st.integers(1, 200))
def test_max_tokens_fits_the_context_and_the_tenant(prompt: int, wanted: int | None, limit: int | None) -> None:
    bounds = Bounds(vocab_size=10, max_model_len=100, max_prompt_bytes=1, max_tokens=limit)
    given_ = pb.SamplingParams(max_tokens=wanted)
    if wanted is not None and limit is not None and wanted > limit:
        with pytest.raises(InvalidArgument, match="max_tokens"):
            effective_sampling(given_, prompt, bounds)
        return
    out = effective_sampling(given_, prompt, bounds).max_tokens
    assert 1 <= out <= 100 - prompt
    assert out == min(x for x in (100 - prompt, wanted, limit) if x is not None)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([], "empty"),
        ([1] * 100, "100 tokens; at most 99"),
        ([1000], "outside the vocabulary"),
        ([2**32 - 1], "outside"),
    ],
)
def test_bad_prompts(ids: list[int], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as raised:
        check_token_ids(ids, BOUNDS)
    assert raised.value.details["field"] == "prompt"


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    check_token_ids([1] * 99, BOUNDS)
    assert effective_sampling(pb.SamplingParams(), 99, BOUNDS).max_tokens == 1
    with pytest.raises(InvalidArgument, match="at most 5"):
        check_token_ids([1] * 6, Bounds(vocab_size=10, max_model_len=100, max_prompt_bytes=1, max_prompt_tokens=5))


def chat(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(**({"model": "m", "messages": [pb.ChatMessage(role="user", content="x")]} | fields))


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("model", {"model": ""}),
        ("model", {"model": "m" * 257}),
        ("request_id", {"request_id": "a b"}),
        ("request_id", {"request_id": "é"}),
        ("request_id", {"request_id": "x" * 129}),
        ("request_id", {"request_id": "a\nb"}),
        ("cache_salt", {"cache_salt": "é" * 65}),
        ("cache", {"cache": 17}),
        ("limits.ttft_ms", {"limits": pb.Limits(ttft_ms=0)}),
        ("limits.ttft_ms", {"limits": pb.Limits(ttft_ms=3_600_001)}),
        ("limits.total_ms", {"limits": pb.Limits(total_ms=0)}),
        ("limits.total_ms", {"limits": pb.Limits(total_ms=86_400_001)}),
    ],
)
def test_bad_common_fields(field: str, fields: dict[str, Any]) -> None:
    check_common(chat())
    with pytest.raises(InvalidArgument) as raised:
        check_common(chat(**fields))
    assert raised.value.details["field"] == field


def test_bad_messages() -> None:
    def messages(*pairs: tuple[str, str]) -> list[pb.ChatMessage]:
        return [pb.ChatMessage(role=role, content=content) for role, content in pairs]

    check_messages(messages(("user", "x" * 10)), 10)
    for bad in ([], messages(("", "x")), messages(("r" * 65, "x")), messages(*[("user", "x")] * 1025)):
        with pytest.raises(InvalidArgument):
            check_messages(bad, 10_000)
    with pytest.raises(TooLarge):
        check_messages(messages(("user", "é" * 5), ("user", "x")), 10)
    with pytest.raises(TooLarge):
        validate.check_prompt_text("é" * 6, 11)
    with pytest.raises(InvalidArgument, match="empty"):
        validate.check_prompt_text("", 10)


@pytest.mark.parametrize("policy", ["off", "exact", "semantic"])
@pytest.mark.parametrize("wanted", pb.CacheMode.values())
def test_a_request_never_widens_its_policy(policy: Any, wanted: Any) -> None:
    strength = [pb.CACHE_MODE_OFF, pb.CACHE_MODE_EXACT, pb.CACHE_MODE_SEMANTIC]
    allowed = strength[["off", "exact", "semantic"].index(policy)]
    mode = cache_mode(wanted, Policy(cache=policy))
    assert strength.index(mode) <= strength.index(allowed)
    assert mode == allowed if wanted == pb.CACHE_MODE_UNSPECIFIED else strength.index(mode) <= strength.index(wanted)


@pytest.mark.parametrize("wanted", pb.CacheMode.values())
def test_a_scope_of_users_needs_a_user(wanted: Any) -> None:
    policy = Policy(cache_scope="user")
    assert cache_mode(wanted, policy) == pb.CACHE_MODE_OFF
    assert cache_mode(wanted, policy, user="u") == cache_mode(wanted, Policy())


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("user", {"user": "u" * 129}),
        ("user", {"user": "é" * 65}),
        ("session_id", {"session_id": "s" * 129}),
        ("cache_control.tau", {"cache_control": pb.CacheControl(tau=float("nan"))}),
        ("cache_control.tau", {"cache_control": pb.CacheControl(tau=float("inf"))}),
        ("cache_control.tau", {"cache_control": pb.CacheControl(tau=-0.1)}),
        ("cache_control.tau", {"cache_control": pb.CacheControl(tau=1.1)}),
        ("cache_control.only_if_cached", {"cache_control": pb.CacheControl(only_if_cached=True, no_cache=True)}),
    ],
)
@pytest.mark.parametrize("kind", [pb.GenerateRequest, pb.ChatRequest])
def test_what_a_request_says_of_the_cache_must_make_sense(kind: Any, field: str, fields: dict[str, Any]) -> None:
    validate.check_common(kind(model="m", user="é" * 64, cache_control=pb.CacheControl(tau=1.0, no_store=True)))
    with pytest.raises(InvalidArgument) as refused:
        validate.check_common(kind(model="m", **fields))
    assert refused.value.details["field"] == field
