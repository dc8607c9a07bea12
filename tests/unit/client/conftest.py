"""A scripted gateway for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from client_kit import Gateway


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    monkeypatch.delenv("KVMESH_API_KEY", raising=False)
    gateway = Gateway()
    await gateway.start()
    yield gateway
    assert gateway.server is not None
    await gateway.server.stop(None)
