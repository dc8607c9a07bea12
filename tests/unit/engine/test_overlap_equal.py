"""The core that is one step ahead of its device says the same, request by request, as the one that is not."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvmesh.engine.core import Admitted, CoreEvent, Ended, Mode, PrefillComputed, RequestKey, Tokens
from kvmesh.engine.scripted import ScriptedModel
from tests.unit.engine.world import World

LIVES = 60 if os.environ.get("KVMESH_SOAK") else 4
Script = list[list[dict]]


def script(rng: random.Random, eos_after: int | None, deadlines: bool) -> Script:
    """Requests in waves: each is submitted at once and served until nothing can run."""
    waves: Script = []
    for _ in range(rng.randint(2, 5)):
        wave = []
        for _ in range(rng.randint(1, 6)):
            mode = rng.choice([Mode.LOCAL, Mode.LOCAL, Mode.REMOTE, Mode.PREFILL_ONLY])
            n = rng.choice([1, 1, 1, 2, 3])
            # What is healed must not have ended already.
            healable = n == 1 and mode is not Mode.PREFILL_ONLY and eos_after is None
            tail = rng.choice([0, 0, 3]) if healable else 0
            scored = mode is Mode.LOCAL and rng.random() < 0.2
            wave.append(
                {
                    "mode": mode,
                    "base": rng.randrange(3),
                    "length": rng.randint(1, 26),
                    "seed": rng.randrange(1 << 32),
                    "n": n,
                    "tail": tail,
                    "priority": rng.choice([0, 0, 1]),
                    "max_tokens": rng.randint(1, 24),
                    "min_tokens": rng.choice([0, 0, 2, 5]),
                    "stop_token_ids": frozenset(rng.sample(range(32, 127), 0 if tail else rng.choice([0, 6, 20]))),
                    "cumulative": rng.random() < 0.3,
                    "want_logprobs": rng.random() < 0.3,
                    "logprobs": 2,
                    "prompt_logprobs": 1 if scored else None,
                    "total": rng.choice([None, None, None, 50.0]) if deadlines else None,
                }
            )
        waves.append(wave)
    return waves


def live(waves: Script, soon: Callable[[], bool] | None, **config: object) -> World:
    model = ScriptedModel(layers=2, kv_heads=1, head_dim=8, eos_after=config.pop("eos_after", None))
    world = World(soon=soon, model=model, max_model_len=60, **config)  # type: ignore[arg-type]
    for wave in waves:
        for request in wave:
            world.submit(**request)
        world.run()
        for key in world.keys("admitted"):
            world.start_prefill(key)
        for key in world.keys("remote"):
            if world.expose(key):
                world.deliver(key)
        world.run()
        world.clock.now += 20.0
    world.clock.now += 100.0
    world.run()
    world.cached = set(world.core.cache.hashes()) if world.core.cache is not None else set()
    world.finish()
    return world


def told(world: World, exact: bool) -> list[list[CoreEvent]]:
    """Events by request, without times and page numbers.

    Unless exact, without what depends on which step has room for whom: whether a hit was found and a choice was
    preempted, and how the choices of one request alternate.
    """
    events: dict[RequestKey, list[CoreEvent]] = {key: [] for key in world.tracks}
    for event in world.log:
        if isinstance(event, Admitted):
            if not exact:
                continue
            event = replace(event, pages=())
        elif isinstance(event, PrefillComputed):
            event = replace(event, compute_ms=0.0, chunks=event.chunks if exact else 0)
        elif isinstance(event, Ended):
            usage = replace(event.usage, queue_ms=0.0, prefill_ms=0.0, decode_ms=0.0, ttft_ms=None)
            if not exact:
                usage = replace(usage, cached_tokens=0, preemptions=0)
            event = replace(event, usage=usage, error=type(event.error))  # type: ignore[arg-type]
        assert not hasattr(event, "load")
        events[event.key].append(event)  # type: ignore[union-attr]
    # Keys may be numbered otherwise, their order is the same.
    for mine in events.values():
        for event in mine:
            event.key = RequestKey("any")  # type: ignore[union-attr]
    if not exact:
        for mine in events.values():
            mine.sort(
                key=lambda event: event.choice if isinstance(event, Tokens) else 99 * isinstance(event, Ended) - 1
            )
    return list(events.values())


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("seed", range(LIVES))
def test_with_room_for_all_every_event_is_the_same(seed: int, late: bool) -> None:
    """Cache contents, cached tokens and chunks included."""
    for part in range(3):
        rng = random.Random(1000 * seed + part)
        eos_after = rng.choice([None, None, 2])
        waves = script(rng, eos_after, True)
        config = {
            "num_pages": 400,
            "check_integrity": False,
            "page_size": rng.choice([1, 2, 4]),
            "max_batch": 32,
            "token_budget": 200,
            "chunk_size": rng.choice([1, 3, 8, 64]),
            "eos_after": eos_after,
            "prefix_cache": rng.random() < 0.8,
        }
        worlds = [live(waves, soon, **config) for soon in (None, lambda: not late)]
        assert told(worlds[0], True) == told(worlds[1], True)
        assert worlds[0].cached == worlds[1].cached
        assert any(event.token_ids for event in worlds[1].log if isinstance(event, Tokens))
        assert worlds[1].device.deepest == 2
        for name in ("generation_tokens", "decode_tokens", "prefill_tokens", "prefix_cache_hits", "requests_ok"):
            assert getattr(worlds[0].core.counters, name) == getattr(worlds[1].core.counters, name), name
        assert worlds[1].core.counters.preemptions == 0


def test_in_a_small_pool_every_token_is_the_same() -> None:
    preempted = 0
    for seed in range(3 * LIVES):
        rng = random.Random(seed)
        eos_after = rng.choice([None, None, 2])
        waves = script(rng, eos_after, False)
        page_size = rng.choice([1, 2, 4])
        config = {
            "num_pages": rng.randint(40, 90) // page_size,
            "page_size": page_size,
            "max_batch": 5,
            "token_budget": rng.choice([5, 8, 20]),
            "chunk_size": rng.choice([1, 3, 8]),
            "eos_after": eos_after,
            "prefix_cache": rng.random() < 0.7,
            "remote_resume": rng.random() < 0.5,
            "max_queue": 40,
        }
        sync = live(waves, None, **config)
        pace = random.Random(seed)
        ahead = live(waves, lambda pace=pace: pace.random() < 0.5, **config)
        assert told(sync, False) == told(ahead, False)
        preempted += ahead.core.counters.preemptions
        assert ahead.device.deepest == 2
    assert preempted > 0
