"""One request's view of a flight: it reads the log into its client, and its end is nobody else's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from opentelemetry import trace

from kvmesh.errors import Cancelled, KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.status import row
from kvmesh.telemetry import metrics, names, tracing
from services.gateway.decision import Decision
from services.gateway.flights.flight import Flight
from services.gateway.flights.hub import Flights
from services.gateway.flights.log import Opened, Reader
from services.gateway.flights.parts import Member
from services.gateway.flights.produce import Producer
from services.gateway.job import Job, Progress
from services.gateway.sink import End

if TYPE_CHECKING:
    from services.gateway.request import Request

_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class SharedGenerations:
    """`request.Flights`: views of the flights of `hub`. total_limit_s: see `Producer`."""

    def __init__(self, hub: Flights, total_limit_s: float) -> None:
        self._hub = hub
        self._total_limit_s = total_limit_s

    @property
    def enabled(self) -> bool:
        """Whether a request may lead or follow now."""
        return self._hub.enabled

    def lead(self, request: Request, job: Job, progress: Progress, decision: Decision) -> View:
        """The view of a flight that begins with this request."""
        return View(self._hub, request, job, progress, decision, self._total_limit_s)

    def follow(self, request: Request, job: Job, progress: Progress, decision: Decision) -> View:
        """The view of a flight that runs."""
        return View(self._hub, request, job, progress, decision, self._total_limit_s)


class View:
    """See the module; a `request.Runnable`."""

    def __init__(
        self,
        hub: Flights,
        request: Request,
        job: Job,
        progress: Progress,
        decision: Decision,
        total_limit_s: float,
    ) -> None:
        self._hub = hub
        self._request = request
        self._job = job
        self._progress = progress
        self._decision = decision
        self._producer = Producer(request, job, progress, decision if decision.lead else None, total_limit_s)
        self._flight: Flight | None = None
        self._member: Member | None = None
        self._error: KvmeshError | None = None
        self._prompt_tokens = len(job.token_ids)
        self._tokens = 0

    def stop(self, error: KvmeshError) -> None:
        """End this request, not the flight; the first call counts."""
        if self._error is None:
            self._error = error
        if self._member is not None and self._flight is not None:
            # Now, not when the handler comes out of a write to its client.
            self._member.reader.cut(error)
            self._flight.leave(self._member)

    @property
    def usage(self) -> pb.Usage:
        """What this client has been sent."""
        return pb.Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._tokens)

    async def run(self) -> End | None:
        """See `request.Runnable`."""
        choices = self._job.sampling.n
        if self._decision.lead is not None:
            flight = self._hub.lead(self._decision.lead, choices)
        else:
            assert self._decision.follow is not None
            flight = await self._hub.follow(self._decision.follow, choices)
        if flight is None:
            return None
        self._flight, settings = flight, self._request.settings
        member = self._member = flight.join(
            self._producer, max_tokens=settings.buffer_tokens, max_bytes=settings.buffer_bytes, on_slow=self._slow
        )
        code = 0
        try:
            if self._error is not None:
                raise self._error
            if self._decision.lead is not None:
                flight.lead(member)
            return await self._read(flight, member.reader)
        except KvmeshError as error:
            code = row(error).code.value[0]
            raise
        except BaseException:
            code = row(self._error or Cancelled).code.value[0]
            raise
        finally:
            flight.leave(member)
            # Its reader knows this view: a request that is over goes at once, not with the collector, which a busy
            # gateway would stand still for.
            self._member = None
            if not self._producer.used:
                self._report(code)

    def _slow(self, error: KvmeshError) -> None:
        metrics.counter(names.GATEWAY_SLOW_READERS).inc()
        self._request.stop(error)

    async def _read(self, flight: Flight, reader: Reader) -> End:
        opened = await self._opened(reader)
        if self._decision.lead is None:
            tracing.link(trace.get_current_span(), opened.traceparent, "leader")
        # An alias may stand for another model there than here: the prompt is the same, its tokens are that one's.
        self._prompt_tokens = opened.prompt_tokens
        await self._request.accepted(
            pb.Accepted(
                request_id=self._job.request_id,
                model=opened.model,
                revision=opened.revision,
                seed=opened.seed,
                prompt_tokens=opened.prompt_tokens,
            )
        )
        while deltas := await reader.get():
            for delta in deltas:
                await self._request.delta(delta)
                self._tokens += len(delta.token_ids)
        finished = flight.log.finished
        assert finished is not None
        reasons = [_REASONS.get(reason, "error") for reason in flight.log.finish_reasons()]
        served = pb.Served()
        if self._decision.lead is not None:
            served.CopyFrom(finished.served)
            served.cache = self._decision.cache
            return End(finished.usage, served, reasons, generated=self._producer.generated)
        served.cache = self._decision.cache
        served.decode_worker, served.prefill_worker = finished.served.decode_worker, finished.served.prefill_worker
        return End(self.usage, served, reasons)

    async def _opened(self, reader: Reader) -> Opened:
        opening = asyncio.ensure_future(reader.opened())
        try:
            await asyncio.wait([opening], timeout=self._request.settings.first_metadata_s)
            if not opening.done():
                await self._request.waiting()
            return await opening
        finally:
            opening.cancel()

    def _report(self, code: int) -> None:
        progress = self._progress
        if progress.decision_id and progress.decided_by is not None:
            report = router_pb2.ReportRequest(
                decision_id=progress.decision_id, request_id=self._job.inner_id, code=code, usage=self.usage
            )
            self._request.routers.report(report, self._job.tenant, progress.decided_by)
