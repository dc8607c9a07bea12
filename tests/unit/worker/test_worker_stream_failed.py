"""A worker whose copy stream fails while no step runs: it is of no use any more, and says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmesh.engine.worker.state import DECODE
from kvmesh.errors import Unavailable
from worker_fakes import Fabric
from worker_harness import WAIT_S, running


def fail(*_: object) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("values", [{"nvlink": "host"}, {"staging": "on"}])
async def test_an_idle_worker_ends(values: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(fabric=Fabric(), role="decode", **values) as made:
        movers = made.worker._movers
        if movers.staging is not None:
            lease = await movers.staging.take([0, 1], WAIT_S)
            monkeypatch.setattr(movers.staging._into, "reached", fail)
            with pytest.raises(Unavailable, match="illegal memory access"):
                await movers.staging.land(lease)
            monkeypatch.undo()
        else:
            assert movers.poster is not None
            monkeypatch.setattr(movers.poster._backend, "mark", fail)
            with movers.poster._changed:
                movers.poster._mark()
            monkeypatch.undo()
        async with asyncio.timeout(WAIT_S):
            await made.tasks.wait_failed()
        assert "illegal memory access" in str(made.tasks.failure)
        assert not made.worker.status.ready(DECODE)
