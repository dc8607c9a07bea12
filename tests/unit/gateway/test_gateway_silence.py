from __future__ import annotations

import asyncio
import time

from services.gateway.silence import SilenceWatch


async def test_silence_is_told_once_and_hearing_defers_it() -> None:
    silent = asyncio.Event()
    watch = SilenceWatch(0.2, silent.set)
    for _ in range(5):
        # Shorter than the limit each, longer all together.
        await asyncio.sleep(0.08)
        watch.heard()
    assert not silent.is_set()
    began = time.monotonic()
    async with asyncio.timeout(60):
        await silent.wait()
    assert time.monotonic() - began >= 0.19
    assert watch.silent


async def test_our_own_standstill_is_not_the_peers_silence() -> None:
    silent = asyncio.Event()
    watch = SilenceWatch(0.2, silent.set)
    time.sleep(0.5)  # noqa: ASYNC251 (the loop stands still: that is the test)
    # The overdue timer runs before anything that the peer sent meanwhile can be read.
    await asyncio.sleep(0)
    assert not silent.is_set()
    watch.heard()
    await asyncio.sleep(0.1)
    assert not silent.is_set()
    watch.stop()


async def test_a_peer_that_says_nothing_after_the_standstill_is_silent() -> None:
    silent = asyncio.Event()
    watch = SilenceWatch(0.1, silent.set)
    time.sleep(0.3)  # noqa: ASYNC251
    async with asyncio.timeout(60):
        await silent.wait()
    watch.stop()


async def test_stopped_means_stopped() -> None:
    silent = asyncio.Event()
    watch = SilenceWatch(0.02, silent.set)
    watch.stop()
    await asyncio.sleep(0.06)
    assert not silent.is_set()
