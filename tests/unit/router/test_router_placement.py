"""Placement: one family, fitting KV, least load, held prefixes, and no candidate lost to another's heat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import FailedPrecondition, NotFound, Unavailable
from kvmesh.proto.v1 import engine_pb2, router_pb2
from placement_kit import PLAIN, STEP, Mesh
from services.router.fleet import Family
from services.router.placement.ask import Ask
from services.router.placement.explain import explain
from services.router.placement.models import resolve_model
from services.router.placement.pairs import can_send, charges
from services.router.placement.placer import Rules
from services.router.placement.score import Weights

STEADY = Rules(weights=PLAIN)


def test_least_load_first() -> None:
    mesh = Mesh(STEADY).add("a", load=300).add("b", load=10).add("c", load=100)
    assert mesh.ranked() == ["b", "c", "a"]


def test_prefill_workers_are_ranked_and_fit() -> None:
    mesh = Mesh(STEADY).add("d")
    mesh.add("p-busy", "prefill", load=900)
    mesh.add("p-idle", "prefill")
    mesh.add("p-other-layout", "prefill", layout_fingerprint=b"layout-2")
    mesh.add("p-other-page", "prefill", page_size=8)
    mesh.add("p-other-revision", "prefill", revision="r2")
    mesh.add("p-other-tokenizer", "prefill", tokenizer_fingerprint="tok2")
    mesh.add("p-alone", "prefill", kvtransfer_address="")
    mesh.add("p-other-draft", "prefill", speculation="eagle")
    mesh.add("u", "unified", load=500)
    assert mesh.pairs() == {"d": ["p-idle", "u", "p-busy"], "u": []}, "a unified worker prefills for itself"


def test_a_transport_in_common_is_needed_where_both_tell() -> None:
    mesh = Mesh(STEADY).add("d", transports=["verbs", "tcp"])
    mesh.add("p-tcp", "prefill", transports=["tcp"], load=50)
    mesh.add("p-efa", "prefill", transports=["efa", "shm"])
    mesh.add("p-silent", "prefill", load=900)
    assert mesh.pairs() == {"d": ["p-tcp", "p-silent"]}


def test_pages_of_another_size_only_after_equal_ones() -> None:
    mesh = Mesh(STEADY).add("d", kv_fingerprint=b"kv-1")
    mesh.add("p-small", "prefill", page_size=8, layout_fingerprint=b"layout-8", kv_fingerprint=b"kv-1")
    mesh.add("p-busy", "prefill", load=900, kv_fingerprint=b"kv-1")
    mesh.add("p-other", "prefill", kv_fingerprint=b"kv-2")
    assert mesh.pairs() == {"d": ["p-busy", "p-small"]}


def test_a_decode_worker_without_sidecar_prefills_itself() -> None:
    assert Mesh().add("d", kvtransfer_address="").add("p", "prefill").pairs() == {"d": []}


def test_prefill_goes_by_its_own_prefix() -> None:
    mesh = Mesh(STEADY).add("d").add("p-holds", "prefill", load=20, matched=2 * STEP).add("p-idle", "prefill")
    assert mesh.pairs() == {"d": ["p-holds", "p-idle"]}


def test_what_decode_holds_is_not_sent_again() -> None:
    mesh = Mesh(STEADY).add("full", matched=3 * STEP, load=10).add("empty").add("p", "prefill")
    assert mesh.pairs(3 * STEP + 5) == {"full": [], "empty": ["p"]}, "four tokens are missing: one page"
    assert mesh.pairs(3 * STEP + 6) == {"full": ["p"], "empty": ["p"]}
    rules = Rules(weights=STEADY.weights, local_prefill_tokens=20)
    mesh = Mesh(rules).add("full", matched=3 * STEP, load=10).add("p", "prefill")
    assert mesh.pairs(3 * STEP + 21) == {"full": []}
    assert mesh.pairs(3 * STEP + 22) == {"full": ["p"]}


def test_held_prefix_beats_a_little_load_and_loses_to_much() -> None:
    assert Mesh(STEADY).add("holds", load=60, matched=3 * STEP).add("idle").ranked()[0] == "holds"
    assert Mesh(STEADY).add("holds", load=5000, matched=3 * STEP).add("idle").ranked()[0] == "idle"


def test_a_hot_worker_does_not_turn_affinity_off_for_the_others() -> None:
    mesh = Mesh(STEADY).add("holds", load=50, matched=3 * STEP).add("empty", load=40)
    assert mesh.ranked()[0] == "holds"
    assert mesh.add("hot", load=10**7).ranked()[0] == "holds"


def test_a_hot_prefix_does_not_pull_all_to_one_worker() -> None:
    mesh = Mesh(STEADY).add("holds", load=1000, matched=3 * STEP)
    for i in range(7):
        mesh.add(f"w{i}", load=1000)
    assert mesh.ranked()[0] == "holds"
    mesh.load("holds", queued_tokens=4000)
    assert mesh.ranked()[-1] == "holds"


def test_on_a_busy_fleet_small_differences_do_not_outweigh_a_prefix() -> None:
    mesh = Mesh(STEADY).add("holds", load=100_500, matched=3 * STEP).add("empty", load=100_000)
    assert mesh.ranked()[0] == "holds"
    # The same difference between idle workers is five prompts' worth of waiting.
    assert Mesh(STEADY).add("holds", load=500, matched=3 * STEP).add("empty").ranked()[0] == "empty"


def test_a_worker_without_room_for_the_prompt_comes_after_those_with_room() -> None:
    mesh = Mesh(STEADY).add("full", free=10, matched=0).add("free", load=400, free=30)
    assert mesh.ranked(100) == ["free", "full"]
    assert mesh.ranked(36) == ["full", "free"], "nine pages and one to look ahead"
    assert Mesh(STEADY).add("full", free=0, matched=3 * STEP).ranked() == ["full"], "better than none"


def test_equal_workers_share_at_random_but_repeatably() -> None:
    def firsts(seed: int) -> list[str]:
        mesh = Mesh(seed=seed)
        for name in "abcd":
            mesh.add(name)
        return [mesh.ranked()[0] for _ in range(200)]

    found = firsts(1)
    assert set(found) == set("abcd")
    assert found == firsts(1) != firsts(2)
    # No name is favoured: each is first in 50 of 200 on average.
    assert min(found.count(name) for name in "abcd") > 25


def test_none_left_is_unavailable_and_says_why() -> None:
    for mesh in (Mesh(), Mesh().add("p", "prefill"), Mesh().add("d", model="other")):
        with pytest.raises(Unavailable):
            mesh.ranked()
    with pytest.raises(Unavailable, match="may not have"):
        Mesh().add("d").ranked(exclude=frozenset({"d"}))
    mesh = Mesh().add("c", state=engine_pb2.WORKER_STATE_CORDONED).add("g", state=engine_pb2.WORKER_STATE_DRAINING)
    with pytest.raises(Unavailable, match="1 cordoned, 1 draining"):
        mesh.ranked()


@pytest.mark.parametrize(
    "state",
    [
        engine_pb2.WORKER_STATE_CORDONED,
        engine_pb2.WORKER_STATE_DRAINING,
        engine_pb2.WORKER_STATE_STALLED,
        engine_pb2.WORKER_STATE_STARTING,
    ],
)
def test_only_what_serves_gets_more(state: Any) -> None:
    mesh = Mesh(STEADY).add("d", load=10**6).add("p", "prefill", load=10**6)
    mesh.add("d-away", matched=3 * STEP, state=state).add("p-away", "prefill", matched=3 * STEP, state=state)
    assert mesh.pairs() == {"d": ["p"]}


def test_excluded_workers_are_named_nowhere() -> None:
    mesh = Mesh().add("d1").add("d2").add("p1", "prefill").add("p2", "prefill")
    assert mesh.pairs(exclude=frozenset({"d1", "p2", "gone"})) == {"d2": ["p1"]}


def test_output_that_is_there_pins_revision_and_tokenizer() -> None:
    mesh = Mesh(STEADY).add("old", load=900).add("new", revision="r2").add("odd", tokenizer_fingerprint="tok2")
    assert mesh.ranked(revision="r1", tokenizer="tok") == ["old"]
    assert mesh.ranked(revision="r2") == ["new"]
    assert mesh.ranked(family=Family("tiny", "r1", "tok2")) == ["odd"]
    with pytest.raises(Unavailable):
        mesh.ranked(revision="r3")


def test_prompt_logprobs_need_role_unified() -> None:
    mesh = Mesh().add("d")
    with pytest.raises(FailedPrecondition):
        mesh.ranked(unified_only=True)
    assert mesh.add("u", "unified", load=10**6).ranked(unified_only=True) == ["u"]


def test_a_grammar_needs_a_worker_that_serves_them() -> None:
    mesh = Mesh().add("d")
    with pytest.raises(FailedPrecondition):
        mesh.ranked(grammar=True)
    assert mesh.add("g", load=10**6, grammars="llguidance-1.9.1").ranked(grammar=True) == ["g"]
    assert mesh.ranked() == ["d", "g"]
    request = router_pb2.RouteRequest()
    assert not Ask.of(request, "tiny", "tenant").grammar
    request.sampling.grammar.regex = "a"
    assert Ask.of(request, "tiny", "tenant").grammar


def test_a_short_context_is_avoided_but_not_fatal() -> None:
    mesh = Mesh().add("short", max_model_len=100)
    assert mesh.ranked(100) == ["short"], "the worker says itself what is wrong"
    assert mesh.add("long", load=10**6).ranked(100) == ["long"]


def test_a_worker_that_never_reported_counts_its_credit() -> None:
    mesh = Mesh(STEADY).add("a").add("b")
    pairs = mesh.placer.place(mesh.ask())
    mesh.placer.take("r1", pairs[0], mesh.ask())
    other = ({"a", "b"} - {pairs[0].decode.worker_id}).pop()
    assert mesh.ranked() == [other, pairs[0].decode.worker_id]
    mesh.placer.credit.seen(pairs[0].decode.worker_id, ["r1"])
    assert mesh.fleet.columns.credit.sum() == 0


def test_a_chain_counts_for_workers_of_its_own_seed_and_salt_alone() -> None:
    mesh = Mesh(STEADY).add("near", matched=STEP).add("far", matched=3 * STEP, load=5)
    mesh.add("foreign", matched=3 * STEP, base_seed=b"x" * 16)
    matched = {p.decode.worker_id: p.decode.matched for p in mesh.placer.place(mesh.ask())}
    assert matched == {"near": STEP, "far": 3 * STEP, "foreign": 0}
    short = {p.decode.worker_id: p.decode.matched for p in mesh.placer.place(mesh.ask(3 * STEP))}
    assert short["far"] == 3 * STEP - 1, "the last token is computed in any case"


def test_with_no_word_of_what_they_hold_two_are_drawn_and_the_less_loaded_gets_it() -> None:
    mesh = Mesh(STEADY)
    for i in range(8):
        mesh.add(f"w{i}", load=100 * i, matched=3 * STEP if i == 7 else 0)
    firsts = {mesh.ranked(chains=())[0] for _ in range(200)}
    assert len(firsts) >= 5, "the least loaded alone would get all until its next report"
    assert "w7" not in firsts, "whatever it is drawn with has less"
    assert mesh.ranked()[0] == "w0"
    mesh.clock.advance(2.9)
    assert {mesh.ranked()[0] for _ in range(50)} == {"w0"}
    for i in range(8):
        mesh.load(f"w{i}", queued_tokens=100 * i, running=1)
    mesh.clock.advance(0.2)
    assert len({mesh.ranked()[0] for _ in range(200)}) >= 5, "no events for 3 s while they work"
    mesh.events("w3")
    assert {mesh.ranked()[0] for _ in range(50)} == {"w0"}, "one that tells is enough"


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


SERVING = engine_pb2.WORKER_STATE_SERVING
workers = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["prefill", "decode", "unified"]),
        "load": st.integers(0, 10**6),
        "matched": st.integers(0, 6).map(lambda n: n * STEP),
        "free": st.integers(0, 100),
        "model": st.sampled_from(["tiny", "tiny", "big"]),
        "revision": st.sampled_from(["r1", "r2"]),
        "tokenizer_fingerprint": st.sampled_from(["t1", "t2"]),
        "layout_fingerprint": st.sampled_from([b"l1", b"l2"]),
        "page_size": st.sampled_from([4, 16]),
        "speculation": st.sampled_from(["", "eagle"]),
        "transports": st.sampled_from([[], ["tcp"], ["shm", "tcp"], ["verbs"]]),
        "kvtransfer_address": st.sampled_from(["", "h:1", "h:1"]),
        "state": st.sampled_from([SERVING, SERVING, SERVING, engine_pb2.WORKER_STATE_CORDONED]),
    }
)


def build(pool: list[dict[str, Any]], seed: int = 0) -> Mesh:
    mesh = Mesh(seed=seed)
    for i, fields in enumerate(pool):
        mesh.add(f"w{i}", **fields)
    return mesh


@settings(max_examples=100, deadline=None)
@given(
    pool=st.lists(workers, max_size=10),
    alternates=st.integers(0, 4),
    prompt=st.integers(1, 200),
    seed=st.integers(0, 99),
    exclude=st.frozensets(st.integers(0, 9).map(lambda i: f"w{i}"), max_size=3),
)
def test_every_pair_keeps_the_rules(
    pool: list[dict[str, Any]], alternates: int, prompt: int, seed: int, exclude: frozenset[str]
) -> None:
    mesh = build(pool, seed)
    ask = mesh.ask(prompt, exclude=exclude)
    try:
        pairs = mesh.placer.place(ask, alternates)
    except Unavailable:
        assert not [
            w
            for w in mesh.fleet.workers
            if (w.info.model, w.serving) == ("tiny", True)
            and w.info.role != engine_pb2.WORKER_ROLE_PREFILL
            and w.worker_id not in exclude
        ]
        return
    assert pairs == build(pool, seed).placer.place(ask, alternates), "the same draw, the same answer"
    assert 1 <= len(pairs) <= alternates + 1
    assert len({pair.decode.family for pair in pairs} | {c.family for pair in pairs for c in pair.prefill}) == 1
    assert pairs[0].decode.family.model == "tiny"
    assert len({pair.decode.worker_id for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert pair.decode.info.role != engine_pb2.WORKER_ROLE_PREFILL
        assert len(pair.prefill) <= alternates + 1
        assert pair.decode.matched < prompt
        for named in (pair.decode, *pair.prefill):
            assert named.worker_id not in exclude
            assert named.info.state == SERVING
        for target in pair.prefill:
            assert target.info.layout_fingerprint == pair.decode.info.layout_fingerprint
            assert target.info.page_size == pair.decode.info.page_size
            assert can_send(target.info, pair.decode.info)
    cost = charges(pairs[0], prompt)
    assert pairs[0].decode.worker_id in cost
    assert all(1 <= tokens <= prompt for tokens in cost.values())


@settings(max_examples=100, deadline=None)
@given(
    pool=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 6)), min_size=2, max_size=10),
    prompt=st.integers(7 * STEP, 9 * STEP),
    seed=st.integers(0, 99),
)
def test_more_of_the_prompt_and_less_load_never_ranks_lower(
    pool: list[tuple[int, int]], prompt: int, seed: int
) -> None:
    """With the jitter on, and for all places, not the first alone."""
    mesh = Mesh(Rules(weights=Weights(jitter=0.2)), seed)
    for i, (load, blocks) in enumerate(pool):
        mesh.add(f"w{i}", load=load, matched=blocks * STEP).add(f"p{i}", "prefill", load=load, matched=blocks * STEP)
    pairs = mesh.placer.place(mesh.ask(prompt), 20)
    for ranking in ([pair.decode for pair in pairs], pairs[0].prefill):
        assert len(ranking) == len(pool)
        for at, lower in enumerate(ranking):
            for higher in ranking[:at]:
                assert not (lower.matched > higher.matched and lower.load < higher.load), (lower, higher)


# --- why ----------------------------------------------------------------------------------------------------------


def test_a_survey_tells_of_every_worker_why_it_is_where_it_is() -> None:
    mesh = Mesh(STEADY).add("best", matched=3 * STEP, load=10, free=900).add("second", load=20)
    mesh.add("failed").add("other", revision="r2", load=30).add("away", state=engine_pb2.WORKER_STATE_CORDONED)
    mesh.add("short", max_model_len=64)
    mesh.add("p", "prefill", load=5).add("p2", "prefill", load=50)
    mesh.add("p-kv", "prefill", layout_fingerprint=b"l2").add("p-alone", "prefill", kvtransfer_address="")
    ask = mesh.ask(exclude=frozenset({"failed"}))
    mesh.placer.take("r", mesh.placer.place(ask)[0], ask)
    survey = mesh.placer.survey(ask)
    rows = {row.worker_id: row for row in explain(survey)}
    assert {name: row.excluded for name, row in rows.items() if row.excluded} == {
        "failed": "failed this request",
        "away": "cordoned",
        "short": "context too short",
        "other": "another revision or tokenizer than the best worker's",
        "p-kv": "KV of another layout",
        "p-alone": "no sidecar",
    }
    assert all((row.rank == 0) == bool(row.excluded) for row in rows.values())
    best = rows["best"]
    assert (best.role, best.state, best.breaker) == ("decode", "serving", "closed")
    assert (best.matched_tokens, best.load_tokens, best.credit_tokens) == (3 * STEP, 10, 14)
    assert [pair.decode.worker_id for pair in survey.pairs] == sorted(
        (n for n, r in rows.items() if r.role == "decode" and r.rank), key=lambda name: rows[name].rank
    )
    scores = [rows[pair.decode.worker_id].score for pair in survey.pairs]
    assert scores == sorted(scores, reverse=True)
    for row in rows.values():
        if row.rank and row.role == "decode":
            share = row.matched_tokens / ask.prompt_tokens
            assert row.score == pytest.approx(share - row.relative_load - max(0.0, row.relative_load - 2.0))


def test_a_survey_of_what_cannot_be_placed_tells_why_too() -> None:
    mesh = Mesh().add("c", state=engine_pb2.WORKER_STATE_CORDONED).add("p", "prefill")
    survey = mesh.placer.survey(mesh.ask())
    assert isinstance(survey.error, Unavailable)
    assert survey.pairs == []
    row = explain(survey)[0]
    assert (row.worker_id, row.rank, row.excluded) == ("c", 0, "cordoned")


def test_a_survey_stays_as_it_was() -> None:
    mesh = Mesh(STEADY).add("a", load=10, matched=STEP).add("b", load=20)
    survey = mesh.placer.survey(mesh.ask())
    before = explain(survey)
    mesh.load("a", queued_tokens=99)
    mesh.leave("b")
    mesh.add("c").add("d")
    assert explain(survey) == before


def test_what_a_request_says_is_bounded() -> None:
    request = router_pb2.RouteRequest(model="m", prompt_tokens=2**32 - 1, session_id="s" * 10**6)
    for _ in range(20):
        request.chains.add(base_seed=b"s" * 16, block_size=2**32 - 1, hashes=b"h" * 16 * 5000)
    ask = Ask.of(request, "tiny", "acme")
    assert len(ask.chains) == 8
    assert all(len(hashes) == 4096 * 16 for _, hashes in ask.chains)
    assert len(ask.session) == 32
    assert ask.session != Ask.of(request, "tiny", "evil").session
    mesh = Mesh().add("d", max_model_len=0)
    mesh.events("d", [b"h" * 16])
    (pair,) = mesh.placer.place(ask)
    assert pair.decode.matched == 2**32 - 2


def test_a_worker_that_reports_nonsense_is_shown_all_the_same() -> None:
    mesh = Mesh().add("mad", load=(1 << 64) - 1).add("sane")
    rows = {row.worker_id: row for row in explain(mesh.placer.survey(mesh.ask()))}
    assert rows["mad"].load_tokens == (1 << 64) - 1
    assert rows["sane"].rank == 1


def test_work_of_a_request_that_is_placed_anew_counts_once() -> None:
    mesh = Mesh(Rules(weights=Weights(jitter=0.0))).add("a").add("b")
    recent = mesh.fleet.columns.recent

    def place(request_id: str, *exclude: str) -> str:
        ask = mesh.ask(exclude=frozenset(exclude))
        pair = mesh.placer.place(ask)[0]
        mesh.placer.take(request_id, pair, ask)
        return pair.decode.worker_id

    place("once", "b")
    once = recent.sum()
    recent[:] = 0.0
    for turn in range(9):
        mesh.clock.advance(1.0)
        assert place("in line", "ab"[turn % 2]) == "ba"[turn % 2]
        assert recent.sum() == pytest.approx(once)
        assert np.count_nonzero(recent > 1e-6) == 1
    mesh.leave("a")
    mesh.add("a")
    place("in line", "b")
    assert recent.sum() == pytest.approx(once)
    assert recent.min() >= 0.0
    mesh.placer.report(router_pb2.ReportRequest(request_id="in line"))
    mesh.clock.advance(61.0)
    place("another")
    assert len(mesh.placer._placed) == 1


def test_an_idle_fleet_keeps_its_affinity() -> None:
    """One request after the other, each over before the next: all go where the prefix is."""
    mesh = Mesh(Rules())
    for number in range(8):
        mesh.add(f"w{number}", "unified", matched=16 * STEP if number == 3 else 0)
    for turn in range(30):
        ask = mesh.ask(16 * STEP + 1)
        (pair, *_) = mesh.placer.place(ask)
        assert pair.decode.worker_id == "w3", turn
        mesh.placer.take(f"r{turn}", pair, ask)
        mesh.placer.report(router_pb2.ReportRequest(request_id=f"r{turn}", decode_worker="w3"))
        mesh.clock.now += 1.0
        for number in range(8):
            mesh.load(f"w{number}", total_pages=1000, free_pages=1000)


def test_on_a_busy_fleet_what_was_just_placed_counts() -> None:
    mesh = Mesh(Rules())
    for number in range(8):
        mesh.add(f"w{number}", "unified", load=2000, matched=16 * STEP if number == 3 else 0)
    chosen = set()
    for turn in range(30):
        ask = mesh.ask(16 * STEP + 1)
        (pair, *_) = mesh.placer.place(ask)
        chosen.add(pair.decode.worker_id)
        mesh.placer.take(f"r{turn}", pair, ask)
        mesh.placer.report(router_pb2.ReportRequest(request_id=f"r{turn}", decode_worker=pair.decode.worker_id))
    assert len(chosen) > 1
