"""Long prompts cost the one who sent them, not the event loop."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.loading.tokenizer import load_tokenizer
from services.gateway.tokenizers import ModelTokenizer

pytestmark = pytest.mark.model


async def test_the_loop_runs_while_a_long_prompt_is_tokenized() -> None:
    """The tokenizer must release the GIL: else the loop has at most one turn while it works, however long that is."""
    tokenizer = await asyncio.to_thread(lambda: ModelTokenizer(load_tokenizer("smollm2")))
    text = "hello world " * 90_000
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.002)
            turns += 1

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    ids = await tokenizer.encode_raw(text)
    ticking.cancel()
    assert len(ids) == 180_001
    assert turns >= 5
