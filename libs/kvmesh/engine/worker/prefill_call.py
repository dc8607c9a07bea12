"""One call of `Prefill.Run`, as decode sees it."""

from __future__ import annotations

import asyncio
from typing import Any

from kvmesh.engine.worker.channels import PrefillChannels
from kvmesh.errors import TransferFailed
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc
from kvmesh.rpc.auth import tenant_metadata
from kvmesh.rpc.channel import cancelling, raising


class PrefillCall:
    """Runs in a task of its own from construction on, with the trace context of its maker.

    accepted: resolves when prefill took the request; never raises (it is cancelled where the call fails before).
    done: the terminal RunDone, or the KvmeshError of the call. Whoever stops waiting calls `cancel`.
    """

    def __init__(
        self, channels: PrefillChannels, address: str, request: pb.RunRequest, *, timeout_s: float, tenant: str
    ) -> None:
        self.accepted: asyncio.Future[pb.RunAccepted] = asyncio.get_running_loop().create_future()
        self.done: asyncio.Task[pb.RunDone] = asyncio.create_task(
            self._read(channels, address, request, timeout_s, tenant), name="prefill-run"
        )
        # Whoever gave up does not look at the outcome; that is no "exception never retrieved".
        self.done.add_done_callback(_looked_at)

    async def _read(
        self, channels: PrefillChannels, address: str, request: pb.RunRequest, timeout_s: float, tenant: str
    ) -> pb.RunDone:
        channel = channels.acquire(address)
        try:
            call: Any = engine_pb2_grpc.PrefillStub(channel).Run(  # type: ignore[no-untyped-call,unused-ignore]
                request, timeout=timeout_s, metadata=tenant_metadata(tenant)
            )
            with raising(), cancelling(call):
                async for event in call:
                    if event.HasField("accepted") and not self.accepted.done():
                        self.accepted.set_result(event.accepted)
                    elif event.HasField("done"):
                        done: pb.RunDone = event.done
                        return done
            raise TransferFailed("prefill ended its stream without a result")
        finally:
            self.accepted.cancel()
            channels.release(address)

    def cancel(self) -> None:
        """End the call; prefill stops at the next chunk."""
        self.done.cancel()


def _looked_at(task: asyncio.Task[pb.RunDone]) -> None:
    if not task.cancelled():
        task.exception()
