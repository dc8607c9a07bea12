"""The router's part in a whole mesh: a paraphrase is answered from the semantic cache, a near miss is not."""

from __future__ import annotations

import contextlib
from pathlib import Path

from mesh_kit import Mesh, mesh_up, until


async def ask(mesh: Mesh, text: str) -> tuple[str, str]:
    """(text, cache) of an answer to a chat with nothing but the message set."""
    out = []
    async with mesh.client() as client:
        async for event in client.chat([{"role": "user", "content": text}], model="auto"):
            assert not event.HasField("error"), event
            out.append(event.delta.text)
            if event.HasField("finished"):
                return "".join(out), event.finished.served.cache
    raise AssertionError("the stream ended without a terminal event")


async def test_a_paraphrase_is_answered_from_the_semantic_cache(tmp_path: Path) -> None:
    program = tmp_path / "program.json"
    program.write_text('{"eos_after": 8}')
    settings = {
        "decode.scripted_faults": str(program),
        "router.semantic_threshold": "0.85",
        # A look-up that waits for a processor is no miss.
        "router.embed_timeout_ms": "5000",
        "router.redis_timeout_ms": "5000",
    }
    async with mesh_up(embedder="minilm", settings=settings) as mesh:

        async def embedder_is_loaded() -> bool:
            return (await mesh.status()).fleet.cache.embedder == "minilm"

        async def entries() -> int:
            return (await mesh.status()).fleet.cache.entries

        async def remembered() -> str:
            # On a busy machine the router may answer too late: the request is then placed without it and not reported.
            given, cache = await ask(mesh, "What is the capital of France?")
            assert cache in ("miss", "exact"), cache
            with contextlib.suppress(AssertionError):
                await until(lambda: entries(), "the answer reported", timeout_s=2)
            return given if await entries() else ""

        await until(embedder_is_loaded, "the embedder", timeout_s=90)
        text = await until(remembered, "the answer remembered", timeout_s=90)

        async def hit() -> bool:
            # On a busy machine a look-up may run out of time; it is then a miss and its own answer is kept, so each
            # try words its question anew.
            nonlocal words
            words = f"{words}, please"
            return (await ask(mesh, words)) == (text, "semantic")

        words = "Tell me, what is the capital of France"
        await until(hit, "a semantic hit", timeout_s=90)
        assert (await ask(mesh, "What is the capital of Germany?"))[1] == "miss"
        assert (await ask(mesh, "What is not the capital of France?"))[1] == "miss"
        # With Redis gone nobody knows what was purged meanwhile: questions are answered, by workers.
        mesh.kill("redis")
        assert (await ask(mesh, "What is the capital of France?"))[1] in ("miss", "bypass")
