"""How one request on decode gets its prompt's KV from a prefill worker: one coroutine, one function a named step.

    admitted → open slot → expose → call prefill → every byte landed → kv_ready
                  └────── any failure: close slot → drained → next target → … → prefill here

What must hold at every await, since a request may be cancelled at any of them:
- a slot that was opened is closed by somebody, also when its opening is still under way;
- pages are exposed before the descriptor leaves and stay so until the slot is complete or drained. Giving up hands
  that wait to a task of its own, which outlives the request;
- `kv_ready` is called only after the sidecar has counted every byte of the plan, and where KV travels through host
  memory, only after it has been copied from there; what a NIC wrote to a GPU has been flushed before, where it must be.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import Any

from kvmesh.engine.cuda.staging import Lease
from kvmesh.engine.events import Admitted
from kvmesh.engine.failures import DeviceFailed
from kvmesh.engine.worker.awaiting import AwaitingRequest
from kvmesh.engine.worker.context import WorkerContext
from kvmesh.engine.worker.prefill_call import PrefillCall
from kvmesh.engine.worker.steps import RequestStep
from kvmesh.engine.worker.tail import ExposedTail
from kvmesh.errors import Cancelled, DeadlineExceeded, KvmeshError, TransferFailed
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.rpc.limits import Deadline
from kvmesh.telemetry import about, names, tracing
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.descriptor import build_descriptor, slot_bytes
from kvmesh.transfer.handles import SlotHandle, SlotResult

log = logging.getLogger(__name__)

ACCEPTED_S = 0.05


class _NoSlot(Exception):
    """Our own sidecar cannot take a slot: another target would not help."""


class _Gone(Exception):
    """The request ended or went on by itself: nothing is wanted from elsewhere any more."""


class RemotePrefill:
    """The flow of one admission. `run` is spawned when the core reports that the request awaits KV, and cancelled when
    the request ends."""

    def __init__(self, ctx: WorkerContext, request: AwaitingRequest, admitted: Admitted) -> None:
        self._ctx = ctx
        self._request = request
        self._key = request.key
        layout = ctx.identity.layout
        tokens = admitted.resumed_token_ids or tuple(request.engine_request.token_ids)
        self._tokens = tokens[: admitted.num_tokens - 1]
        self._first_block = admitted.first_block
        self._resumed = admitted.resumed_token_ids is not None
        self._pages = admitted.pages[admitted.first_block : layout.pages_for(len(self._tokens))]
        # What a descriptor names.
        self._groups: dict[str, Sequence[int]] = {group.name: self._pages for group in layout.groups}
        self._staging = ctx.staging
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Ends with kv_ready or prefill_here; raises CancelledError where the request ended meanwhile."""
        with (
            about.of_request(self._key.request_id),
            tracing.span(names.SPAN_DECODE_REMOTE_PREFILL, parent=self._request.trace_context()),
        ):
            try:
                await self._fetch()
            except Exception:
                # A fault of our own: without this the request would hold its pages until its deadline.
                log.exception("fetching the KV of %s failed", self._request.key.request_id)
                self._request.prefilled_here("failed")
                self._ctx.core.prefill_here(self._key)

    async def _fetch(self) -> None:
        await self._step(RequestStep.ADMITTED)
        cause = "no_target"
        for target in list(self._request.targets):
            try:
                await self._place(target)
            except _NoSlot as error:
                log.warning("no slot for %s: %s", self._request.key.request_id, error)
                cause = "no_sidecar"
                break
            except _Gone:
                return
            except DeviceFailed as error:
                # The worker ends; nobody else would be heard either.
                log.error("the KV of %s is lost: %s", self._request.key.request_id, error.message)
                cause = "failed"
                break
            except KvmeshError as error:
                cause = "failed"
                # A later admission, after a preemption, does not ask it again.
                self._request.targets.remove(target)
                self._failed(target, error)
                if not await self._pages_back():
                    break
            else:
                self._ctx.meters.remote_prefill("ok")
                await self._step(RequestStep.JOINED)
                return
        await self._prefill_here(cause)

    # -- one placement

    async def _place(self, target: pb.PrefillTarget) -> None:
        deadline = self._deadline()
        lease = await self._host_pages(deadline)
        try:
            client, slot = await self._open_slot(deadline)
        except BaseException:
            # No descriptor names them.
            self._return(lease)
            raise
        generation: int | None = None
        try:
            await self._step(RequestStep.SLOT_OPEN)
            generation = self._expose(lease)
            await self._step(RequestStep.EXPOSED)
            tail = ExposedTail()
            result = await self._receive(target, client, slot, deadline, tail)
            if lease is not None and self._staging is not None:
                await self._staging.land(lease)
            if self._ctx.nic_writes is not None:
                self._ctx.nic_writes.landed(result.transport)
            tail.ready(result.transport)
            await self._step(RequestStep.KV_COMPLETE)
        except BaseException as error:
            self._give_up(client, slot, generation, lease, error)
            raise
        self._ctx.core.kv_ready(self._key, generation)
        self._return(lease)
        self._request.received(target, result)

    async def _host_pages(self, deadline: Deadline) -> Lease | None:
        """Pages of host memory for this placement, named in place of the engine's. Raises _NoSlot."""
        if self._staging is None:
            return None
        try:
            lease = await self._staging.take(self._pages, min(deadline.remaining(), self._ctx.lease_s))
        except KvmeshError as error:
            raise _NoSlot(error.message) from None
        self._groups = dict.fromkeys(self._groups, lease.pages)
        return lease

    def _return(self, lease: Lease | None) -> None:
        if self._staging is not None and lease is not None:
            self._ctx.spawn_cleanup(self._staging.give_back(lease), name="staging-back")

    async def _open_slot(self, deadline: Deadline) -> tuple[SidecarClient, SlotHandle]:
        """Register the expectation. Raises _NoSlot."""
        await self._step(RequestStep.OPENING_SLOT)
        client = self._ctx.link.client if self._ctx.link is not None else None
        if client is None:
            raise _NoSlot("no sidecar is connected")
        left = deadline.remaining()
        opening = asyncio.ensure_future(
            client.open_slot(
                expected_bytes=slot_bytes(self._ctx.identity.layout, self._groups),
                groups=self._groups,
                # A prefill worker whose pages have another size sends tokens and not pages.
                num_tokens=len(self._tokens) - self._first_block * self._ctx.identity.layout.page_size,
                request_id=self._request.key.request_id,
                ttl_s=left + self._ctx.lease_s,
                traceparent=tracing.traceparent(),
            )
        )
        try:
            async with asyncio.timeout(min(left, self._ctx.lease_s)):
                return client, await asyncio.shield(opening)
        except BaseException as error:
            # The answer may still come; the slot it brings must not stay open.
            opening.add_done_callback(lambda late: self._close_late(client, late))
            if isinstance(error, KvmeshError):
                raise _NoSlot(error.message) from None
            if isinstance(error, TimeoutError):
                self._ctx.meters.lease_expired("sidecar")
                raise _NoSlot("the sidecar does not answer") from None
            raise

    def _close_late(self, client: SidecarClient, opened: asyncio.Future[SlotHandle]) -> None:
        if not opened.cancelled() and opened.exception() is None:
            why = Cancelled("the request ended while its slot was opened")
            self._give_up(client, opened.result(), None, None, why)

    def _expose(self, lease: Lease | None) -> int:
        """From here on the pages cannot go to anyone else. Raises _Gone."""
        generation = next(self._ctx.serials)
        try:
            self._ctx.core.expose(self._key, generation)
        except Cancelled:
            raise _Gone from None
        if self._staging is not None and lease is not None:
            self._staging.expose(lease, for_write=True)
        return generation

    async def _receive(
        self,
        target: pb.PrefillTarget,
        client: SidecarClient,
        slot: SlotHandle,
        deadline: Deadline,
        tail: ExposedTail,
    ) -> SlotResult:
        """Let prefill write; returns when every byte has landed, raises the reason why it has not."""
        run = pb.RunRequest(
            request_id=self._request.key.request_id,
            attempt=self._request.key.attempt,
            model=self._ctx.identity.served_name,
            token_ids=self._tokens,
            descriptor=build_descriptor(
                client,
                slot,
                groups=self._groups,
                first_block=self._first_block,
                num_tokens=len(self._tokens),
                traceparent=tracing.traceparent(),
            ).SerializeToString(),
            cache_salt=self._request.cache_salt,
            priority=self._request.engine_request.priority,
        )
        await self._step(RequestStep.CALLING_PREFILL)
        timeout = deadline.remaining()
        if timeout <= 0:
            raise DeadlineExceeded("no time is left for prefill")
        # A prompt that prefill holds already may have landed before it is said to be accepted.
        call = PrefillCall(self._ctx.channels, target.address, run, timeout_s=timeout, tenant=self._request.tenant)
        call.accepted.add_done_callback(functools.partial(self._accepted, tail))
        try:
            await self._first(deadline, slot.completed, call.accepted, call.done)
            if call.accepted.done() and not call.accepted.cancelled():
                await self._step(RequestStep.PREFILL_ACCEPTED)
            await self._first(deadline, slot.completed, call.done)
            if not slot.completed.done():
                done = call.done.result()
                # Prefill says that it wrote everything: the last bytes may be counted a moment later, never much later.
                await asyncio.wait({slot.completed}, timeout=self._ctx.lease_s)
                if not slot.completed.done():
                    self._ctx.meters.lease_expired("prefill")
                    raise TransferFailed(f"prefill wrote {done.bytes} bytes, {slot.expected_bytes} were expected")
            result = slot.completed.result()
            if not call.accepted.done():
                # Bytes that prefill held already overtook its answer, which says how many tokens those were.
                await asyncio.wait({call.accepted}, timeout=ACCEPTED_S)
        except BaseException:
            call.cancel()
            raise
        # All bytes are here; what prefill still has to say is only of interest to it.
        self._ctx.spawn(self._see_off(call, tail), name="prefill-see-off")
        return result

    def _accepted(self, tail: ExposedTail, accepted: asyncio.Future[pb.RunAccepted]) -> None:
        if not accepted.cancelled():
            tail.accepted()
            self._request.remote_cached = accepted.result().cached_tokens

    async def _first(self, deadline: Deadline, *futures: asyncio.Future[Any]) -> None:
        """Until one of the futures is done. Raises DeadlineExceeded."""
        done, _ = await asyncio.wait(futures, timeout=deadline.timeout(), return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise DeadlineExceeded("prefill took too long")

    async def _see_off(self, call: PrefillCall, tail: ExposedTail) -> None:
        await asyncio.wait({call.done}, timeout=self._ctx.lease_s)
        if call.done.done() and not call.done.cancelled() and call.done.exception() is None:
            tail.computed(call.done.result().computed_ms)
        call.cancel()

    # -- giving up

    def _give_up(
        self, client: SidecarClient, slot: SlotHandle, generation: int | None, lease: Lease | None, why: BaseException
    ) -> None:
        """The slot is given up; a task of its own gives the pages back once nothing can land in them any more."""
        if generation is not None:
            self._ctx.core.kv_draining(self._key, generation)
        if self._staging is not None and lease is not None:
            self._staging.draining(lease)
        reason = why.message if isinstance(why, KvmeshError) else "cancelled"
        if isinstance(why, asyncio.CancelledError):
            self._ctx.meters.remote_prefill("cancelled")
        draining = self._drain(client, slot, generation, lease, reason)
        self._draining = self._ctx.spawn_cleanup(draining, name="slot-drain")

    async def _drain(
        self, client: SidecarClient, slot: SlotHandle, generation: int | None, lease: Lease | None, reason: str
    ) -> None:
        try:
            await client.close_slot(slot, reason)
        except KvmeshError:
            pass
        except Exception:
            # Whatever it was: the pages come back by `drained` alone.
            log.exception("closing a slot of %s failed", self._request.key.request_id)
        await slot.drained
        if self._staging is not None and lease is not None:
            # Behind a copy to the engine's pages that may be under way.
            await self._staging.give_back(lease)
        if generation is not None:
            self._ctx.core.kv_drained(self._key, generation)
        if slot.completed.done() and not slot.completed.cancelled():
            slot.completed.exception()

    def _failed(self, target: pb.PrefillTarget, error: KvmeshError) -> None:
        self._request.prefill_retries += 1
        self._ctx.meters.remote_prefill(error.reason.lower())
        log.warning(
            "prefill of %s on %s failed: %s", self._request.key.request_id, target.worker_id or target.address, error
        )

    async def _pages_back(self) -> bool:
        """Wait a bounded time until the failed generation is drained; False when its pages must be left behind."""
        await self._step(RequestStep.PLACEMENT_FAILED)
        if self._draining is not None:
            done, _ = await asyncio.wait({self._draining}, timeout=self._ctx.drain_wait_s)
            if not done:
                return False
        await self._step(RequestStep.DRAINED)
        return True

    async def _prefill_here(self, cause: str) -> None:
        """The rest of the prompt, or all of it in other pages while those of a failed placement still drain."""
        await self._step(RequestStep.LOCAL_PREFILL)
        self._request.prefilled_here(cause)
        self._ctx.core.prefill_here(self._key)

    # --

    def _deadline(self) -> Deadline:
        """What a placement may take: the rest of the time to first token, at most the setting."""
        limit = Deadline.after(self._ctx.settings.prefill_timeout_s)
        left = self._request.limits.current(first_token_seen=self._resumed)
        if left.expired:
            raise DeadlineExceeded("no time is left for prefill")
        return left.earlier(limit)

    async def _step(self, step: RequestStep) -> None:
        await self._ctx.at_step(step, self._request.key)
