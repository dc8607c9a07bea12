"""The generation that feeds a flight: one request's own, running for all of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from opentelemetry import trace

from kvmesh.errors import Unavailable
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.limits import RequestLimits
from kvmesh.telemetry import tracing
from services.gateway.decision import Decision
from services.gateway.flights.log import FlightLog, Opened
from services.gateway.generation import Generation
from services.gateway.job import Job, Progress
from services.gateway.sink import Ended

if TYPE_CHECKING:
    from services.gateway.request import Request


class LogSink:
    """A `Sink` that appends to a log. What the log has already is left out: an output that cannot be resumed (best_of
    shows nothing before its end) is computed anew, and is the same."""

    def __init__(self, log: FlightLog, fingerprint: str, *, resumed: bool) -> None:
        self._log = log
        self._fingerprint = fingerprint
        self._at = [log.position(choice) if resumed else 0 for choice in range(log.choices)]
        self._chars = [log.chars(choice) if resumed else 0 for choice in range(log.choices)]

    async def waiting(self) -> None:
        """Readers tell their clients themselves."""

    async def accepted(self, event: pb.Accepted) -> None:
        """See Sink."""
        self._log.open(
            Opened(
                event.model,
                event.revision,
                self._fingerprint,
                event.seed,
                event.prompt_tokens,
                traceparent=tracing.traceparent(),
            )
        )

    async def prompt(self, event: pb.PromptScored) -> None:
        """Requests that ask for it share nothing."""

    async def delta(self, event: pb.Delta) -> None:
        """See Sink."""
        known = self._log.position(event.choice) - self._at[event.choice]
        chars = self._log.chars(event.choice) - self._chars[event.choice]
        self._at[event.choice] += len(event.token_ids)
        self._chars[event.choice] += len(event.text)
        if known > 0 or chars > 0:
            del event.token_ids[:known]
            del event.logprobs[:known]
            event.text = event.text[chars:]
        self._log.append(event)


class Producer:
    """`parts.Produce` of one request. `decision`: of the one that leads from the start; it is used once.

    total_limit_s: how long a generation may run whatever its first client's limits are: others may have longer ones,
    and when all have left it ends anyway.
    """

    def __init__(
        self, request: Request, job: Job, progress: Progress, decision: Decision | None, total_limit_s: float
    ) -> None:
        self._request = request
        self._job = job
        self._progress = progress
        self._decision = decision
        self._total_limit_s = total_limit_s
        self._span = trace.get_current_span()
        self.generated = 0
        """See `sink.End`; 0 until it has ended here."""
        self.used = False
        """True once it was called: the report of the request is the generation's then."""

    async def __call__(self, log: FlightLog, flight: router_pb2.Flight | None) -> pb.Finished:
        """See `parts.Produce`."""
        # Whoever begins it, as after a takeover, it is this request's.
        with tracing.use_span(self._span):
            return await self._generate(log, flight)

    async def _generate(self, log: FlightLog, flight: router_pb2.Flight | None) -> pb.Finished:
        self.used = True
        decision, self._decision = self._decision, None
        job = await self._job_for(log)
        opened = log.opened
        buffered = job.sampling.best_of > job.sampling.n
        resume = {} if buffered else {choice: log.token_ids(choice) for choice in range(log.choices)}
        resume = {choice: tokens for choice, tokens in resume.items() if tokens or log.finish_of(choice)}
        ended = {
            choice: Ended(log.finish_of(choice), log.stop_reason(choice)) for choice in resume if log.finish_of(choice)
        }
        request = self._request
        generation = Generation(
            job,
            request.settings,
            LogSink(log, job.fingerprint, resumed=not buffered),
            placer=request.placer,
            routers=request.routers,
            heals=request.heals,
            progress=self._progress,
            decision=decision,
            resume=resume or None,
            ended=ended or None,
            revision=opened.revision if opened is not None else "",
            started=request.started,
            lead=flight,
        )
        end = await generation.run()
        self.generated = end.generated
        return pb.Finished(usage=end.usage, served=end.served)

    async def _job_for(self, log: FlightLog) -> Job:
        """The job without its client's limits and, of a flight that runs, with its seed."""
        job, opened = dataclasses.replace(self._job), log.opened
        if opened is not None:
            if opened.model != job.served:
                await job.retarget(opened.model)
            if opened.fingerprint != job.fingerprint:
                raise Unavailable("the model has another tokenizer now; send the request again")
            sampling = pb.SamplingParams()
            sampling.CopyFrom(job.sampling)
            sampling.seed = opened.seed
            job.sampling = sampling
        total_ms = 1e3 * max(self._total_limit_s, job.limits.total.remaining())
        job.limits = RequestLimits.start(total_ms, total_ms)
        return job
