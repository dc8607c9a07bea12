"""A prefill engine and the memory that its pages go to, wired by what workers are wired by, over two real sidecars.

The settings decide where it runs: with `device=cpu` (and nvlink=host or staging=on) all of it works without a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvmesh.config import WorkerSettings
from kvmesh.engine.core import EngineConfig, EngineCore
from kvmesh.engine.events import Admitted, CoreEvent, Ended, EngineRequest, Mode, PrefillComputed, RequestKey
from kvmesh.engine.worker.posting import Route, make_memory, make_movers
from kvmesh.kv.layout import group_view
from kvmesh.kv.region import Region
from kvmesh.kv.ring import StepRecord
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.descriptor import build_descriptor, slot_bytes, source_pages

WAIT_S = 60.0
POISON = 0xA5
SIX_LAYERS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 6, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 2000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def random_model(folder: Path, **changes: Any) -> str:
    """The spec of a small model with random weights."""
    path = folder / "small.json"
    path.write_text(json.dumps(SIX_LAYERS | changes))
    return f"random:{path}"


class Seat:
    """What memory asks of a runner, for an engine that computes nothing."""

    def __init__(self, runner: Any, settings: WorkerSettings) -> None:
        self.info, self.layout = runner.info, runner.layout
        if settings.on_gpu:
            import torch

            self.stream = torch.cuda.Stream(settings.gpu)

    def workspace_bytes(self) -> int:
        return 0


class Side:
    """One engine's memory, its movers and its registration."""

    def __init__(self, name: str, settings: WorkerSettings, runner: Any, route: Route) -> None:
        self.name, self.settings = name, settings
        self.memory = make_memory(runner, settings, route)
        self.movers = make_movers(settings, self.memory, route, runner)
        self.layout = self.memory.layout
        (self.group,) = (group.name for group in self.layout.groups)

    async def join(self, socket: Path) -> None:
        memory = self.memory
        self.client = await SidecarClient.connect(
            socket, engine_id=self.name, incarnation=1, layout=memory.shared_layout, regions=memory.shared_regions,
            doorbell=memory.doorbell_region, ring=memory.ring_region, timeout_s=WAIT_S, on_lost=lambda: None,
            poster=self.movers.poster,
        )  # fmt: skip

    @property
    def poster(self) -> Any:
        """The core's StepPoster."""
        return self.movers.poster if self.movers.staging is None else self.movers.staging

    @property
    def backend(self) -> Any:
        """The stream on which pages leave."""
        return self.movers.poster._backend if self.movers.poster is not None else self.movers.staging._out  # type: ignore[union-attr]

    @property
    def _all(self) -> Any:
        """(layers, pages, bytes)"""
        region = self.memory.regions[self.group]
        if isinstance(region, Region):
            return group_view(region.buf, self.layout, self.group)
        import torch

        flat = torch.as_tensor(region, device=f"cuda:{self.settings.gpu}")[: self.layout.region_bytes(self.group)]
        return flat.view(self.layout.num_layers, self.layout.num_pages, -1)

    def pages(self, numbers: Sequence[int]) -> np.ndarray:
        """A copy, (layers, len(numbers), bytes). What was queued on other streams is not waited for."""
        chosen = self._all[:, list(numbers)]
        return np.array(chosen if isinstance(chosen, np.ndarray) else chosen.cpu().numpy()).reshape(
            self.layout.num_layers, len(numbers), -1
        )

    def staged(self, numbers: Sequence[int]) -> np.ndarray:
        """`pages` of the host memory in between."""
        assert self.memory.staged is not None
        view = group_view(self.memory.staged.regions[self.group].buf, self.memory.staged.layout, self.group)
        return np.array(view[:, list(numbers)]).reshape(self.layout.num_layers, len(numbers), -1)

    def poison(self) -> None:
        """Every byte that pages may land in."""
        self._all[:] = POISON
        if self.memory.staged is not None:
            self.memory.staged.regions[self.group].view()[:] = POISON
        if self.settings.on_gpu:
            import torch

            torch.cuda.synchronize(self.settings.gpu)

    async def close(self) -> None:
        if hasattr(self, "client"):
            await self.client.close()
        self.movers.close()
        self.memory.close()


def settle(backend: Any) -> None:
    """Everything launched so far has landed."""
    mark, until = backend.mark(), time.monotonic() + WAIT_S
    while not backend.reached(mark):
        assert time.monotonic() < until
        time.sleep(0.0002)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.0005)


@dataclass(eq=False)
class Receipt:
    """A destination that waits: pages of the engine, and (where it goes through the host) those in between."""

    descriptor: pb.Descriptor
    slot: Any
    pages: list[int]
    lease: Any = None


@dataclass(eq=False)
class Run:
    """One prompt in the core, as its service sees it."""

    admitted: asyncio.Future[Admitted]
    computed: asyncio.Future[PrefillComputed]
    ended: asyncio.Future[Ended]


@dataclass(eq=False)
class Going:
    """A transfer under way: source and destination pages, in order, and the staging pages that stand for them."""

    here: list[int]
    there: list[int]
    lease: Any = None
    landing: Any = None


@dataclass(eq=False)
class Sent:
    """What is known at the end. hits: pages that the prefix cache held."""

    hits: int
    chunks: int
    transport: str
    nbytes: int


Hook = Callable[[StepRecord, int], None]


class Watched:
    """The core's poster with something to look at before and behind each layer; errors are kept, and end nothing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.before: Hook | None = None
        self.behind: Hook | None = None
        self.errors: list[BaseException] = []
        self.layers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, record: StepRecord) -> Any:
        post = self._inner.step(record)
        return None if post is None else _Layers(self, post, record)

    def look(self, hook: Hook | None, record: StepRecord, number: int) -> None:
        try:
            if hook is not None:
                hook(record, number)
        except BaseException as error:
            self.errors.append(error)


@dataclass(eq=False)
class _Layers:
    watched: Watched
    post: Any
    record: StepRecord

    def layer(self, number: int) -> None:
        self.watched.look(self.watched.before, self.record, number)
        self.post.layer(number)
        self.watched.look(self.watched.behind, self.record, number)
        self.watched.layers += 1


@dataclass(eq=False)
class Pair:
    """Two engines. `send` is one request from prompt to pages."""

    source: Side
    target: Side
    core: EngineCore
    watched: Watched
    going: dict[int, Going] = field(default_factory=dict)
    runs: dict[RequestKey, Run] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)

    def on_events(self, events: list[CoreEvent]) -> None:
        for event in events:
            run = self.runs.get(getattr(event, "key", RequestKey("")))
            if run is None:
                continue
            if isinstance(event, Admitted):
                run.admitted.set_result(event)
            elif isinstance(event, PrefillComputed):
                run.computed.set_result(event)
            elif isinstance(event, Ended):
                for future in (run.admitted, run.computed):
                    if not future.done():
                        future.set_exception(event.error or AssertionError("ended early"))
                run.ended.set_result(event)

    async def receive(self, name: str, num_tokens: int) -> Receipt:
        target = self.target
        pages = [self.free.pop() for _ in range(target.layout.pages_for(num_tokens))]
        named, lease, staging = pages, None, target.movers.staging
        if staging is not None:
            lease = await staging.take(pages, WAIT_S)
            staging.expose(lease, for_write=True)
            named = lease.pages
        groups = {target.group: named}
        slot = await target.client.open_slot(
            expected_bytes=slot_bytes(target.memory.shared_layout, groups), groups=groups, request_id=name, ttl_s=60
        )
        descriptor = build_descriptor(target.client, slot, groups=groups, first_block=0, num_tokens=num_tokens)
        return Receipt(descriptor, slot, pages, lease)

    async def send(self, name: str, tokens: Sequence[int]) -> Sent:
        """AssertionError unless every page of every layer arrives as it is here."""
        async with asyncio.timeout(WAIT_S):
            return await self._send(name, tokens)

    async def _send(self, name: str, tokens: Sequence[int]) -> Sent:
        loop, core, source, target = asyncio.get_running_loop(), self.core, self.source, self.target
        key = RequestKey(name)
        run = self.runs[key] = Run(loop.create_future(), loop.create_future(), loop.create_future())
        receipt = await self.receive(name, len(tokens))
        core.submit(EngineRequest(key, list(tokens), len(tokens), mode=Mode.PREFILL_ONLY))
        admitted = await run.admitted
        first, count = source_pages(source.layout, receipt.descriptor)
        assert (first, count) == (0, len(receipt.pages))
        here = list(admitted.pages[:count])
        going = Going(here, receipt.pages, landing=receipt.lease)
        named, staging = here, source.movers.staging
        if staging is not None:
            going.lease = await staging.take(here, WAIT_S)
            await staging.fill(going.lease, admitted.first_block)
            staging.expose(going.lease, for_write=False)
            named = going.lease.pages
        handle = await source.client.start_transfer(
            receipt.descriptor, {source.group: named}, ready_pages=min(admitted.first_block, count)
        )
        self.going[handle.transfer_id] = going
        if staging is not None:
            staging.start(going.lease, handle.transfer_id)
        core.start_prefill(key, handle.transfer_id, 0)
        computed = await run.computed
        sent = await handle.done
        result = await receipt.slot.completed
        if target.movers.staging is not None:
            await target.movers.staging.land(receipt.lease)
            await target.movers.staging.give_back(receipt.lease)
        else:
            settle(source.backend)
        want, got = source.pages(here), target.pages(receipt.pages)
        for layer in range(len(want)):
            for page in range(count):
                assert (got[layer, page] == want[layer, page]).all(), f"{name}: page {page} of layer {layer}"
        assert not (want == POISON).all(axis=2).any()
        assert sent == result.bytes == receipt.slot.expected_bytes
        if staging is not None:
            await staging.give_back(going.lease)
        core.release(key)
        assert (await run.ended).error is None
        return Sent(min(admitted.first_block, count), computed.chunks, str(handle.transport), sent)

    def entries(self, record: StepRecord) -> list[tuple[list[int], list[int], Going]]:
        """Of a step: pages here and there that it fills."""
        found = []
        for entry in record.entries:
            going, end = self.going[entry.transfer_id], entry.first_page + entry.num_pages
            found.append((going.here[entry.first_page : end], going.there[entry.first_page : end], going))
        return found


@contextlib.asynccontextmanager
async def pair(
    runner: Any, source: WorkerSettings, target: WorkerSettings, route: Route, sockets: Sequence[Path]
) -> AsyncIterator[Pair]:
    """runner: of the source, not bound yet. sockets: of both sidecars."""
    loop = asyncio.get_running_loop()
    here = Side("prefill", source, runner, route)
    there = Side("decode", target, Seat(runner, target), route)
    core: EngineCore | None = None
    try:
        here.memory.bind(runner)
        there.poison()
        await here.join(sockets[0])
        await there.join(sockets[1])
        watched = Watched(here.poster)
        staging = here.movers.staging
        core = EngineCore(
            runner, here.layout,
            EngineConfig(
                max_model_len=runner.info.max_model_len, max_batch=source.max_batch, token_budget=source.token_budget,
                chunk_size=source.chunk_size, stall_timeout_s=WAIT_S, ring_wait_s=5.0,
            ),
            lambda events: void(loop.call_soon_threadsafe(made.on_events, events)),
            doorbell=here.memory.doorbell if staging is None else staging.bell, ring=here.memory.ring,
            notify=here.client.notify_ring, poster=watched,
        )  # fmt: skip
        made = Pair(here, there, core, watched, free=list(range(there.layout.num_pages))[::-1])
        core.start()
        yield made
        assert core.failure is None
    finally:
        if core is not None:
            core.stop(WAIT_S)
        runner.close()
        for side in (here, there):
            await side.close()


def void(_: object) -> None:
    """Drop a result."""


def prompt(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 2000, count).tolist()
