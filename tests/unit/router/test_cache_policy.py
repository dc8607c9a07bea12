"""What may be remembered of which request, by whose wish, and what a request may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.config import RouterSettings
from kvmesh.errors import InvalidArgument
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from router_helpers import chat, full_answer, route_request
from services.router.cache import policy
from services.router.cache.policy import CachePlan, CacheRules, Mode, check
from services.router.cache.reldates import relative_date
from services.router.cache.stored import refusal, worth_keeping

RULES = CacheRules(mode=Mode.SEMANTIC, embedder="minilm", tau=0.9)
OFF, EXACT, SEMANTIC = Mode.OFF, Mode.EXACT, Mode.SEMANTIC
WISH = {OFF: pb.CACHE_MODE_OFF, EXACT: pb.CACHE_MODE_EXACT, SEMANTIC: pb.CACHE_MODE_SEMANTIC}
GREEDY = {"temperature": 0.0}


def plan(request: router_pb2.RouteRequest, rules: CacheRules = RULES, tenant: str = "acme") -> CachePlan:
    return policy.plan(request, tenant, rules, 3)


@pytest.mark.parametrize("offered", list(Mode))
def test_a_mode_is_never_wider_than_offered(offered: Mode) -> None:
    rules = CacheRules(mode=offered, embedder="e")
    assert plan(route_request(), rules).mode == offered
    for wished, value in WISH.items():
        assert plan(route_request(cache=value), rules).mode == min(wished, offered)
    newer = route_request()
    newer.cache = 99  # type: ignore[assignment]
    assert plan(newer, rules).mode == OFF, "a mode of a newer gateway"


# sampling, mode that is wished, mode that comes of it
TABLE: list[tuple[dict[str, Any], Mode, Mode]] = [
    (GREEDY, EXACT, EXACT),
    (GREEDY, SEMANTIC, SEMANTIC),
    ({"temperature": 0.7, "seed": 1}, EXACT, EXACT),
    ({"temperature": 0.7, "seed": 0}, EXACT, EXACT),
    ({"temperature": 0.7}, EXACT, OFF),
    ({}, EXACT, OFF),
    ({"temperature": 0.7}, SEMANTIC, SEMANTIC),
    (GREEDY | {"n": 2}, SEMANTIC, EXACT),
    ({"temperature": 0.7, "n": 2, "seed": 1}, EXACT, EXACT),
    ({"temperature": 0.7, "n": 2}, SEMANTIC, EXACT),
    (GREEDY | {"n": 1, "best_of": 3}, SEMANTIC, EXACT),
    (GREEDY | {"n": 1, "best_of": 1}, SEMANTIC, SEMANTIC),
    (GREEDY | {"logprobs": 0}, SEMANTIC, OFF),
    (GREEDY | {"logprobs": 5}, EXACT, OFF),
    (GREEDY | {"prompt_logprobs": 0}, SEMANTIC, OFF),
]


@pytest.mark.parametrize(("sampling", "wished", "expected"), TABLE)
def test_sampling_decides(sampling: dict[str, Any], wished: Mode, expected: Mode) -> None:
    made = plan(route_request(sampling=pb.SamplingParams(**sampling), cache=WISH[wished]))
    assert made.mode == expected
    assert bool(made.reason) == (expected < SEMANTIC), "whoever gets less is told why"
    assert bool(made.key.partition) == (expected == SEMANTIC)
    assert (made.read, made.write) == (expected > OFF, expected > OFF)


# what ends up exact only, or not even that
MESSAGES: list[tuple[dict[str, Any], Mode]] = [
    ({"messages": [chat("user", "What is a page?")]}, SEMANTIC),
    ({"messages": [chat("user", "Hi"), chat("assistant", "Yes?"), chat("user", "What is a page?")]}, SEMANTIC),
    ({"messages": [chat("user", "Hi"), chat("tool", "42"), chat("user", "What is a page?")]}, EXACT),
    ({"messages": [chat("user", "What is a page?"), chat("assistant", "A")]}, EXACT),
    ({"messages": [chat("user", "What is a page?"), chat("system", "Go on.")]}, EXACT),
    ({"messages": [chat("user", "")]}, EXACT),
    ({"messages": [chat("user", "  \n ")]}, EXACT),
    ({"messages": [chat("user", "x" * 4097)]}, EXACT),
    ({"messages": [chat("user", "a\0b")]}, EXACT),
    ({"messages": [chat("user", "What happened today?")]}, EXACT),
    ({"messages": [chat("system", "Today is Monday."), chat("user", "What is a page?")]}, SEMANTIC),
    ({"messages": [], "prompt_text": "What is a page?"}, EXACT),
    ({"messages": [], "token_ids": [1, 2]}, EXACT),
    ({"exclude_workers": ["w"]}, OFF),
    ({"pinned_revision": "r1"}, OFF),
    ({"pinned_tokenizer": "t"}, OFF),
]


@pytest.mark.parametrize(("fields", "expected"), MESSAGES)
def test_the_conversation_decides(fields: dict[str, Any], expected: Mode) -> None:
    made = plan(route_request(**fields))
    assert (made.mode, bool(made.reason)) == (expected, expected < SEMANTIC)


def test_a_router_without_an_embedder_is_exact() -> None:
    assert plan(route_request(), CacheRules(mode=SEMANTIC)).mode == EXACT


@pytest.mark.parametrize(
    "text",
    [
        "What happened today?",
        "TODAY's menu",
        "Who is the current president?",
        "What is the latest version of Go?",
        "What is happening right now",
        "weather this week",
        "Who won  last\nnight?",
        "events next month",
        "Is it open tomorrow?",
        "Wie wird das Wetter heute?",
        "今天天气怎么样",
        "What time is it?",
        "Who is currently in charge?",
        "three days ago",
        "How many days until Christmas?",
        "What is the weather in Paris?",
        "ｔｏｄａｙ in history",
        "what happened in the last 24 hours",
    ],
)
def test_relative_dates(text: str) -> None:
    assert relative_date(text)


@pytest.mark.parametrize(
    "text",
    [
        "What is the capital of France?",
        "How do I know which one fits?",
        "What is electric current measured in?",
        "When did the war of 1812 end?",
        "How many days has a week?",
        "Explain snow.",
        "Who wrote The Day After Trinity?",
        "How old must I be to vote?",
        "What is the difference between weather and climate?",
    ],
)
def test_no_relative_dates(text: str) -> None:
    assert not relative_date(text)


# control, read, write, fly, only_cached, refresh
CONTROLS: list[tuple[dict[str, Any], tuple[bool, bool, bool, bool, bool]]] = [
    ({}, (True, True, True, False, False)),
    ({"no_cache": True}, (False, True, False, False, True)),
    ({"no_store": True}, (True, False, False, False, False)),
    ({"no_cache": True, "no_store": True}, (False, False, False, False, True)),
    ({"only_if_cached": True}, (True, False, False, True, False)),
    ({"max_age_s": 60}, (True, True, True, False, True)),
    ({"max_age_s": 0}, (True, True, True, False, True)),
]


@pytest.mark.parametrize(("fields", "expected"), CONTROLS)
def test_controls_narrow(fields: dict[str, Any], expected: tuple[bool, ...]) -> None:
    made = plan(route_request(cache_control=pb.CacheControl(**fields)))
    assert (made.read, made.write, made.fly, made.only_cached, made.refresh) == expected
    assert made.max_age_s == fields.get("max_age_s")
    off = plan(route_request(cache=pb.CACHE_MODE_OFF, cache_control=pb.CacheControl(**fields)))
    assert (off.read, off.write, off.fly, off.semantic) == (False, False, False, False)
    # Whoever allows nothing but the cache is not to be served otherwise, whatever else forbids the cache.
    assert off.only_cached == made.only_cached


def test_no_flight_flies_not() -> None:
    assert plan(route_request()).fly
    assert not plan(route_request(no_flight=True)).fly


def test_users_have_a_scope_of_their_own() -> None:
    assert plan(route_request()).scope == "tenant"
    one, two = plan(route_request(user="ann")), plan(route_request(user="bob"))
    assert one.scope == "user"
    assert len({one.key.exact, two.key.exact, plan(route_request()).key.exact}) == 3
    assert one.tenant_tag == two.tenant_tag, "what a user stores is its tenant's to pay for and to purge"


@pytest.mark.parametrize(
    ("own", "asked", "rules", "expected"),
    [
        (None, None, [], 0.9),
        (0.5, None, [], 0.5),
        (0.97, None, [], 0.97),
        (0.97, 0.99, [], 0.99),
        (0.97, 0.5, [], 0.97),
        (None, 0.5, [], 0.9),
        (None, None, ["acme/tiny=0.98"], 0.98),
        (0.5, None, ["acme/tiny=0.98"], 0.98),
        (0.99, None, ["acme/tiny=0.98"], 0.99),
        (None, None, ["other/tiny=0.98", "*/other=0.99", "*/tiny=0.7", "*/*=0.6"], 0.7),
    ],
)
def test_thresholds(own: float | None, asked: float | None, rules: list[str], expected: float) -> None:
    request = route_request(tau=own, cache_control=pb.CacheControl(tau=asked))
    table = RouterSettings(semantic_rules=rules).semantic_rule_table
    made = plan(request, CacheRules(mode=SEMANTIC, embedder="e", tau=0.9, semantic=table))
    assert made.tau == pytest.approx(expected)
    assert made.guards


def test_guards_are_the_routers_to_switch_off() -> None:
    table = RouterSettings(semantic_rules=["acme/tiny=0.98:no-guards"]).semantic_rule_table
    rules = CacheRules(mode=SEMANTIC, embedder="e", semantic=table)
    assert not plan(route_request(), rules).guards
    assert plan(route_request(model="auto"), rules).guards
    assert plan(route_request(), rules, tenant="other").guards


@pytest.mark.parametrize("rule", ["a=0.9", "a/b", "a/b=", "a/b=x", "a/b=nan", "a/b=1.1", "/b=1", "a/=1", "a/b=1:off"])
def test_a_rule_that_is_none_stops_the_start(rule: str) -> None:
    with pytest.raises(ValueError, match=r"tau|expected|float"):
        RouterSettings(semantic_rules=[rule])


@given(st.floats(), st.sampled_from(["tau", "cache_control"]))
def test_a_threshold_is_checked(tau: float, where: str) -> None:
    request = route_request(tau=tau) if where == "tau" else route_request(cache_control=pb.CacheControl(tau=tau))
    value = request.tau if where == "tau" else request.cache_control.tau
    if 0.0 <= value <= 1.0:
        check(request)
        return
    with pytest.raises(InvalidArgument, match="tau"):
        check(request)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("user", {"user": "u" * 129}),
        ("prompt_digest", {"prompt_digest": b"short"}),
        ("cache_control.only_if_cached", {"cache_control": pb.CacheControl(only_if_cached=True, no_cache=True)}),
    ],
)
def test_what_means_nothing_is_refused(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(route_request(**fields))
    assert refused.value.details["field"] == field


def test_a_megabyte_of_prompt_is_exact_only() -> None:
    made = plan(route_request("x" * (1 << 20), token_ids=[1]))
    assert (made.mode, made.key.partition, made.key.text) == (EXACT, b"", "")


def test_secrets(tmp_path: Path) -> None:
    """Tenants' tags differ from mesh to mesh, and are the same in all routers of one."""

    def tag(**fields: Any) -> str:
        return plan(route_request(), CacheRules.from_settings(RouterSettings(**fields))).tenant_tag

    token, other, secret, short = (tmp_path / name for name in ("token", "other", "secret", "short"))
    token.write_text("a-token-of-the-mesh-0123456789\n")
    other.write_text("another-token-of-a-mesh-0123456789\n")
    secret.write_text("a secret of the cache alone\n")
    short.write_text("short\n")
    tags = [tag(), tag(mesh_token_file=token), tag(mesh_token_file=other), tag(cache_secret_file=secret)]
    assert len(set(tags)) == 4
    assert tag(mesh_token_file=token) == tags[1]
    assert tag(mesh_token_file=token, cache_secret_file=secret) == tags[3]
    with pytest.raises(ValueError, match="16 bytes"):
        tag(cache_secret_file=short)
    with pytest.raises(OSError, match="nowhere"):
        tag(cache_secret_file=tmp_path / "nowhere")


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't assist with that.",
        "I must decline to answer.",
        "I don't feel comfortable discussing that.",
        "As a language model, I can't do that.",
        "I’m sorry, Dave. I’m afraid I can’t do that.",
        "I apologize, but I'm not able to help with this.",
        "My apologies, but I cannot assist.",
        "I won't be able to help with that request.",
        "**I'm sorry, but I can't help with that.**",
        "Sorry! I can't help with that.",
        "Lo siento, pero no puedo ayudarte con eso.",
        "Es tut mir leid, aber ich kann dabei nicht helfen.",
        "很抱歉，我无法回答这个问题。",
    ],
)
def test_refusals_are_not_kept(text: str) -> None:
    assert refusal(text)
    assert not worth_keeping(full_answer(text))


@pytest.mark.parametrize(
    "text",
    [
        "You can't do this in Python.",
        "I can help you with that.",
        "I am sorry for your loss.",
        "Unfortunately, the file cannot be opened: check its rights.",
        "I can't stress enough that this is safe.",
        "As a language model, BERT can't generate text.",
        "Can't is a contraction of cannot.",
    ],
)
def test_answers_that_only_sound_like_refusals_are_kept(text: str) -> None:
    assert not refusal(text)
    assert worth_keeping(full_answer(text))
