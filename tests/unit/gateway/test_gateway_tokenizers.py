"""Long prompts cost the one who sent them, not the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvmesh.loading.tokenizer import load_tokenizer
from services.gateway.tokenizers import ModelTokenizer

pytestmark = pytest.mark.model


async def test_the_loop_runs_while_a_long_prompt_is_tokenized() -> None:
    """The tokenizer must release the GIL. Compared with its own duration, so that a busy machine does not matter."""
    tokenizer = await asyncio.to_thread(lambda: ModelTokenizer(load_tokenizer("smollm2")))
    text = "hello world " * 90_000
    gaps: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.002)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    started = time.perf_counter()
    ids = await tokenizer.encode_raw(text)
    took = time.perf_counter() - started
    await asyncio.sleep(0.005)
    ticking.cancel()
    assert len(ids) == 180_001
    assert max(gaps) < took / 2, f"the loop stood still for {max(gaps):.2f} of {took:.2f} s"
