"""Steps that are launched ahead, by a leader whose other rank is on another host and shares no memory with it."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest

import ahead_shard
from kvmesh.engine.parallel.agent import AgentPlan, HostAgent
from kvmesh.engine.parallel.ahead import AheadRunner
from kvmesh.engine.parallel.hosts import GroupPlan, Hosts
from kvmesh.engine.parallel.ranks import start_ranks
from kvmesh.engine.runner import PENDING
from kvmesh.rpc.auth import MeshToken
from model_tiny import make_tiny
from test_parallel_ahead import PROMPT, WAIT_S, Engine, expected


def test_a_rank_on_another_host_has_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Or it would be left behind, set, in this process.
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    (tmp_path / "token").write_text("a token of the whole mesh\n")
    token = MeshToken(tmp_path / "token")
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
        make_tiny(directory, "bias")
    plan = GroupPlan(2, 1, {}, WAIT_S, WAIT_S)
    hosts = Hosts(plan, "127.0.0.1:0", token)
    up, ends = threading.Event(), queue.SimpleQueue[str]()
    agent = HostAgent(
        AgentPlan(
            plan, 1, f"127.0.0.1:{hosts.port}", 1, {"model": str(there), "logs": {}}, "127.0.0.2",
            ahead_shard.__name__,
        ),
        token, up.set, ends.put,
    )  # fmt: skip
    threading.Thread(target=agent.join, daemon=True).start()
    runner = AheadRunner.load(
        start_ranks(str(here), 2, 1, ahead_shard.__name__, hosts=lambda: hosts), str(here), "fp32", first_gpu=0,
        options={}, timeout_s=WAIT_S, backend=ahead_shard.ThreadBackend({}),
    )  # fmt: skip
    try:
        engine = Engine(runner)
        assert up.wait(WAIT_S)
        steps = 7
        flights, answers = [engine.prompt()], []
        for n in range(steps):
            flights.append(engine.decode(PENDING, len(PROMPT) + n))
            answers.append(engine.tokens(flights.pop(0)))
        answers.append(engine.tokens(flights.pop(0)))
        assert answers == expected(here, steps)
    finally:
        runner.close()
        agent.close()
    assert ends.get(timeout=WAIT_S) == ""
