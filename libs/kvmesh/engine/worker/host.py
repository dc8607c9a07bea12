"""An engine's process on a host that is not its leader's: health and metrics, and the ranks of that host.

Up: server bound (NOT_SERVING) → entered at the leader, ranks started → ready when the leader says that the
group serves.
Down: it ends with the group. Told to stop, it asks the leader to finish what is under way, and waits for its end: the
leader needs the ranks for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from kvmesh.config import WorkerSettings
from kvmesh.engine.parallel.agent import HostAgent
from kvmesh.engine.worker.bootstrap import Worker
from kvmesh.engine.worker.joining import agent_plan, mesh_token
from kvmesh.engine.worker.loading import compute_threads, in_thread, rank_logs
from kvmesh.engine.worker.state import ENGINE
from kvmesh.errors import Unavailable
from kvmesh.rpc.limits import Deadline
from kvmesh.rpc.service import Service, ServiceContext

log = logging.getLogger(__name__)

# After the drain timeout, for a leader that was told to stop at the same moment.
LEAVE_S = 15.0


class RankHost:
    """`Service` of such a process."""

    def __init__(self, service: ServiceContext[Any]) -> None:
        self.service = service
        self.settings: WorkerSettings = service.settings
        self._agent: HostAgent | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # The name of the leader's, so that one probe fits both.
        service.server.add_readiness(ENGINE)

    async def started(self) -> None:
        """Enter the group. Raises what makes this host useless to it."""
        settings, loop = self.settings, asyncio.get_running_loop()
        logs = rank_logs(settings)
        plan = await in_thread(lambda: agent_plan(settings, compute_threads(settings), logs), name="model-revision")

        def from_thread(call: Any, *args: Any) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(call, *args)

        self._agent = agent = HostAgent(
            plan, mesh_token(settings), lambda: from_thread(self._serves), lambda why: from_thread(self._settle, why)
        )
        await in_thread(agent.join, name="join")
        self.service.ready_info.update(ranks=agent.pids, host=settings.tp_host_rank)
        self.service.tasks.spawn(self._follow(), name="group")
        log.info("host %d of %d has entered at %s", settings.tp_host_rank, settings.tp_hosts, settings.tp_leader)

    def _serves(self) -> None:
        if not self._ended.done():
            self.service.server.set_ready(True)

    def _settle(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def _follow(self) -> None:
        """The end of this process with the group."""
        reason = await asyncio.shield(self._ended)
        self.service.server.set_ready(False)
        if reason:
            raise Unavailable(f"the group is lost: {reason}")
        log.info("the leader has ended the group")
        if not self.service.server.draining:
            self.service.server.request_stop()

    async def drain(self, deadline: Deadline) -> None:
        """SIGTERM: ask the leader for the end, and wait for it."""
        if self._agent is not None and not self._ended.done():
            await in_thread(self._agent.leave, name="leave")
            await asyncio.wait({self._ended}, timeout=deadline.remaining())

    async def close(self) -> None:
        """End the ranks that still run, after the leader has had its time."""
        if self._agent is None:
            return
        if self.service.server.draining and self._agent.pids and not self._ended.done():
            await asyncio.wait({self._ended}, timeout=LEAVE_S)
        await in_thread(self._agent.close, name="agent-close")


def worker_or_host(service: ServiceContext[Any]) -> Service:
    """What the settings make of this process: an engine, or a host of an engine's ranks."""
    return RankHost(service) if service.settings.tp_host_rank else Worker(service)
