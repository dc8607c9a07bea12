"""Tensor parallel over NCCL, one process and one GPU a rank: collectives in captured graphs, a lost rank, a model."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WAIT_S = 90.0


# --- in a rank's process ---------------------------------------------------------------------------------------------


def _rank(work: Callable[[Any, Any], Any], rank: int, port: int, pipe: Any) -> None:
    """Send what `work(group, pipe)` returns."""
    from kvmesh.layers.parallel import member_store
    from kvmesh.layers.parallel_nccl import NcclParallel

    try:
        torch.cuda.set_device(rank)
        group = NcclParallel(member_store(port, WAIT_S), rank, 2, WAIT_S, torch.device("cuda", rank))
        pipe.send(("ok", work(group, pipe)))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    # Not before the other one is done too: `Pair` ends both. An orderly end would wait for the other rank.
    pipe.poll(WAIT_S)
    os._exit(0)


def _random(rank: int, seed: int, *shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2 * seed + rank))


def _bits(x: Any) -> str:
    """The same in every process for the same bits."""
    return hashlib.sha256(x.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def _collectives(group: Any, pipe: Any) -> Any:
    """Each collective on the host's call; sums of all sizes, whose bits the ranks compare."""
    device, rank, seen = group.device, group.rank, []
    for dtype in (torch.float32, torch.bfloat16):
        for n in (1, 17, 576, 4096, 64 * 4096, 3_000_001):
            parts = [_random(r, n, n).to(dtype) for r in (0, 1)]
            x = parts[rank].to(device)
            assert group.all_reduce(x) is x
            # Two terms: one rounding, whoever adds.
            assert torch.equal(x.cpu(), parts[0] + parts[1])
            seen.append(_bits(x))
    assert group.all_reduce(torch.empty(0, device=device)).numel() == 0
    tokens = torch.tensor([5, -1, 128255] if rank == 0 else [0, 0, 0], dtype=torch.int32, device=device)
    assert group.broadcast(tokens).tolist() == [5, -1, 128255]
    x = torch.arange(6, device=device, dtype=torch.float32).view(2, 3) + 10 * rank
    assert group.all_gather(x).tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
    out = torch.full((4, 3), float("nan"), device=device)
    assert group.all_gather_into(out, x).view(-1).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    return seen


def _graphs(group: Any, pipe: Any) -> Any:
    """A step with collectives, captured for several sizes from one pool; replayed in turns, with eager ones between."""
    device, rank, seen = group.device, group.rank, []
    stream = torch.cuda.Stream(device)
    width, pool, graphs = 576, torch.cuda.graph_pool_handle(), {}
    x = {m: torch.zeros(m, width, device=device) for m in (1, 8, 64)}
    tokens = torch.zeros(64, dtype=torch.int32, device=device)
    out = {}

    def step(m: int) -> Any:
        h = x[m]
        for layer in range(8):
            part = (h * (layer + 1)).bfloat16() if layer % 2 else h * 0.5
            h = group.all_reduce(part).float()
        best = h.argmax(dim=1).int()
        tokens[:m].copy_(best if rank == 0 else torch.zeros_like(best))
        group.broadcast(tokens[:m])
        gathered = torch.empty(2 * m, width, device=device)
        return group.all_gather_into(gathered, h)

    with torch.cuda.stream(stream):
        for m in x:
            step(m)
        stream.synchronize()
        for m in sorted(x, reverse=True):
            graphs[m] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[m], pool=pool, stream=stream, capture_error_mode="thread_local"):
                out[m] = step(m)
        for turn in range(30):
            m = (1, 8, 64)[turn % 3]
            x[m].copy_(_random(rank, turn, m, width))
            graphs[m].replay()
            replayed, chosen = out[m].clone(), tokens[:m].clone()
            tokens.fill_(-7)
            eager = step(m)
            assert torch.equal(replayed, eager), f"turn {turn}"
            assert torch.equal(chosen, tokens[:m]), f"turn {turn}"
            # Rank 0's and rank 1's rows: sums are equal on both.
            assert torch.equal(replayed[:m], replayed[m:]), f"turn {turn}"
            seen.append((_bits(replayed), chosen.tolist()))
    return seen


def _pace(group: Any, pipe: Any) -> Any:
    """us of one of 64 sums in a graph, by KiB of fp32."""
    stream, took = torch.cuda.Stream(group.device), {}
    with torch.cuda.stream(stream):
        for kib in (16, 256, 1024):
            x = torch.zeros(kib * 256, device=group.device)
            group.all_reduce(x)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(64):
                    group.all_reduce(x)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in (0, 1))
            graph.replay()
            begin.record()
            for _ in range(10):
                graph.replay()
            end.record()
            end.synchronize()
            took[kib] = round(begin.elapsed_time(end) * 1e3 / 640, 1)
    return took


def _lost(group: Any, pipe: Any) -> Any:
    """Rank 1 does not replay what rank 0 does, and dies. How long rank 0 then waited, after an abort."""
    from kvmesh.errors import Unavailable

    x = torch.ones(1000, device=group.device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(group.device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        group.all_reduce(x)
    with torch.cuda.stream(stream):
        graph.replay()
    stream.synchronize()
    pipe.send(("ready", None))
    pipe.recv()
    if group.rank == 1:
        time.sleep(WAIT_S)
        return None
    with torch.cuda.stream(stream):
        graph.replay()
        done = torch.cuda.Event()
        done.record()
    pipe.send(("replayed", None))
    # The other rank has been killed.
    pipe.recv()
    assert not done.query(), "the kernel does not wait for the other rank"
    began = time.monotonic()
    group.abort()
    done.synchronize()
    took = time.monotonic() - began
    try:
        group.all_reduce(x)
    except Unavailable:
        return took
    raise AssertionError("a collective after an abort")


# --- here ------------------------------------------------------------------------------------------------------------


class Pair:
    """Two ranks' processes at the same work."""

    def __init__(self, work: Callable[[Any, Any], Any]) -> None:
        from kvmesh.layers.parallel import leader_store

        context = multiprocessing.get_context("spawn")
        self._store, port = leader_store(WAIT_S)
        pairs = [context.Pipe() for _ in (0, 1)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_rank, args=(work, rank, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def answer(self, rank: int, kind: str = "ok") -> Any:
        assert self.pipes[rank].poll(WAIT_S), f"rank {rank} does not answer"
        got, value = self.pipes[rank].recv()
        assert got == kind, value
        return value

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join(WAIT_S)


@pytest.mark.parametrize("work", [_collectives, _graphs], ids=["eager", "captured"])
def test_collectives_are_right_to_the_bit(work: Callable[[Any, Any], Any]) -> None:
    with Pair(work) as pair:
        first, second = pair.answer(0), pair.answer(1)
    assert first
    assert first == second


def test_what_a_sum_in_a_graph_costs(record_property: Callable[[str, object], None]) -> None:
    """A measurement."""
    with Pair(_pace) as pair:
        took = pair.answer(0)
        pair.answer(1)
    record_property("measured", f"NCCL all-reduce of two GPUs in a graph: us by KiB {took}")


def test_a_graph_that_waits_for_a_killed_rank_is_let_go_by_an_abort() -> None:
    with Pair(_lost) as pair:
        for rank in (0, 1):
            pair.answer(rank, "ready")
        pair.pipes[0].send(None)
        pair.answer(0, "replayed")
        pair.processes[1].kill()
        pair.processes[1].join(WAIT_S)
        pair.pipes[0].send(None)
        assert pair.answer(0) < 30.0


# --- a model ---------------------------------------------------------------------------------------------------------

# The vocabulary does not divide by two: the last rank's part of it is filled up.
SHAPE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1999}
OPTIONS = {"max_batch": 40, "token_budget": 1024}


class Leader:
    """An `AheadRunner` with what `cuda_kit.Driver` looks at in a runner of one rank."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.device = runner._shard.device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name) if hasattr(self._runner, name) else getattr(self._runner._shard, name)


@pytest.fixture(scope="module", params=["untied", "tied_bias", "two_hosts", "two_hosts_no_graphs"])
def drivers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The same model on one GPU and on two, of one host or of two."""
    pytest.importorskip("triton")
    from kvmesh.engine.cuda.runner import CudaRunner
    from tests.gpu import cuda_kit
    from tests.gpu.hosts_kit import two_hosts

    more = {"tie_word_embeddings": True, "attention_bias": True} if request.param == "tied_bias" else {}
    cuda_kit.SHAPES["tp"] = {**SHAPE, **more}
    directory: Path = tmp_path_factory.mktemp("tp")
    cuda_kit.make_model(directory, "tp")
    options = OPTIONS | ({"cuda_graphs": False} if request.param == "two_hosts_no_graphs" else {})
    one = cuda_kit.Driver(CudaRunner.load(str(directory), "bf16", "cuda:0", **OPTIONS))
    try:
        if request.param.startswith("two_hosts"):
            with two_hosts(tmp_path_factory.mktemp("hosts"), str(directory), options, WAIT_S) as two:
                yield one, cuda_kit.Driver(Leader(two))
        else:
            with _one_host(str(directory), options) as two:
                yield one, cuda_kit.Driver(Leader(two))
    finally:
        one.runner.close()


@contextmanager
def _one_host(model: str, options: dict[str, Any]) -> Iterator[Any]:
    from kvmesh.engine.parallel.ahead import AheadRunner
    from kvmesh.engine.parallel.ranks import start_ranks

    two = AheadRunner.load(start_ranks(model, 2, 1), model, "bf16", first_gpu=0, options=options, timeout_s=WAIT_S)
    try:
        yield two
    finally:
        two.close()


def _ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 1999, count).tolist()


def test_two_ranks_have_the_logits_of_one(drivers: tuple[Any, Any]) -> None:
    """A prompt whole and in chunks, decode rows in graphs of several sizes, a step of both."""
    from tests.gpu.cuda_kit import assert_close

    seen = []
    for driver in drivers:
        logits = []
        ids = _ids(333)
        logits.append(driver.logits(driver.slice(1, ids, 0, driver.table(400))))
        table = driver.table(400)
        for start, end in ((0, 100), (100, 101), (101, 310), (310, 333)):
            logits.append(driver.logits(driver.slice(2, ids[start:end], start, table)))
        for count in (1, 3, 17, 40):
            tables = [driver.table(1 + i) for i in range(count)]
            for i in range(1, count):
                driver.run(driver.slice(10 + i, _ids(i, i), 0, tables[i], sample=False))
            rows = [driver.slice(10 + i, [7 + i], i, tables[i]) for i in range(count)]
            logits.append(driver.logits(*rows))
            for t in tables:
                driver.free += t.tolist()
        logits.append(driver.logits(driver.slice(2, [9], 333, table), driver.slice(3, ids[:50], 0, driver.table(50))))
        seen.append(logits)
    for one, two in zip(*seen, strict=True):
        assert_close(two, one)


def test_tokens_of_a_step_launched_ahead_reach_both_ranks(drivers: tuple[Any, Any]) -> None:
    """Greedy and seeded sampling, each launched on PENDING tokens, against each step collected first."""
    from kvmesh.engine.runner import PENDING, SamplingParams

    driver = drivers[1]
    runner, steps = driver.runner, 12
    warm, greedy = SamplingParams(temperature=0.8, top_k=20, seed=5), SamplingParams(temperature=0.0)
    answers = []
    for ahead in (False, True):
        tables = [driver.table(64), driver.table(64)]
        prompts = [_ids(20, 1), _ids(31, 2)]

        def rows(n: int, tokens: list[int], tables: Any = tables, prompts: Any = prompts) -> Any:
            return driver.batch(*[
                driver.slice(100 + i, [tokens[i]], len(prompts[i]) + n, tables[i], params=(warm, greedy)[i])
                for i in (0, 1)
            ])  # fmt: skip

        flights = [runner.launch(driver.batch(*[
            driver.slice(100 + i, prompts[i], 0, tables[i], params=(warm, greedy)[i]) for i in (0, 1)
        ]))]  # fmt: skip
        tokens: list[list[int]] = []
        for n in range(steps):
            if not ahead:
                tokens.append([int(s.token_ids[0]) for s in runner.collect(flights.pop(0)).slices])
            flights.append(runner.launch(rows(n, [PENDING] * 2 if ahead else tokens[-1])))
            if ahead:
                tokens.append([int(s.token_ids[0]) for s in runner.collect(flights.pop(0)).slices])
        tokens.append([int(s.token_ids[0]) for s in runner.collect(flights.pop(0)).slices])
        answers.append(tokens)
    assert len(answers[0]) == steps + 1
    assert answers[0] == answers[1]


def test_prompt_logprobs_of_two_ranks(drivers: tuple[Any, Any]) -> None:
    """The step behind it is launched before they are read."""
    scores = []
    for driver in drivers:
        scored = driver.slice(50, _ids(90, 3), 0, driver.table(90), prompt_logprobs=0)
        first = driver.runner.launch(driver.batch(scored))
        second = driver.runner.launch(driver.batch(driver.slice(51, _ids(5, 4), 0, driver.table(16))))
        scores.append([t.logprob for t in driver.runner.collect(first).slices[0].prompt_logprobs])
        driver.runner.collect(second)
    assert len(scores[0]) == 89
    assert np.allclose(*scores, atol=0.3)
    assert np.abs(np.subtract(*scores)).mean() < 0.05
