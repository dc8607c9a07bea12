"""Asks workers again for what the semantic cache answered, so that the router can judge how often it is wrong.

Nobody waits for it: at most a few at a time, at the lowest priority, with limits of their own, and none at all while
the fleet has little room. What goes wrong costs a sample.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.limits import RequestLimits
from kvmesh.rpc.tasks import BackgroundTasks
from services.gateway.generation import Generation
from services.gateway.heals import Heals
from services.gateway.job import Job
from services.gateway.link import WorkerLink
from services.gateway.placement import Placer
from services.gateway.registry import new_id
from services.gateway.routers import Replica, Routers
from services.gateway.sink import RequestSettings

log = logging.getLogger(__name__)

PRIORITY = -1_000_000
"""Below whatever a client may have: pages are taken from a shadow first."""


@dataclass(frozen=True, slots=True)
class ShadowLimits:
    """What shadows may take: so many at a time; milliseconds to the first token and in total."""

    concurrency: int = 2
    ttft_ms: int = 10_000
    total_ms: int = 120_000


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED


class Collected:
    """A `Sink` that keeps the answer."""

    def __init__(self) -> None:
        self.revision = ""
        self._model = ""
        self._prompt_tokens = 0
        self._choices: dict[int, _Choice] = {}

    async def waiting(self) -> None:
        """Nobody waits."""

    async def accepted(self, event: pb.Accepted) -> None:
        """See Sink."""
        self._model, self.revision, self._prompt_tokens = event.model, event.revision, event.prompt_tokens

    async def prompt(self, event: pb.PromptScored) -> None:
        """Such requests are not answered from the cache."""

    async def delta(self, event: pb.Delta) -> None:
        """See Sink."""
        choice = self._choices.setdefault(event.choice, _Choice())
        choice.text.append(event.text)
        choice.token_ids.extend(event.token_ids)
        choice.finish = event.finish_reason

    @property
    def answer(self) -> router_pb2.CachedAnswer:
        """As a router knows answers."""
        return router_pb2.CachedAnswer(
            model=self._model,
            revision=self.revision,
            prompt_tokens=self._prompt_tokens,
            choices=[
                router_pb2.CachedChoice(
                    text="".join(choice.text), token_ids=choice.token_ids, finish_reason=choice.finish
                )
                for _, choice in sorted(self._choices.items())
            ],
        )


def crowded(links: Sequence[WorkerLink]) -> bool:
    """True when every worker has half of its seats taken, or more."""

    def taken(link: WorkerLink) -> int:
        load = link.load
        return max(load.running + load.waiting + load.transferring, len(link.demux))

    return all(2 * taken(link) >= link.info.max_batch for link in links)


class Shadows:
    """`busy(model)`: whether the workers of a model have little room. See the module."""

    def __init__(
        self,
        *,
        placer: Placer,
        routers: Routers,
        heals: Heals,
        settings: RequestSettings,
        tasks: BackgroundTasks,
        busy: Callable[[str], bool],
        limits: ShadowLimits | None = None,
    ) -> None:
        self._placer = placer
        self._routers = routers
        self._heals = heals
        self._settings = settings
        self._tasks = tasks
        self._busy = busy
        self._limits = limits or ShadowLimits()
        self._running = 0

    def ask(self, job: Job, shadow_id: str, decided_by: Replica) -> None:
        """In the background; returns at once. `decided_by`: the router that wants to know."""
        if self._running >= self._limits.concurrency or self._busy(job.served):
            self._tell(job, router_pb2.ReportShadowRequest(shadow_id=shadow_id), decided_by)
            return
        self._running += 1
        try:
            task = self._tasks.spawn(self._ask(job, shadow_id, decided_by), name="shadow", essential=False)
        except RuntimeError:
            self._running -= 1
            return
        task.add_done_callback(lambda _: self._done())

    def _done(self) -> None:
        self._running -= 1

    async def _ask(self, job: Job, shadow_id: str, decided_by: Replica) -> None:
        report = router_pb2.ReportShadowRequest(shadow_id=shadow_id)
        sink = Collected()
        shadow = dataclasses.replace(
            job,
            request_id=f"shadow-{job.request_id}"[:128],
            inner_id=new_id(),
            cache=pb.CACHE_MODE_OFF,
            cache_control=pb.CacheControl(),
            session_id="",
            priority=PRIORITY,
            unattended=True,
            limits=RequestLimits.start(self._limits.ttft_ms, self._limits.total_ms),
        )
        try:
            await Generation(
                shadow, self._settings, sink, placer=self._placer, routers=self._routers, heals=self._heals
            ).run()
            report.answer.CopyFrom(sink.answer)
        except KvmeshError as error:
            log.info("shadow of %s was not answered: %s", job.inner_id, error.message)
        self._tell(job, report, decided_by)

    def _tell(self, job: Job, report: router_pb2.ReportShadowRequest, decided_by: Replica) -> None:
        self._routers.report_shadow(report, job.tenant, decided_by)
