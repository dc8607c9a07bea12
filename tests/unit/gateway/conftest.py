from __future__ import annotations

import gc
from collections.abc import AsyncIterator

import pytest_asyncio

from gateway_world import World


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    try:
        yield made
    finally:
        await made.close()
        gc.collect()
