"""Real rank processes for tests of tensor parallelism: a pool of them, in which models are loaded in parts.

A process is started once (importing torch takes seconds) and then serves any number of groups: rank r of a group of
any size lives in process r. KV memory is made here and mapped there, so a test carries pages with the real planner.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvmesh.engine.runner import SampleInput, SamplingParams, Slice, StepBatch
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.planner import expected_bytes, plan
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from kvmesh.layers.parallel import SINGLE, GlooParallel, leader_store, member_store

# For a machine under load; nothing waits so long unless something is broken.
WAIT_S = 120.0
GREEDY = (SampleInput(SamplingParams(temperature=0.0), 0, 0, [], []),)


# --- in a rank's process ---------------------------------------------------------------------------------------------


def _serve(pipe: Connection, rank: int, port: int) -> None:
    """Answer (method, *arguments) with ("ok", value) or ("error", text) until the pipe is closed."""
    torch.set_num_threads(1)
    member = _Member(rank, member_store(port, WAIT_S))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            method, *arguments = pipe.recv()
            try:
                pipe.send(("ok", getattr(member, method)(*arguments)))
            except Exception as error:
                pipe.send(("error", f"{type(error).__name__}: {error}"))


class _Member:
    def __init__(self, rank: int, store: Any) -> None:
        self.rank, self.store = rank, store
        self.runners: dict[int, Any] = {}
        self.memory: dict[int, tuple[KvLayout, dict[str, memoryview], Doorbell]] = {}

    def load(self, key: int, directory: str, dtype: str, tp: int, backend: str) -> tuple[dict[str, Any], str]:
        from kvmesh.engine.torch_runner import TorchRunner

        group = GlooParallel(self.store, self.rank, tp, WAIT_S, f"group-{key}") if tp > 1 else SINGLE
        runner = self.runners[key] = TorchRunner.load(directory, dtype, backend=backend, tp=group)
        return runner.layout(1, 1).to_dict(), runner.model.backend

    def weight_elements(self, key: int) -> int:
        """What this rank keeps of the model, counted over every tensor that the model reaches."""
        seen: dict[int, int] = {}
        stack, visited = [self.runners[key].model], set()
        while stack:
            value = stack.pop()
            if id(value) in visited:
                continue
            visited.add(id(value))
            if isinstance(value, torch.Tensor):
                seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes() // value.element_size()
            elif isinstance(value, (list, tuple)):
                stack.extend(value)
            elif hasattr(value, "__dict__"):
                stack.extend(vars(value).values())
            elif hasattr(value, "__slots__"):
                stack.extend(getattr(value, name) for name in value.__slots__ if hasattr(value, name))
        return sum(seen.values())

    def adopt(self, key: int, layout: dict[str, Any], pid: int, fds: dict[str, int]) -> None:
        made = KvLayout.from_dict(layout)
        regions = {
            name: Region.adopt(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), made.region_bytes(name), name)
            for name, fd in fds.items()
        }
        views = {name: region.buf for name, region in regions.items()}
        self.memory[key] = made, views, Doorbell(bytearray(DOORBELL_BYTES))

    def step(self, key: int, memory: int, slices: list[tuple[Any, ...]], copies: list[tuple[int, int]]) -> Any:
        runner = self.runners[key]
        runner.bind(*self.memory[memory])
        batch = StepBatch(1, [Slice(i, *each) for i, each in enumerate(slices)], copies)
        rings: list[int] = []
        step = runner.compute(batch, runner.prepare(batch), rings.append, score=self.rank == 0)
        assert rings == list(range(runner.info.num_layers)), rings
        return step.logits.numpy().copy() if self.rank == 0 else None

    def appended_at_rings(self, key: int, memory: int, step: list[tuple[Any, ...]], pid: int, fds: list[int]) -> Any:
        """Run a step in which every rank but the first is slow to append. On rank 0: for each ring, on which ranks the
        layer's KV of the first slice's first page is there (`fds`: their regions, filled with 0x7F before)."""
        runner = self.runners[key]
        layout, views, doorbell = self.memory[memory]
        group = layout.groups[0]
        runner.bind(layout, views, doorbell)
        batch = StepBatch(1, [Slice(i, *each) for i, each in enumerate(step)])
        if self.rank:
            with _slow_append(runner.model):
                runner.compute(batch, runner.prepare(batch), score=False)
            return None
        page = int(batch.slices[0].block_table[0])
        nbytes = layout.region_bytes(group)
        regions = [Region.adopt(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), nbytes).view() for fd in fds]
        seen: list[list[bool]] = []

        def on_layer(layer: int) -> None:
            at = layout.page_offset(group, layer, page)
            seen.append([bool((region[at : at + layout.page_bytes(group)] != 0x7F).any()) for region in regions])

        runner.compute(batch, runner.prepare(batch), on_layer)
        return seen

    def collective(self, key: int, name: str, values: Any, dtype: torch.dtype) -> Any:
        group = self.runners[key].tp
        return getattr(group, name)(torch.tensor(values, dtype=dtype)).tolist()


@contextlib.contextmanager
def _slow_append(model: Any) -> Iterator[None]:
    """Writing KV takes so long that whoever does not wait for it comes first."""
    from kvmesh.models import llama

    if model.backend == "native":
        library = model._library

        class Slow:
            def __getattr__(self, name: str) -> Any:
                if name == "kvmesh_attention_in":
                    time.sleep(0.1)
                return getattr(library, name)

        # Looked up once a step: the first layer is late, and with it all that follow.
        model._library = Slow()
        try:
            yield
        finally:
            model._library = library
        return

    append = llama.append_kv

    def slow(*arguments: Any) -> None:
        time.sleep(0.1)
        append(*arguments)

    llama.append_kv = slow
    try:
        yield
    finally:
        llama.append_kv = append


# --- in the test -----------------------------------------------------------------------------------------------------


class RankPool:
    """`size` processes. Close it; they also end with the test's process."""

    def __init__(self, size: int = 4) -> None:
        self._store, port = leader_store(WAIT_S)
        context = multiprocessing.get_context("spawn")
        self._keys = itertools.count()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, port), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, size: int, method: str, *arguments: Any) -> list[Any]:
        """`method` in processes 0..size-1 at the same time; their answers. RuntimeError with the first error."""
        for pipe in self.pipes[:size]:
            pipe.send((method, *arguments))
        return self.answers(size)

    def answers(self, size: int) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self.pipes[:size]):
            if not pipe.poll(WAIT_S):
                raise TimeoutError(f"rank {rank} does not answer")
            answers.append(pipe.recv())
        errors = [value for kind, value in answers if kind == "error"]
        if errors:
            raise RuntimeError(errors[0])
        return [value for _, value in answers]

    def load(self, directory: Path, tp: int, dtype: str = "fp32", backend: str = "torch") -> Shards:
        """A model in `tp` parts."""
        key = next(self._keys)
        layout, got = self.call(tp, "load", key, str(directory), dtype, tp, backend)[0]
        assert got == backend
        return Shards(self, key, KvLayout.from_dict(layout))

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()


@dataclass
class Memory:
    """KV memory of all ranks of an engine. Pages are handed out in a shuffled order, so that nothing relies on runs."""

    key: int
    layout: KvLayout
    regions: list[dict[str, Region]]
    free: list[int] = field(default_factory=list)

    def table(self, tokens: int) -> np.ndarray:
        return np.array([self.free.pop() for _ in range(self.layout.pages_for(tokens))], dtype=np.int32)


@dataclass
class Shards:
    """A loaded model. `step` computes with the KV of any `Memory` made by `memory`."""

    pool: RankPool
    key: int
    unit: KvLayout

    @property
    def tp(self) -> int:
        return self.unit.tp

    def memory(self, page_size: int = 16, num_pages: int = 64) -> Memory:
        """Filled with garbage (huge values), so that what was not written is noticed."""
        layout = KvLayout.from_dict(self.unit.to_dict() | {"page_size": page_size, "num_pages": num_pages})
        key = next(self.pool._keys)
        regions = []
        for rank in range(self.tp):
            mine = {group.name: Region.create(f"rank{rank}", layout.region_bytes(group)) for group in layout.groups}
            for region in mine.values():
                region.view()[:] = 0x7F
            regions.append(mine)
            fds = {name: region.fd for name, region in mine.items()}
            self.pool.pipes[rank].send(("adopt", key, layout.to_dict(), os.getpid(), fds))
        self.pool.answers(self.tp)
        free = np.random.default_rng(page_size + num_pages).permutation(num_pages).tolist()
        return Memory(key, layout, regions, free)

    def step(
        self, memory: Memory, *slices: tuple[Sequence[int], int, np.ndarray], copies: Sequence[tuple[int, int]] = ()
    ) -> torch.Tensor:
        """fp32 (slices, vocab) at the last position of every (token ids, start, block table)."""
        wire = [(np.asarray(ids, dtype=np.int32), start, table, GREEDY) for ids, start, table in slices]
        logits = self.pool.call(self.tp, "step", self.key, memory.key, wire, list(copies))[0]
        # `rows` follow the plan's order: one-token slices by length, then the others.
        singles = sorted((i for i, s in enumerate(slices) if len(s[0]) == 1), key=lambda i: slices[i][1])
        order = singles + [i for i, s in enumerate(slices) if len(s[0]) > 1]
        out = torch.empty(logits.shape)
        out[order] = torch.from_numpy(logits)
        return out


def carry(
    src: Memory, dst: Memory, src_table: np.ndarray, dst_table: np.ndarray, tokens: int, first: int = 0, draw: int = 0
) -> int:
    """Move the KV of tokens from block `first` on, as planned, byte by byte and layer by layer; the bytes moved.

    Also checks that every destination rank gets exactly what `expected_bytes` told it.
    """
    moved = 0
    for group in dst.layout.groups:
        first_token = first * dst.layout.page_size
        window = {"first_token": first_token, "num_tokens": tokens - first_token}
        arrived = np.zeros(dst.layout.tp, dtype=np.int64)
        columns = plan(
            src.layout, dst.layout, src_table.tolist(), dst_table.tolist(), group=group, replica_draw=draw, **window
        )
        views = [[side[group.name].view() for side in memory.regions] for memory in (src, dst)]
        strides = [memory.layout.layer_stride(group.name) for memory in (src, dst)]
        for layer in range(group.num_layers):
            for row in range(len(columns)):
                a, b = int(columns.src_rank[row]), int(columns.dst_rank[row])
                at, to = (int(c[row]) + layer * s for c, s in zip((columns.src_offset, columns.dst_offset), strides, strict=True))  # fmt: skip  # noqa: E501
                length = int(columns.length[row])
                views[1][b][to : to + length] = views[0][a][at : at + length]
                arrived[b] += length
        expected = expected_bytes(src.layout, dst.layout, dst_table.tolist(), group=group, **window)
        assert arrived.tolist() == expected.tolist()
        moved += int(arrived.sum())
    return moved


def apart(
    prefill: tuple[Shards, Memory], decode: tuple[Shards, Memory], prompt: Sequence[int], chunk: int, draw: int = 0
) -> torch.Tensor:
    """Logits (3, vocab) of the last prompt token and of two more decode steps, computed by `decode` on KV that
    `prefill` computed in chunks. The tokens after the prompt are prompt[0] and prompt[1]."""
    n = len(prompt) - 1
    (shards, source), (generator, target) = prefill, decode
    src_table, dst_table = source.table(n), target.table(n + 3)
    for at in range(0, n, chunk):
        shards.step(source, (prompt[at : min(n, at + chunk)], at, src_table))
    carry(source, target, src_table, dst_table[: target.layout.pages_for(n)], n, draw=draw)
    tokens = [prompt[n], prompt[0], prompt[1]]
    return torch.cat([generator.step(target, ([token], n + i, dst_table)) for i, token in enumerate(tokens)])


@contextlib.contextmanager
def rank_pool(size: int = 4) -> Iterator[RankPool]:
    pool = RankPool(size)
    try:
        yield pool
    finally:
        pool.close()
