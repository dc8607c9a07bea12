"""What the caches compare: any change of any field but the last user text is another question, and no tenant's
question is another's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.proto.v1 import inference_pb2, router_pb2
from router_helpers import chat, full_answer, route_request
from services.router.cache import stored
from services.router.cache.fingerprint import NOT_COMPARED, CacheKey, cache_key, cacheable
from services.router.fleet import Family

FAMILY = Family("tiny", "r1", "tok")
Change = Callable[[router_pb2.RouteRequest], None]


def key(request: router_pb2.RouteRequest, tenant: str = "acme", family: Family = FAMILY) -> CacheKey:
    return cache_key(request, tenant, family)


def base() -> router_pb2.RouteRequest:
    """A request with every sampling field set, so that each can change and be absent."""
    return route_request(
        cache_salt="s",
        messages=[chat("system", "Be brief."), chat("user", "Hi"), chat("assistant", "Hello"), chat("user", "Who?")],
        sampling=inference_pb2.SamplingParams(
            temperature=0.5,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            frequency_penalty=0.2,
            presence_penalty=0.3,
            logit_bias={1: 0.5, 2: -1.0},
            seed=3,
            max_tokens=9,
            min_tokens=1,
            ignore_eos=False,
            stop_token_ids=[4],
            stop=["x"],
            n=1,
            best_of=2,
            logprobs=1,
            prompt_logprobs=1,
        ),
    )


def sampling_changes() -> list[tuple[str, Change]]:
    """For every field of SamplingParams: another value, and absence."""
    found: list[tuple[str, Change]] = []
    for field in inference_pb2.SamplingParams.DESCRIPTOR.fields:

        def absent(request: router_pb2.RouteRequest, name: str = field.name) -> None:
            request.sampling.ClearField(name)  # type: ignore[arg-type]

        def other(request: router_pb2.RouteRequest, field: FieldDescriptor = field) -> None:
            sampling, name = request.sampling, field.name
            if name == "logit_bias":
                sampling.logit_bias[1] = 0.75
            elif field.is_repeated:
                getattr(sampling, name).append(7 if name == "stop_token_ids" else "y")
            elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
                setattr(sampling, name, not getattr(sampling, name))
            else:
                setattr(sampling, name, getattr(sampling, name) + 1)

        found += [(f"sampling.{field.name} absent", absent), (f"sampling.{field.name} other", other)]
    return found


def request_changes() -> list[tuple[str, Change]]:
    def edit(path: str, act: Change) -> tuple[str, Change]:
        return path, act

    def set_content(index: int, value: str) -> Change:
        return lambda r: setattr(r.messages[index], "content", value)

    return [
        edit("cache_salt", lambda r: setattr(r, "cache_salt", "t")),
        edit("cache_salt absent", lambda r: r.ClearField("cache_salt")),
        edit("prompt_text", lambda r: setattr(r, "prompt_text", "raw")),
        edit("token_ids", lambda r: r.token_ids.append(1)),
        edit("token_ids one", lambda r: r.token_ids.__setitem__(0, 99_999)),
        edit("system prompt", set_content(0, "Be long.")),
        edit("history user", set_content(1, "Hey")),
        edit("history assistant", set_content(2, "Hi there")),
        edit("system prompt gone", lambda r: r.messages.__delitem__(0)),
        edit("history gone", lambda r: r.messages.__delitem__(slice(0, 3))),
        edit("message added", lambda r: r.messages.insert(0, chat("system", ""))),
        edit("role of history", lambda r: setattr(r.messages[1], "role", "tool")),
        edit("role of last", lambda r: setattr(r.messages[3], "role", "assistant")),
        edit("history swapped", lambda r: r.messages.__getitem__(1).CopyFrom(chat("user", "Hello"))),
    ]


CHANGES = sampling_changes() + request_changes()


def test_every_field_of_the_request_is_either_compared_or_listed() -> None:
    compared = {"token_ids", "sampling", "cache_salt", "messages", "prompt_text"}
    names = {field.name for field in router_pb2.RouteRequest.DESCRIPTOR.fields}
    assert names == compared | set(NOT_COMPARED), "a new field: decide whether it can change an answer, and test it"


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_any_change_is_another_question(name: str, change: Change) -> None:
    before, after = base(), base()
    change(after)
    assert after != before, "the change must change something"
    old, new = key(before), key(after)
    assert new.exact != old.exact
    # The near cache matches by partition, then by text; equal texts must have equal rendered tokens.
    assert new.partition != old.partition or (new.text == old.text and new.prompt != old.prompt)


def test_several_changes_at_once_never_cancel_out() -> None:
    seen: dict[bytes, str] = {}
    for i, (first, one) in enumerate(CHANGES):
        for second, two in CHANGES[i + 1 :: 7]:
            request = base()
            try:
                one(request)
                two(request)
            except IndexError:
                continue
            name = f"{first} + {second}"
            digest = key(request).exact
            if digest in seen:
                other = seen[digest]
                raise AssertionError(f"{name} looks like {other}")
            if request != base():
                seen[digest] = name
            if len(seen) > 400:
                return


@pytest.mark.parametrize("name", NOT_COMPARED)
def test_who_asks_and_by_when_is_not_the_question(name: str) -> None:
    request = base()
    if name == "exclude_workers":
        request.exclude_workers.append("w")
    elif name in ("request_id", "gateway_id", "model"):
        setattr(request, name, "other")
    elif name == "cache":
        request.cache = inference_pb2.CACHE_MODE_EXACT
    else:
        setattr(request, name, 1)
    assert request != base()
    assert key(request) == key(base())


def test_only_the_last_user_text_leaves_the_partition_alone() -> None:
    one, two = route_request("What is a page?"), route_request("What is a block?")
    assert key(one).partition == key(two).partition != b""
    assert key(one).exact != key(two).exact
    assert (key(one).text, key(two).text) == ("What is a page?", "What is a block?")
    assert key(one).prompt != key(two).prompt


def test_requests_without_a_last_user_text_have_no_partition() -> None:
    assert key(route_request(messages=[chat("user", "a"), chat("assistant", "b")])).partition == b""
    assert key(route_request(messages=[], token_ids=[1, 2])).partition == b"", "token ids alone"
    assert key(route_request("")).partition == b""
    assert key(route_request("x" * 5000)).partition == b""
    assert key(route_request(messages=[], prompt_text="Once upon a time")).partition != b""


def test_a_raw_prompt_is_no_chat() -> None:
    raw = route_request(messages=[], prompt_text="hello", token_ids=[5])
    talk = route_request(messages=[chat("user", "hello")], token_ids=[5])
    assert key(raw).partition != key(talk).partition
    assert key(raw).exact != key(talk).exact


words = st.text(max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    one=st.tuples(words, words, words, words, words),
    two=st.tuples(words, words, words, words, words),
)
def test_scope_never_leaks(one: tuple[str, ...], two: tuple[str, ...]) -> None:
    """Tenants, models, revisions, tokenizers, texts of any spelling: equal keys exactly when all are equal."""

    def of(tenant: str, model: str, revision: str, tokenizer: str, text: str) -> CacheKey:
        return cache_key(route_request("q" + text), tenant, Family(model, revision, tokenizer))

    a, b = of(*one), of(*two)
    assert (a.exact == b.exact) == (one == two)
    assert (a.partition == b.partition) == (one[:4] == two[:4])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "system", "a"]), words), min_size=1, max_size=4), st.integers(0, 3))
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


def test_log_probabilities_bypass_the_caches() -> None:
    assert cacheable(route_request())
    assert not cacheable(route_request(sampling=inference_pb2.SamplingParams(logprobs=0)))
    assert not cacheable(route_request(sampling=inference_pb2.SamplingParams(prompt_logprobs=0)))


def test_only_complete_answers_are_encoded() -> None:
    good = full_answer()
    kept = stored.encode(good, revision="r1", max_bytes=1000)
    assert kept is not None
    back = stored.decode(kept, kind="exact", score=1.0, revision="r1")
    assert back is not None
    assert (back.choices[0].text, back.kind, back.score, back.prompt_tokens) == ("Paris.", "exact", 1.0, 7)

    cut = full_answer()
    cut.choices[0].finish_reason = inference_pb2.FINISH_REASON_LENGTH
    unended = full_answer()
    unended.choices[0].finish_reason = inference_pb2.FINISH_REASON_UNSPECIFIED
    one_of_two = full_answer()
    one_of_two.choices.append(router_pb2.CachedChoice(finish_reason=inference_pb2.FINISH_REASON_LENGTH))
    empty = router_pb2.CachedAnswer(revision="r1")
    for bad in (cut, unended, one_of_two, empty, full_answer(revision="r2")):
        assert stored.encode(bad, revision="r1", max_bytes=1000) is None
        assert stored.decode(bad.SerializeToString(), kind="exact", score=1.0, revision="r1") is None
    assert stored.encode(good, revision="r1", max_bytes=10) is None
    for junk in (b"", b"\xff\xff\xff", b"not a message"):
        assert stored.decode(junk, kind="exact", score=1.0, revision="r1") is None
