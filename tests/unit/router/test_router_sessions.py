"""Session affinity: soft, bounded, and the same on replicas that never saw the session."""

from __future__ import annotations

from collections import Counter

import numpy as np

from placement_kit import PLAIN, STEP, Mesh
from services.router.placement.placer import Rules
from services.router.placement.sessions import Served, Sessions, name_hash, rendezvous

STEADY = Rules(weights=PLAIN)


def turn(mesh: Mesh, session: str, request_id: str = "r", prompt: int = STEP) -> tuple[str, str]:
    """Place and take one request of a session; its decode worker and its prefill worker."""
    ask = mesh.ask(prompt, session=session)
    pair = mesh.placer.place(ask)[0]
    mesh.placer.take(request_id, pair, ask)
    mesh.placer.credit.end(request_id)
    return pair.decode.worker_id, pair.prefill[0].worker_id if pair.prefill else ""


def fleet(seed: int = 0) -> Mesh:
    mesh = Mesh(STEADY, seed)
    for i in range(8):
        mesh.add(f"d{i}").add(f"p{i}", "prefill")
    return mesh


def test_a_session_stays_where_it_was() -> None:
    mesh = fleet()
    mesh.placer.sessions.note("acme\0s1", Served("d5", "p3"))
    assert {turn(mesh, "acme\0s1") for _ in range(20)} == {("d5", "p3")}
    assert len({turn(mesh, f"acme\0s{i}") for i in range(50)}) > 10


def test_the_bonus_is_soft() -> None:
    mesh = fleet()
    mesh.placer.sessions.note("s", Served("d5", "p3"))
    mesh.load("d5", queued_tokens=10_000, running=3)
    assert turn(mesh, "s")[0] != "d5", "a busy worker"
    mesh = fleet().add("holds", matched=3 * STEP)
    mesh.placer.sessions.note("s", Served("d5", "p3"))
    assert turn(mesh, "s", prompt=3 * STEP + 4)[0] == "holds", "a held prefix is worth more"
    mesh.leave("holds")
    mesh.leave("d5")
    assert turn(mesh, "s")[0].startswith("d")


def test_a_router_that_never_saw_a_session_places_it_as_another_would() -> None:
    one, two = fleet(1), fleet(2)
    names = [f"t\0{i}" for i in range(100)]
    placed = [turn(one, name) for name in names]
    assert placed == [turn(two, name) for name in names]
    assert len(set(placed)) > 30, "spread over the fleet"
    for mesh in (one, two):
        mesh.leave("d3")
    fresh = fleet(3)
    fresh.leave("d3")
    moved = [(a[0], turn(fresh, name)[0]) for a, name in zip(placed, names, strict=True)]
    assert all(before == after for before, after in moved if before != "d3"), "one worker less moves its own alone"


def test_sessions_kept_are_bounded_the_latest_stay() -> None:
    sessions = Sessions(limit=3)
    for name in "abcab":
        sessions.note(name, Served(name, ""))
    sessions.note("d", Served("d", ""))
    assert len(sessions) == 3
    assert sessions.get("c") is None
    assert sessions.get("a") == Served("a", "")
    sessions.note("e", Served("e", ""))
    assert sessions.get("b") is None, "a look refreshes"


def test_rendezvous_is_even() -> None:
    workers = np.array([name_hash(f"w{i}") for i in range(8)], np.uint64)
    counts = Counter(rendezvous(f"s{i}", workers) for i in range(2000))
    assert min(counts.values()) > 180
    assert max(counts.values()) < 330
