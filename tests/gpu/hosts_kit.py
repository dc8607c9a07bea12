"""Two hosts of one group on one machine with two GPUs: each sees one GPU, and NCCL takes them for two machines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# By its name for the machine NCCL knows whether ranks share one: here they meet over sockets, of the loopback device.
LEADERS = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": "first"}
OTHERS = {"CUDA_VISIBLE_DEVICES": "1", "NCCL_HOSTID": "second"}
OTHERS_ADDRESS = "127.0.0.2"


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """For programs that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def two_hosts(folder: Path, model: str, options: Mapping[str, Any], timeout_s: float) -> Iterator[Any]:
    """An `AheadRunner` whose second rank has come from another host; the agent of that host is in this process."""
    from kvmesh.engine.parallel.agent import AgentPlan, HostAgent
    from kvmesh.engine.parallel.ahead import AheadRunner
    from kvmesh.engine.parallel.hosts import GroupPlan, Hosts
    from kvmesh.engine.parallel.ranks import start_ranks
    from kvmesh.rpc.auth import MeshToken

    path = folder / "token"
    path.write_text("a token of the whole mesh\n")
    token = MeshToken(path)
    plan = GroupPlan(2, 1, {"is": "a test"}, timeout_s, timeout_s)
    hosts = Hosts(plan, "127.0.0.1:0", token)
    ranks = start_ranks(model, 2, 1, hosts=lambda: hosts)
    setup = {"model": model, "logs": {}}
    agent = HostAgent(
        AgentPlan(plan, 1, f"127.0.0.1:{hosts.port}", 1, setup, OTHERS_ADDRESS), token, lambda: None, lambda why: None
    )
    try:
        # Its rank begins with this; in this process NCCL may have asked for the machine's name already.
        with environment(OTHERS):
            agent.join()
        runner = AheadRunner.load(ranks, model, "bf16", first_gpu=0, options=options, timeout_s=timeout_s)
        try:
            yield runner
        finally:
            runner.close()
    finally:
        agent.close()
        ranks.close()
