"""How fast the router decides.

    python benchmarks/router.py decisions [--parts inproc,grpc,hits] [--seconds 10] [--rate 500] [--out FILE]

inproc  `Routing.route` in this process, without caches, as fast as it goes: 64 workers, prompts of 8,192 tokens as
        chains of every 8th block, and beside it, in the same thread and counted in the time, 600 messages of KV events
        (16 hashes in, 16 out: 19,000 new tokens a second and worker at pages of 16, 77,000 at 64) and 320 load reports
        a second. Time is the thread's own CPU time, so that "per core" holds on a shared machine; `wall_s` is by the
        clock. Floors of the same run: the walk of the chain through the index alone, and parsing the request and
        serializing the answer alone.
grpc    A router process with its cache in Valkey, 64 workers of another process attached to it with the same events and
        reports, and requests of 8,192 tokens with their text (32 KB) sent at `--rate` a second, whether or not those
        before have come back; once without and once with a Report after each. A latency counts from when its request
        was due. Floor: the same requests to an empty gRPC servicer in a process of its own, at the same rate.
hits    One request at a time: an exact hit; a question like a remembered one; a new question. With MiniLM; its own time
        for the same texts is printed beside.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from kvmesh.config import RouterSettings
from kvmesh.kv.hashing import CHAIN_STRIDE, prompt_digest
from kvmesh.proto.v1 import inference_pb2, router_pb2, router_pb2_grpc
from router.load import (
    EVENTS,
    REPORTS,
    WORKERS,
    Mesh,
    Prompts,
    Workers,
    open_loop,
    percentiles,
    python_path,
    ready_address,
    spawn,
)
from services.router.cache.answers import AnswerCache
from services.router.fleet import Fleet, Session
from services.router.near.embedder import MiniLmEmbedder
from services.router.routing import Routing

# --- in process -------------------------------------------------------------------------------------------------------


async def inproc(seconds: float, page: int, *, disaggregated: bool) -> dict[str, Any]:
    """Decisions as fast as they go, with events and reports at their rates."""
    prompts = Prompts(page)
    fake = Workers(prompts, disaggregated=disaggregated)
    settings = RouterSettings(cache="off", embedder="none")
    fleet = Fleet(1e9)
    routing = Routing(settings, fleet, AnswerCache.from_settings(settings))
    sessions = [Session() for _ in range(WORKERS)]
    for number, session in enumerate(sessions):
        fleet.register(fake.info(number), session)
        fleet.kv_events(session, fake.snapshot(number))
        fleet.report(session, fake.load())
    prepared = [prompts.request(number).SerializeToString() for number in range(4000)]
    batches = [fake.events() for _ in range(int(EVENTS * (seconds + 2)))]
    loads = [fake.load() for _ in range(1000)]
    clock = time.thread_time
    wall = time.perf_counter()
    begun = clock()
    events = reports = 0
    spent: list[float] = []
    beside = 0.0
    decided = 0
    while (now := clock()) < begun + seconds:
        while events < (now - begun) * EVENTS:
            worker, message = batches[events]
            fleet.kv_events(sessions[worker], message)
            events += 1
        while reports < (now - begun) * REPORTS:
            fleet.report(sessions[reports % WORKERS], loads[reports % 1000])
            reports += 1
        at = clock()
        beside += at - now
        request = router_pb2.RouteRequest.FromString(prepared[decided % len(prepared)])
        request.request_id = f"r{decided}"
        (await routing.route(request, "tenant", 0.1)).SerializeToString()
        spent.append(clock() - at)
        decided += 1
    took = clock() - begun
    wall = time.perf_counter() - wall
    chains = [((page * CHAIN_STRIDE, router_pb2.RouteRequest.FromString(raw).chains[0].hashes),) for raw in prepared]
    at = clock()
    for chain in chains:
        fleet.index.match(chain, fleet.columns.capacity)
    walk = (clock() - at) / len(chains)
    answer = await routing.route(router_pb2.RouteRequest.FromString(prepared[0]), "tenant", 0.1)
    at = clock()
    for raw in prepared:
        router_pb2.RouteRequest.FromString(raw)
        answer.SerializeToString()
    proto = (clock() - at) / len(prepared)
    p50, p99 = percentiles(spent)
    return {
        "page": page,
        "roles": "32 prefill + 32 decode" if disaggregated else "64 unified",
        "decisions_s": decided / took,
        "wall_s": decided / wall,
        "p50_ms": p50,
        "p99_ms": p99,
        "events_s": events / took,
        "events_share": beside / took,
        "floor_walk_us": walk * 1e6,
        "floor_proto_us": proto * 1e6,
    }


# --- through gRPC and Valkey ------------------------------------------------------------------------------------------


async def through_grpc(seconds: float, rate: float, *, reports: bool) -> dict[str, Any]:
    """The router, then the floor."""
    mesh = Mesh("exact", "none")
    try:
        address = await mesh.start()
        before, at = mesh.cpu_s(), time.perf_counter()
        result = await open_loop(address, rate, seconds, reports=reports)
        result["router_cpu_share"] = (mesh.cpu_s() - before) / (time.perf_counter() - at)
    finally:
        mesh.close()
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "echo.ready"
        fake = Workers(Prompts(64))
        pair = router_pb2.Pair(decode=fake.info(0))
        answer = router_pb2.RouteResponse(placement=router_pb2.Placement(pair=pair, alternates=[pair] * 3))
        echo = spawn(
            *(sys.executable, "-m", "router.load", "echo", str(ready), answer.SerializeToString().hex()),
            env=python_path(),
        )
        try:
            floor = await open_loop(await ready_address(ready, echo), rate, seconds, reports=reports)
        finally:
            echo.terminate()
            echo.wait(15)
    result["floor_echo_p50_ms"], result["floor_echo_p99_ms"] = floor["p50_ms"], floor["p99_ms"]
    return result


# --- hits -------------------------------------------------------------------------------------------------------------

_PLACES = ("France", "Italy", "Spain", "Japan", "Kenya", "Chile", "Norway", "Poland", "India", "Peru", "Cuba", "Egypt")
_THINGS = ("capital", "largest lake", "national dish", "highest mountain", "longest river", "main export")


def questions() -> list[tuple[str, str]]:
    """(remembered, asked again in other words)."""
    return [
        (f"What is the {thing} of {place}?", f"What is the {thing} of {place}, please?")
        for place in _PLACES
        for thing in _THINGS
    ]


async def hits() -> dict[str, Any]:
    """Latencies of an exact hit, a semantic hit and a miss, and the embedder's own."""
    mesh = Mesh("semantic", "minilm")
    try:
        channel = grpc.aio.insecure_channel(await mesh.start())
        stub = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
        prompts = Prompts(64)
        count = 0

        async def ask(text: str, answer: str = "") -> tuple[float, str]:
            nonlocal count
            count += 1
            request = prompts.request(0)
            request.request_id, request.prompt_tokens = f"h{count}", 24
            request.cache = inference_pb2.CACHE_MODE_SEMANTIC
            del request.chains[:]
            request.messages[0].content = text
            request.prompt_digest = prompt_digest(list(text.encode()))
            at = time.perf_counter()
            response = await stub.Route(request, timeout=5.0)
            took = time.perf_counter() - at
            end = router_pb2.ReportRequest(decision_id=response.decision_id, request_id=request.request_id)
            if response.HasField("lead"):
                end.flight.CopyFrom(response.lead)
            if answer and response.HasField("placement"):
                choice = router_pb2.CachedChoice(text=answer, finish_reason=inference_pb2.FINISH_REASON_STOP)
                end.answer.CopyFrom(router_pb2.CachedAnswer(choices=[choice], prompt_tokens=24, revision="r1"))
                end.usage.prompt_tokens = 24
            await stub.Report(end, timeout=5.0)
            return took, response.cache

        async with asyncio.timeout(60):
            while (await ask("Is the cache there?", "Yes, it is."))[1] != "exact":
                await asyncio.sleep(0.2)
        pairs = questions()
        for text, _ in pairs:
            await ask(text, f"The answer to: {text}")
        exact = [await ask(pairs[number % len(pairs)][0]) for number in range(1000)]
        near = [await ask(again) for _, again in pairs]
        new, embedded, model = [], [], MiniLmEmbedder()
        for year, (_, again) in enumerate(pairs, 1000):
            text = f"{again} And in the year {year}?"
            new.append(await ask(text))
            # By turns with the router, so that both have the same machine.
            at = time.perf_counter()
            model.embed(text)
            embedded.append(time.perf_counter() - at)
        await channel.close()
    finally:
        mesh.close()
    result: dict[str, Any] = {}
    for name, answers in (("exact", exact), ("similar", near), ("new", new)):
        result[f"{name}_p50_ms"], result[f"{name}_p99_ms"] = percentiles([took for took, _ in answers])
        kinds = [kind for _, kind in answers]
        result[f"{name}_answers"] = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    result["embedding_alone_p50_ms"], _ = percentiles(embedded)
    return result


# --- the command ------------------------------------------------------------------------------------------------------


def _line(name: str, values: dict[str, Any]) -> str:
    shown = [f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()]
    return f"{name}: " + ", ".join(shown)


def main(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="router.py decisions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="inproc,grpc,hits")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    parts, lines = options.parts.split(","), []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    say(f"{os.cpu_count()} cores, load average before: {os.getloadavg()[0]:.2f}")
    if "inproc" in parts:
        for page, disaggregated in ((16, False), (64, False), (16, True), (64, True)):
            say(_line("in process", asyncio.run(inproc(options.seconds, page, disaggregated=disaggregated))))
    if "grpc" in parts:
        for reports in (False, True):
            name = "gRPC and Valkey" + (", reported" if reports else "")
            say(_line(name, asyncio.run(through_grpc(options.seconds, options.rate, reports=reports))))
    if "hits" in parts:
        say(_line("hits", asyncio.run(hits())))
    say(f"load average after: {os.getloadavg()[0]:.2f}")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
