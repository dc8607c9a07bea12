"""What routers are told of a prompt: one chain for each kind of prefix cache, computed once, never the tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_world import World
from kvmesh.kv.hashing import base_seed, block_hashes, prompt_digest, request_seed
from kvmesh.proto.v1 import engine_pb2, router_pb2
from services.gateway import chains
from services.gateway.chains import PromptNames, kinds_of
from services.gateway.job import inner_salt

SEED, OTHER = base_seed("m", "r1", "bf16"), base_seed("m", "r2", "bf16")


def info(seed: bytes = SEED, page: int = 16, model: str = "m") -> engine_pb2.WorkerInfo:
    return engine_pb2.WorkerInfo(model=model, base_seed=seed, page_size=page)


def filled(names: PromptNames, tokens: list[int], kinds: Any, salt: str = "") -> router_pb2.RouteRequest:
    request = router_pb2.RouteRequest()
    names.fill(request, tokens, salt, kinds)
    return request


def test_kinds_are_of_the_model_distinct_whole_and_few() -> None:
    infos = [info(OTHER), info(), info(), info(page=64), info(model="other"), info(b"short"), info(page=0)]
    assert kinds_of(infos, "m") == [(SEED, 16), *sorted([(OTHER, 16), (SEED, 64)])]
    assert len(kinds_of([info(page=page) for page in range(1, 30)], "m")) == chains.MAX_CHAINS
    assert kinds_of([], "m") == []


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80),
    page=st.integers(1, 5),
    salt=st.text(max_size=4),
)
def test_a_chain_is_every_eighth_hash_of_the_workers_own(tokens: list[int], page: int, salt: str) -> None:
    request = filled(PromptNames(), tokens, [(SEED, page)], salt)
    (chain,) = request.chains
    hashes = block_hashes(request_seed(SEED, salt=salt), tokens, page)
    assert chain.hashes == b"".join(h for i, h in enumerate(hashes) if (i + 1) % 8 == 0)
    assert (chain.base_seed, chain.block_size) == (SEED, page)
    assert (request.prompt_tokens, request.prompt_digest) == (len(tokens), prompt_digest(tokens))
    assert not request.chains_incomplete
    assert not request.token_ids


def test_a_retry_computes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    plain, digest = chains.chain_hashes, chains.prompt_digest
    monkeypatch.setattr(
        chains, "chain_hashes", lambda seed, tokens, size: made.append(("chain", size)) or plain(seed, tokens, size)
    )
    monkeypatch.setattr(chains, "prompt_digest", lambda tokens: made.append(("digest", 0)) or digest(tokens))
    names, tokens = PromptNames(), list(range(300))
    first = filled(names, tokens, [(SEED, 4)])
    assert filled(names, tokens, [(SEED, 4)]) == first
    assert made == [("digest", 0), ("chain", 4)]
    both = filled(names, tokens, [(SEED, 4), (SEED, 8)])
    assert both.chains[0] == first.chains[0]
    assert made == [("digest", 0), ("chain", 4), ("chain", 8)]
    other = filled(names, list(range(1, 301)), [(SEED, 4)])
    assert other.prompt_digest != first.prompt_digest
    assert other.chains[0].hashes != first.chains[0].hashes, "an alias was read otherwise: another prompt"
    assert filled(names, tokens, [(SEED, 4)], "salt").chains[0].hashes != first.chains[0].hashes


def test_chains_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MAX_HASHES", 3)
    monkeypatch.setattr(chains, "MAX_CHAINS", 2)
    names = PromptNames()
    for first in range(5):
        request = filled(names, list(range(100)), [(SEED, size) for size in range(first + 1, first + 6)])
        sizes = (first + 1, first + 2)
        assert [len(chain.hashes) // 16 for chain in request.chains] == [min(3, 100 // 8 // size) for size in sizes]
        assert len(names._chains) <= 2


def test_without_a_known_worker_the_router_is_told_so() -> None:
    for kinds in (None, []):
        request = filled(PromptNames(), [1, 2, 3], kinds)
        assert request.chains_incomplete
        assert request.prompt_tokens == 3


async def test_a_request_names_its_prompt_by_the_workers_it_knows(world: World) -> None:
    worker = await world.worker()
    worker.info.base_seed, worker.info.page_size = SEED, 4
    router = await world.router()
    await world.start()
    await world.until(lambda: world.gateway.fleet.links() != [])
    await world.ask("x" * 100)
    (request,) = router.routes.items
    tokens = list(worker.submits.items[0].token_ids)
    assert not request.token_ids
    assert request.prompt_tokens == len(tokens)
    assert request.prompt_digest == prompt_digest(tokens)
    (chain,) = request.chains
    hashes = block_hashes(request_seed(SEED, salt=inner_salt("local", "")), tokens, 4)
    assert chain.hashes == b"".join(hashes[7::8])
