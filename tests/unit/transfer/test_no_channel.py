"""A destination to which not even a channel can be made: certificates that cannot be read just now, a bad address."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvmesh.errors import FailedPrecondition, KvmeshError, Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.rpc import MeshChannel
from kvmesh.transfer.descriptor import build_descriptor, slot_bytes
from kvmesh.transfer.sidecar import outgoing as outgoing_module
from rank_world import Ranks, make_layout, running_sidecar

GROUPS = {"main": [1], "latent": [1]}


@pytest.mark.parametrize(
    ("error", "refusal"),
    [(FailedPrecondition("cannot read cert.pem"), FailedPrecondition), (ValueError("no address"), Unavailable)],
)
async def test_a_start_is_refused_at_once_and_the_next_one_tries_again(
    tmp_path: Path, error: Exception, refusal: type[KvmeshError]
) -> None:
    asked: list[str] = []

    def fails(address: str) -> MeshChannel:
        asked.append(address)
        raise error

    async with running_sidecar(tmp_path, open_channel=fails) as sidecar:
        engine = Ranks(sidecar.options.engine_socket, make_layout(tp=1))
        client = await engine.lead()
        for attempt in range(2):
            slot = await client.open_slot(
                expected_bytes=slot_bytes(engine.layout, GROUPS), groups=GROUPS, request_id="r", ttl_s=60
            )
            descriptor = build_descriptor(client, slot, groups=GROUPS, first_block=0, num_tokens=4)
            with pytest.raises(refusal, match=r"cannot read cert.pem|no address"):
                await client.start_transfer(descriptor, GROUPS, ready_pages=0)
            assert len(asked) == attempt + 1
            assert not sidecar.outgoing.links
            assert not sidecar.outgoing.all
        await engine.close()


async def test_a_notice_is_repeated_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing_module, "NOTICE_BACKOFF_S", (0.001, 0.01))
    thrice = asyncio.Event()
    asked: list[str] = []

    def fails(address: str) -> MeshChannel:
        asked.append(address)
        if len(asked) >= 3:
            thrice.set()
        raise (ValueError("no address"), OSError("no descriptor is left"), FailedPrecondition("x"))[len(asked) % 3]

    async with running_sidecar(tmp_path, open_channel=fails) as sidecar:
        engine = Ranks(sidecar.options.engine_socket, make_layout(tp=1))
        await engine.lead()
        assert sidecar.session is not None
        sidecar.outgoing.tell_notice(sidecar.session, pb.Unmapped(engine_id="d", incarnation=3, link_id=9), "h:1")
        async with asyncio.timeout(60):
            await thrice.wait()
        assert [message.link_id for message in sidecar.outgoing.untold("d", 3)] == [9]
        await engine.close()
