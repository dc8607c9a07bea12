"""Placement: one family, fitting layouts, least load, held prefixes, and no candidate lost to another's heat."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import FailedPrecondition, NotFound, Unavailable
from kvmesh.kv.hashing import block_hashes, request_seed
from kvmesh.proto.v1 import engine_pb2, router_pb2
from router_helpers import FakeClock, worker_info
from services.router.affinity import matched_tokens
from services.router.fleet import Family, Fleet, Session
from services.router.placement import (
    Candidate,
    can_send,
    candidate,
    charges,
    place,
    rank,
    resolve_model,
)


def some(worker_id: str, role: str = "decode", load: int = 0, matched: int = 0, **fields: object) -> Candidate:
    return Candidate(worker_info(worker_id, role, **fields), load, matched=matched)


def ranked(pool: list[Candidate], seed: int = 0, **options: object) -> list[str]:
    values = {"model": "tiny", "prompt_tokens": 100, "alternates": 8} | options
    return [pair.decode.worker_id for pair in place(pool, rng=random.Random(seed), **values)]  # type: ignore[arg-type]


def test_least_load_first() -> None:
    assert ranked([some("a", load=300), some("b", load=10), some("c", load=100)]) == ["b", "c", "a"]


def test_prefill_workers_are_ranked_and_fit() -> None:
    pool = [
        some("d"),
        some("p-busy", "prefill", load=900),
        some("p-idle", "prefill"),
        some("p-other-layout", "prefill", layout_fingerprint=b"layout-2"),
        some("p-other-page", "prefill", page_size=8),
        some("p-other-revision", "prefill", revision="r2"),
        some("p-other-tokenizer", "prefill", tokenizer_fingerprint="tok2"),
        some("p-alone", "prefill", kvtransfer_address=""),
        some("u", "unified", load=500),
    ]
    pairs = place(pool, model="tiny", prompt_tokens=100, alternates=3, rng=random.Random(1))
    by_id = {pair.decode.worker_id: [c.worker_id for c in pair.prefill] for pair in pairs}
    assert by_id == {"d": ["p-idle", "u", "p-busy"], "u": []}, "a unified worker prefills for itself"


def test_pages_of_another_size_only_after_equal_ones() -> None:
    pool = [
        some("d", kv_fingerprint=b"kv-1"),
        some("p-small", "prefill", page_size=8, layout_fingerprint=b"layout-8", kv_fingerprint=b"kv-1"),
        some("p-busy", "prefill", load=900, kv_fingerprint=b"kv-1"),
        some("p-other", "prefill", kv_fingerprint=b"kv-2"),
    ]
    (pair,) = place(pool, model="tiny", prompt_tokens=100, alternates=3, rng=random.Random(1))
    assert [c.worker_id for c in pair.prefill] == ["p-busy", "p-small"]


def test_a_decode_worker_without_sidecar_prefills_itself() -> None:
    pairs = place(
        [some("d", kvtransfer_address=""), some("p", "prefill")],
        model="tiny",
        prompt_tokens=5,
        alternates=0,
        rng=random.Random(0),
    )
    assert pairs[0].prefill == ()


def test_held_prefix_beats_a_little_load_and_loses_to_much() -> None:
    assert ranked([some("holds", load=60, matched=96), some("idle")])[0] == "holds"
    assert ranked([some("holds", load=5000, matched=96), some("idle")])[0] == "idle"


def test_a_hot_worker_does_not_turn_affinity_off_for_the_others() -> None:
    others = [some("holds", load=50, matched=96), some("empty", load=40)]
    assert ranked(others)[0] == "holds"
    assert ranked([*others, some("hot", load=10**7)])[0] == "holds"


def test_on_a_busy_fleet_small_differences_do_not_outweigh_a_prefix() -> None:
    assert ranked([some("holds", load=100_500, matched=96), some("empty", load=100_000)])[0] == "holds"
    # The same difference between idle workers is five prompts' worth of waiting.
    assert ranked([some("holds", load=500, matched=96), some("empty", load=0)])[0] == "empty"


def test_ties_are_broken_at_random_but_repeatably() -> None:
    pool = [some(name) for name in "abcd"]
    firsts = [ranked(pool, seed)[0] for seed in range(200)]
    assert set(firsts) == set("abcd")
    assert firsts == [ranked(pool, seed)[0] for seed in range(200)]
    # No name is favoured: each is first in 50 of 200 on average.
    assert min(firsts.count(name) for name in "abcd") > 25


def test_none_left_is_unavailable() -> None:
    for pool in ([], [some("p", "prefill")], [some("d", model="other")]):
        with pytest.raises(Unavailable):
            ranked(pool)
    with pytest.raises(Unavailable):
        ranked([some("d")], exclude={"d"})


def test_excluded_workers_are_named_nowhere() -> None:
    pool = [some("d1"), some("d2"), some("p1", "prefill"), some("p2", "prefill")]
    pairs = place(pool, model="tiny", prompt_tokens=9, alternates=5, rng=random.Random(0), exclude={"d1", "p2"})
    assert [(p.decode.worker_id, [c.worker_id for c in p.prefill]) for p in pairs] == [("d2", ["p1"])]


def test_prompt_logprobs_need_role_unified() -> None:
    pool = [some("d"), some("u", "unified", load=10**6)]
    assert ranked(pool, unified_only=True) == ["u"]
    with pytest.raises(FailedPrecondition):
        ranked(pool[:1], unified_only=True)


def test_a_short_context_is_avoided_but_not_fatal() -> None:
    assert ranked([some("short", max_model_len=100), some("long", load=10**6)]) == ["long"]
    assert ranked([some("short", max_model_len=100)]) == ["short"], "the worker says itself what is wrong"


def test_aliases_never_replace_a_named_model() -> None:
    tiny, big = Family("tiny", "r1", "t"), Family("big", "r1", "t")
    aliases = {"auto": "", "default": "big", "tiny": "big"}
    assert resolve_model("tiny", aliases, [tiny, big], [tiny, big]) == "tiny"
    assert resolve_model("default", aliases, [tiny, big], []) == "big"
    assert resolve_model("auto", aliases, [tiny, big], [tiny, tiny, big]) == "tiny"
    assert resolve_model("auto", aliases, [tiny, big], [tiny, big]) == "big", "a tie is stable: first by name"
    assert resolve_model("auto", aliases, [tiny], []) == "tiny", "known but down"
    for name in ("nope", "Tiny", ""):
        with pytest.raises(NotFound):
            resolve_model(name, aliases, [tiny, big], [tiny])
    with pytest.raises(NotFound):
        resolve_model("default", aliases, [tiny], [tiny])
    with pytest.raises(NotFound):
        resolve_model("auto", aliases, [], [])


infos = st.builds(
    lambda i, role, model, revision, tok, layout, page, load, matched, sidecar: Candidate(
        worker_info(
            f"w{i}",
            role,
            model=model,
            revision=revision,
            tokenizer_fingerprint=tok,
            layout_fingerprint=layout,
            page_size=page,
            kvtransfer_address=sidecar,
        ),
        load,
        matched=matched,
    ),
    st.integers(0, 10**6),
    st.sampled_from(["prefill", "decode", "unified"]),
    st.sampled_from(["tiny", "big"]),
    st.sampled_from(["r1", "r2"]),
    st.sampled_from(["t1", "t2"]),
    st.sampled_from([b"l1", b"l2"]),
    st.sampled_from([4, 16]),
    st.integers(0, 10**6),
    st.integers(0, 200),
    st.sampled_from(["", "h:1"]),
)


@settings(max_examples=150, deadline=None)
@given(
    pool=st.lists(infos, max_size=12, unique_by=lambda c: c.worker_id),
    alternates=st.integers(0, 4),
    prompt=st.integers(1, 200),
    seed=st.integers(0, 99),
)
def test_every_pair_keeps_the_rules(pool: list[Candidate], alternates: int, prompt: int, seed: int) -> None:
    try:
        pairs = place(pool, model="tiny", prompt_tokens=prompt, alternates=alternates, rng=random.Random(seed))
    except Unavailable:
        assert not [c for c in pool if c.info.model == "tiny" and c.info.role != engine_pb2.WORKER_ROLE_PREFILL]
        return
    assert 1 <= len(pairs) <= alternates + 1
    families = {pair.decode.family for pair in pairs} | {c.family for pair in pairs for c in pair.prefill}
    assert len(families) == 1
    assert next(iter(families)).model == "tiny"
    assert len({pair.decode.worker_id for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert pair.decode.info.role != engine_pb2.WORKER_ROLE_PREFILL
        assert len(pair.prefill) <= alternates + 1
        for target in pair.prefill:
            assert target.info.role != engine_pb2.WORKER_ROLE_DECODE
            assert target.info.layout_fingerprint == pair.decode.info.layout_fingerprint
            assert target.info.page_size == pair.decode.info.page_size
            assert can_send(target.info, pair.decode.info)
    cost = charges(pairs[0], prompt)
    assert pairs[0].decode.worker_id in cost
    assert all(1 <= tokens <= prompt for tokens in cost.values())


@settings(max_examples=100, deadline=None)
@given(loads=st.lists(st.integers(0, 10**6), min_size=2, max_size=10), prompt=st.integers(1, 5000))
def test_without_prefixes_the_least_loaded_wins(loads: list[int], prompt: int) -> None:
    pool = [some(f"w{i}", load=load) for i, load in enumerate(loads)]
    best = rank(pool, prompt, random.Random(0))
    assert [c.load for c in best] == sorted(loads)


@settings(max_examples=100, deadline=None)
@given(load=st.integers(0, 10**5), matched=st.lists(st.integers(0, 500), min_size=2, max_size=8))
def test_at_equal_load_the_longest_prefix_wins(load: int, matched: list[int]) -> None:
    pool = [some(f"w{i}", load=load, matched=held) for i, held in enumerate(matched)]
    best = rank(pool, 500, random.Random(0))
    assert [c.matched for c in best] == sorted(matched, reverse=True)


def test_a_worker_that_never_reported_counts_its_credit() -> None:
    fleet = Fleet(3.0, FakeClock())
    worker = fleet.register(worker_info("a"), Session())
    assert candidate(worker, credit=120).load == 120


def test_matched_tokens_follow_the_chain_salt_and_seed() -> None:
    clock = FakeClock()
    fleet = Fleet(3.0, clock)
    tokens = list(range(100, 121))
    sessions = {name: Session() for name in ("all", "gap", "none", "salted", "foreign")}
    for name, session in sessions.items():
        seed = b"x" * 16 if name == "foreign" else worker_info("x").base_seed
        fleet.register(worker_info(name, base_seed=seed), session)
    chain = block_hashes(request_seed(worker_info("x").base_seed), tokens, 4)
    salted = block_hashes(request_seed(worker_info("x").base_seed, salt="s"), tokens, 4)
    fleet.kv_events(sessions["all"], router_pb2.KvEvents(stored=chain))
    fleet.kv_events(sessions["gap"], router_pb2.KvEvents(stored=[chain[0], *chain[2:]]))
    fleet.kv_events(sessions["salted"], router_pb2.KvEvents(stored=salted[:2]))
    fleet.kv_events(sessions["foreign"], router_pb2.KvEvents(stored=chain))
    assert matched_tokens(fleet.workers, tokens, "") == {"all": 20, "gap": 4}
    assert matched_tokens(fleet.workers, tokens, "s") == {"salted": 8}
    assert matched_tokens(fleet.workers, tokens[:20], "") == {"all": 16, "gap": 4}, "at most all but the last token"
    assert matched_tokens(fleet.workers, [1, *tokens[1:]], "") == {}
    assert matched_tokens(fleet.workers, [], "") == {}
