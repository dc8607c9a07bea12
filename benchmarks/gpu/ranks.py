"""The engine of the benchmarks with two ranks, of one host or of two."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from gpu.engine import Engine
from kvmesh.engine.parallel.agent import AgentPlan, HostAgent
from kvmesh.engine.parallel.ahead import AheadRunner
from kvmesh.engine.parallel.hosts import GroupPlan, Hosts
from kvmesh.engine.parallel.ranks import start_ranks
from kvmesh.rpc.auth import MeshToken

TIMEOUT_S = 120.0
# NCCL knows a machine by this name: with another one ranks meet over sockets, of the loopback device here.
OTHER_MACHINE = {"NCCL_HOSTID": "another"}


class TwoRanks(Engine):
    """Ranks on GPUs 0 and 1. One host: steps through shared memory, sums over NVLink. Two hosts, whose second this
    process also plays, with a GPU each: steps as frames over TCP, sums over sockets, or (same_machine) over NVLink."""

    hosts = 1
    same_machine = False
    _agent: HostAgent | None = None

    def load_runner(self, spec: str, options: dict[str, Any]) -> Any:
        """See `Engine.load_runner`."""
        ranks = start_ranks(spec, 2, 1) if self.hosts == 1 else self._meet(spec)
        runner = AheadRunner.load(ranks, spec, "bf16", first_gpu=0, options=options, timeout_s=TIMEOUT_S)
        # Where the marks of steps are.
        runner.events = runner._shard.events  # type: ignore[attr-defined]
        runner._shard.record_events = True  # type: ignore[attr-defined]
        return runner

    def _meet(self, spec: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "token"
            path.write_text("a token of the benchmark\n")
            token = MeshToken(path)
            plan = GroupPlan(2, 1, {"is": "a benchmark"}, TIMEOUT_S, TIMEOUT_S)
            hosts = Hosts(plan, "127.0.0.1:0", token)
            ranks = start_ranks(spec, 2, 1, hosts=lambda: hosts)
            agent = self._agent = HostAgent(
                AgentPlan(plan, 1, f"127.0.0.1:{hosts.port}", 1, {"model": spec, "logs": {}}),
                token, lambda: None, lambda why: None,
            )  # fmt: skip
            other = {"CUDA_VISIBLE_DEVICES": "1"} | ({} if self.same_machine else OTHER_MACHINE)
            before = dict(os.environ)
            os.environ.update(other)
            try:
                agent.join()
            finally:
                for name in other:
                    if name in before:
                        os.environ[name] = before[name]
                    else:
                        del os.environ[name]
        return ranks

    def close(self) -> None:
        """See `Engine.close`."""
        super().close()
        if self._agent is not None:
            self._agent.close()


class TwoHosts(TwoRanks):
    """NCCL takes them for two machines."""

    hosts = 2


class TwoHostsNvlink(TwoRanks):
    """NCCL sees that it is one machine: what is left is what sending steps over TCP costs."""

    hosts = 2
    same_machine = True
