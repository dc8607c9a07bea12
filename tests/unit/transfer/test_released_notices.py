"""What an engine that writes by itself says of memory it has let go of: checked, told once, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import kvmesh.transfer.sidecar.engine as engine_module
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.sidecar import Sidecar
from kvmesh.transfer.sidecar.outgoing import OutgoingLinks
from rank_world import WAIT_S, Ranks, make_layout, running_sidecar


class Quiet:
    """A poster that has nothing to do."""

    transports = ("nvlink",)

    def connected(self, tell: object) -> None: ...
    def lost(self) -> None: ...
    async def leave(self, timeout_s: float) -> None: ...
    def when_drained(self, done: Any, transfer_id: int | None = None) -> None:
        done()


@pytest.fixture
async def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Links whose notice is being told; nobody takes any."""
    links: list[int] = []

    async def tell(self: OutgoingLinks, notice: Any) -> None:
        links.append(notice.message.link_id)
        await asyncio.Event().wait()

    monkeypatch.setattr(OutgoingLinks, "_tell", tell)
    return links


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[Sidecar]:
    async with running_sidecar(tmp_path, transports=("nvlink", "shm")) as sidecar:
        yield sidecar


async def posting(sidecar: Sidecar) -> Ranks:
    engine = Ranks(sidecar.options.engine_socket, make_layout(tp=1))
    await engine.lead(poster=Quiet())  # type: ignore[arg-type]
    return engine


def say(engine: Ranks, link_id: int, engine_id: str = "d", address: str = "127.0.0.1:1") -> None:
    assert engine.client is not None
    released = pb.PeerReleased(link_id=link_id, engine_id=engine_id, incarnation=3, control_address=address)
    engine.client._send(pb.EngineMessage(peer_released=released))


async def test_a_link_is_told_of_once_and_too_many_end_the_connection(
    sidecar: Sidecar, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MAX_NOTICES_OUT", 3)
    engine = await posting(sidecar)
    for link_id in (1, 1, 2, 3, 4):
        say(engine, link_id)
    async with asyncio.timeout(WAIT_S):
        await engine.lost.wait()
    assert told == [1, 2, 3]
    await engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"link_id": 0},
        {"engine_id": ""},
        {"engine_id": "x" * 5000},
        {"address": "nowhere"},
        {"address": "x" * 999 + ":1"},
    ],
)
async def test_what_no_engine_says_ends_the_connection(
    sidecar: Sidecar, told: list[int], changes: dict[str, Any]
) -> None:
    engine = await posting(sidecar)
    say(engine, **({"link_id": 1} | changes))
    async with asyncio.timeout(WAIT_S):
        await engine.lost.wait()
    assert told == []
    await engine.close()
