"""The whole mesh on the scripted engine: real processes, real protocols, no model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh_kit import answer, mesh_up, settled, until

LONG = "The quick brown fox jumps over the lazy dog. " * 6


async def test_pages_move_and_the_answer_is_that_of_one_unified_worker() -> None:
    async with mesh_up(cache=False) as mesh:
        text, finished = await answer(mesh, LONG)
        assert finished.served.transport == "shm"
        assert finished.served.transfer_bytes > 0
        assert finished.served.prefill_worker == "prefill-0"
        assert finished.served.decode_worker == "decode-0"
    async with mesh_up(cache=False, prefill=0, decode=0, unified=1) as mesh:
        alone, finished = await answer(mesh, LONG)
        assert finished.served.transfer_bytes == 0
    assert text == alone


async def test_tcp_transport_when_asked_for() -> None:
    async with mesh_up(cache=False, transports="tcp") as mesh:
        _, finished = await answer(mesh, LONG)
        assert finished.served.transport == "tcp"
        assert finished.served.transfer_bytes > 0
        status = await mesh.status()
        links = [link for reply in status.sidecars.values() if reply for link in reply.links]
        assert {link.transport for link in links} == {"tcp"}
        assert all(link.reason for link in links)


async def test_second_identical_request_comes_from_the_exact_cache(tmp_path: Path) -> None:
    # The scripted model must end by itself: only complete answers are stored.
    program = tmp_path / "program.json"
    program.write_text('{"eos_after": 8}')
    async with mesh_up(settings={"decode.scripted_faults": str(program)}) as mesh:
        first, finished = await answer(mesh, "same question", max_tokens=32)
        assert finished.served.cache in ("bypass", "miss")

        async def hit() -> bool:
            second, done = await answer(mesh, "same question", max_tokens=32)
            assert second == first
            return bool(done.served.cache == "exact")

        await until(hit, "an exact hit", timeout_s=60)
        # A dead Redis costs only the cache.
        mesh.kill("redis")
        third, finished = await answer(mesh, "same question", max_tokens=32)
        assert third == first


async def test_status_names_workers_transports_and_reasons() -> None:
    async with mesh_up() as mesh:
        await answer(mesh, LONG)
        status = await mesh.status()
        assert {entry.info.worker_id for entry in status.fleet.workers} == {"prefill-0", "decode-0"}
        for worker in ("prefill-0", "decode-0"):
            reply = status.sidecars[worker]
            assert reply is not None
            assert reply.engine_connected
            assert {item.name for item in reply.transports} >= {"shm", "tcp"}
            assert all(item.reason for item in reply.transports)
            assert reply.links
            assert all(link.reason for link in reply.links)


async def test_many_at_once_all_end_whole_and_all_pages_return() -> None:
    async with mesh_up(
        cache=False, decode=2, settings={"decode.prefix_cache": "false", "prefill.prefix_cache": "false"}
    ) as mesh:
        texts = await asyncio.gather(*(answer(mesh, f"{index} {LONG}", max_tokens=24) for index in range(24)))
        assert all(text for text, _ in texts)
        assert all(finished.usage.completion_tokens == 24 for _, finished in texts)
        await settled(mesh, "decode-0", "decode-1", "prefill-0")


@pytest.mark.parametrize("victim", ["prefill-0", "kvtransfer-prefill-0"])
async def test_prefill_killed_in_the_middle_of_a_transfer(victim: str) -> None:
    """The stream still ends well, and no page stays behind on decode."""
    slow = {
        "prefill.scripted_step_ms": "700",
        "prefill.chunk_size": "32",
        "decode.prefix_cache": "false",
        "decode.scripted_step_ms": "2",
    }
    async with mesh_up(cache=False, settings=slow) as mesh:
        asked = asyncio.create_task(answer(mesh, LONG, max_tokens=8))

        async def bytes_are_moving() -> bool:
            reply = (await mesh.status()).sidecars["decode-0"]
            return bool(reply and reply.counters.bytes_received > 0)

        await until(bytes_are_moving, "the transfer to begin")
        assert (await mesh.load("decode-0")).transferring == 1
        mesh.kill(victim)
        _, finished = await asyncio.wait_for(asked, 60)
        assert finished.usage.completion_tokens == 8
        await settled(mesh, "decode-0")
        # The killed process is back without a manual act, and serves.
        await until(lambda: mesh.supervisor.restarts.get(victim, 0) >= 1, f"{victim} restarted")

        async def moved_again() -> bool:
            _, done = await answer(mesh, "again " + LONG, max_tokens=4)
            return bool(done.served.transfer_bytes > 0)

        await until(moved_again, "pages moving again", timeout_s=60)
