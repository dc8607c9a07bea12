"""What the caches compare: any change of any field but the last user text is another question, and no tenant's
question is another's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_requests import Change, base, every_change
from kvmesh.proto.v1 import inference_pb2, router_pb2
from router_helpers import chat, route_request
from services.router.cache.fingerprint import (
    COMPARED_ELSEWHERE,
    NOT_COMPARED,
    CacheKey,
    cache_key,
    family_tag,
    model_tag,
    tenant_tag,
)
from services.router.cache.policy import CacheRules, Mode, plan

RULES = CacheRules(mode=Mode.SEMANTIC, embedder="minilm")
EXAMPLES = 150


def key(request: router_pb2.RouteRequest, tenant: str = "acme", rules: CacheRules = RULES, epoch: int = 7) -> CacheKey:
    return plan(request, tenant, rules, epoch).key


CHANGES = every_change()
LAST_TEXT = "messages[3].content"


def neutral(name: str) -> bool:
    return name.split(".")[0].split(" ")[0].split("[")[0] in NOT_COMPARED


def test_the_walk_reaches_every_field() -> None:
    """A field that is added to the protos is walked, and compared, without anybody's doing."""
    named = {name.split(" ")[0] for name, _ in CHANGES}
    for descriptor, prefix in (
        (router_pb2.RouteRequest.DESCRIPTOR, ""),
        (inference_pb2.SamplingParams.DESCRIPTOR, "sampling."),
        (inference_pb2.ChatMessage.DESCRIPTOR, "messages[0]."),
        (inference_pb2.CacheControl.DESCRIPTOR, "cache_control."),
    ):
        assert {f"{prefix}{field.name}" for field in descriptor.fields} <= named
    fields = {field.name for field in router_pb2.RouteRequest.DESCRIPTOR.fields}
    assert set(NOT_COMPARED) | set(COMPARED_ELSEWHERE) <= fields


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_one_change_is_another_question_unless_it_is_listed(name: str, change: Change) -> None:
    changed = base()
    change(changed)
    assert changed != base(), "the change must change something"
    old, new = (cache_key(request, ["acme", request.user]) for request in (base(), changed))
    if neutral(name) or name.startswith("token_ids"):
        # Tokens are compared by their digest; sent besides, as an old gateway does, they say nothing new.
        assert new == old
        return
    assert new.exact != old.exact
    if name.startswith(LAST_TEXT) and name.endswith("other"):
        assert (new.partition, new.tag) == (old.partition, old.tag)
    elif name.startswith(("prompt_digest", "prompt_tokens")):
        # They follow from the last text. Of equal texts the semantic cache compares this too.
        assert new.partition == old.partition
        assert new.prompt != old.prompt
    else:
        assert new.partition != old.partition


@settings(max_examples=EXAMPLES)
@given(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=4, unique_by=lambda each: each[0]), st.randoms())
def test_changes_never_cancel_out(picked: list[tuple[str, Change]], rng: random.Random) -> None:
    """Requests that differ at all in what is compared never share a key, whatever else is changed besides."""
    one, two = base(), base()
    for _, change in picked:
        for request in (one, two) if rng.random() < 0.5 else (two,):
            try:
                change(request)
            except IndexError:
                # A message that an earlier change took away.
                continue
    for request in (one, two):
        for name in (*NOT_COMPARED, "token_ids"):
            request.ClearField(name)  # type: ignore[arg-type]
    a, b = (cache_key(request, ["acme", request.user]) for request in (one, two))
    assert (a.exact == b.exact) == (one == two)


def test_tokens_stand_in_for_the_digest_of_an_old_gateway() -> None:
    one, two = base(), base()
    for request in (one, two):
        request.ClearField("prompt_digest")
    assert key(one) == key(two)
    two.token_ids.append(1)
    assert key(one).exact != key(two).exact
    assert key(one).prompt != key(two).prompt


def test_an_aliass_chat_is_its_messages() -> None:
    """Several models' templates and tokenizers may make tokens of it: which one was tried first is no difference."""
    rules = CacheRules(mode=Mode.SEMANTIC, embedder="minilm", aliases={"auto": "small|large"})
    one = route_request(model="auto", prompt_digest=b"1" * 16, prompt_tokens=7, tokenizer_fingerprint="a")
    two = route_request(model="auto", prompt_digest=b"2" * 16, prompt_tokens=8, tokenizer_fingerprint="b")
    assert key(one, rules=rules) == key(two, rules=rules)
    two.messages[0].content += "x"
    assert key(one, rules=rules).partition != key(two, rules=rules).partition
    # Where the text is not all there is, or the name stands for one model, tokens count.
    assert key(one).exact != key(two).exact
    raw = [route_request(model="auto", messages=[], prompt_digest=digest * 16) for digest in (b"1", b"2")]
    assert key(raw[0], rules=rules).exact != key(raw[1], rules=rules).exact


def test_order_in_a_map_is_no_difference() -> None:
    pairs = [(token, float(token)) for token in range(40)]
    one = route_request(sampling=inference_pb2.SamplingParams(temperature=0.0, logit_bias=dict(pairs)))
    two = route_request(sampling=inference_pb2.SamplingParams(temperature=0.0, logit_bias=dict(reversed(pairs))))
    assert key(one) == key(two)
    over_the_wire = router_pb2.RouteRequest.FromString(one.SerializeToString())
    assert key(over_the_wire) == key(two)


def test_a_field_of_a_newer_gateway_is_compared() -> None:
    """Unknown here, it may change the answer: field 999, a string."""
    newer = router_pb2.RouteRequest.FromString(base().SerializeToString() + b"\xba\x3e\x01z")
    assert key(newer).exact != key(base()).exact
    assert key(newer).partition != key(base()).partition


def test_two_long_texts_that_differ_in_the_last_word() -> None:
    """300 tokens: beyond any embedder's window, where a truncating one would see no difference."""
    words = " ".join(f"word{i}" for i in range(299))
    one, two = key(route_request(f"{words} yes")), key(route_request(f"{words} no"))
    assert one.exact != two.exact
    assert one.text != two.text
    # And where the text is too long for the semantic cache it does not take part at all.
    long = plan(route_request("x" * 5000), "acme", RULES, 7)
    assert (long.mode, long.key.partition) == (Mode.EXACT, b"")


@settings(max_examples=EXAMPLES)
@given(
    one=st.tuples(*[st.text(max_size=6)] * 4, st.integers(0, 3)),
    two=st.tuples(*[st.text(max_size=6)] * 4, st.integers(0, 3)),
)
def test_scope_never_leaks(one: tuple[str, str, str, str, int], two: tuple[str, str, str, str, int]) -> None:
    """Tenants, users, models, versions of any spelling: equal keys exactly when all are equal."""

    def of(tenant: str, user: str, model: str, policy: str, epoch: int) -> CacheKey:
        rules = CacheRules(mode=Mode.SEMANTIC, embedder="e", route_policy=policy)
        return key(route_request("question", user=user, model=model), tenant, rules, epoch)

    a, b = of(*one), of(*two)
    assert (a.exact == b.exact) == (one == two)
    assert (a.partition == b.partition) == (one == two)
    assert (a.tag == b.tag) == (one == two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("ab", "c"), ("a", "bc")),
        (("ab", ""), ("a", "b")),
        (("a\0b", ""), ("a", "b")),
        (("a", "\x01"), ("a\x01", "")),
        (("tenant", "user"), ("tenantuser", "")),
        (("tenant\x04\0\0\0\0\0\0\0", "user"), ("tenant", "\x04\0\0\0\0\0\0\0user")),
    ],
)
def test_names_built_to_collide(one: tuple[str, str], two: tuple[str, str]) -> None:
    a, b = (key(route_request("q", user=user), tenant) for tenant, user in (one, two))
    assert a.exact != b.exact
    assert a.partition != b.partition
    secret = b"s" * 16
    assert tenant_tag(secret, *one) != tenant_tag(secret, *two)


def test_a_tag_needs_the_secret() -> None:
    assert tenant_tag(b"one secret of 16", "acme") != tenant_tag(b"another of 16 by", "acme")
    assert len(tenant_tag(b"s", "acme")) == len(model_tag("m")) == 32
    assert family_tag("m", "r1") != family_tag("m", "r2") != family_tag("mr", "2")


def test_what_stands_behind_a_name_is_part_of_the_key() -> None:
    def of(**fields: object) -> bytes:
        rules = CacheRules(mode=Mode.SEMANTIC, embedder="minilm", **fields)  # type: ignore[arg-type]
        return key(route_request(model="auto"), rules=rules).exact

    plain = of(aliases={"auto": ""})
    assert of(aliases={"auto": "big"}) != plain, "an alias that stands for another model now"
    assert of(aliases={"auto": ""}, route_policy="2") != plain
    assert of(aliases={"auto": "", "other": "big"}) == plain, "another alias is not this one's business"
    other = CacheRules(mode=Mode.SEMANTIC, embedder="other")
    assert key(base(), rules=other).partition != key(base()).partition, "vectors of another embedder"


def test_only_the_last_user_text_leaves_the_partition_alone() -> None:
    one, two = key(route_request("What is a page?")), key(route_request("What is a block?"))
    assert one.partition == two.partition != b""
    assert one.tag == two.tag == one.partition[:16].hex()
    assert one.exact != two.exact
    assert (one.text, two.text) == ("What is a page?", "What is a block?")


def test_the_mode_does_not_move_an_answer() -> None:
    """An answer stored by a request of one mode is found by a request of the other."""
    exact = key(route_request(cache=inference_pb2.CACHE_MODE_EXACT))
    semantic = key(route_request(cache=inference_pb2.CACHE_MODE_SEMANTIC))
    assert (exact.exact, exact.tag) == (semantic.exact, semantic.tag)
    assert exact.partition == b"" != semantic.partition


@settings(max_examples=EXAMPLES)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "system", "a"]), st.text(max_size=12)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_message_boundaries_count(parts: list[tuple[str, str]], at: int) -> None:
    """Moving text across a message boundary, with the same rendered tokens, is another question."""
    messages = [chat(role, text) for role, text in parts] + [chat("user", "last?")]
    moved = [chat(m.role, m.content) for m in messages]
    index = at % len(parts)
    if not parts[index][1]:
        return
    moved[index].content = parts[index][1][:-1]
    moved[index + 1].content = parts[index][1][-1] + moved[index + 1].content
    a = key(route_request(messages=messages, token_ids=[1]))
    b = key(route_request(messages=moved, token_ids=[1]))
    assert a.exact != b.exact
    assert a.partition != b.partition
