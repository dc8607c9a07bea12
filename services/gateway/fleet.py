"""What this gateway knows of the workers: who they are, what they serve, and its links to those that generate."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.channel import MeshChannel
from kvmesh.rpc.tasks import BackgroundTasks
from kvmesh.telemetry import metrics, names
from services.gateway.chains import Kind, kinds_of
from services.gateway.link import LinkState, WorkerLink

log = logging.getLogger(__name__)

GENERATING = (engine_pb2.WORKER_ROLE_DECODE, engine_pb2.WORKER_ROLE_UNIFIED)
# States in which a worker counts as one of its model's, though it may take no request now.
THERE = (engine_pb2.WORKER_STATE_SERVING, engine_pb2.WORKER_STATE_STALLED, engine_pb2.WORKER_STATE_CORDONED)
# Where no router says which aliases there are: alias → model, "" = what most workers serve.
ALIASES = {"auto": ""}


@dataclass(slots=True)
class Member:
    """One worker of the list. `link` is None for a prefill worker."""

    info: engine_pb2.WorkerInfo
    load: engine_pb2.WorkerLoad
    link: WorkerLink | None = None


class Fleet:
    """The worker list, merged over its sources (one a router replica, or the static one).

    A source that lost its connection keeps what it said last, and counts only while no other source is live: with all
    routers gone, the last list stands. A list without anybody who generates is none while frames flow here: routers
    that have just started, or stood still, are about to hear of the workers that we are connected to, within `grace_s`.
    `on_load(link)` follows each frame, `on_change()` each change of what can serve.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        open_channel: Callable[[str], MeshChannel],
        tasks: BackgroundTasks,
        silence_s: float,
        on_load: Callable[[WorkerLink], None],
        on_change: Callable[[], None],
        grace_s: float = 0.0,
    ) -> None:
        self.gateway_id = gateway_id
        self._grace_s = grace_s
        self._open_channel = open_channel
        self._tasks = tasks
        self._silence_s = silence_s
        self._on_load = on_load
        self._on_change = on_change
        self._sources: dict[str, dict[str, router_pb2.WorkerStatus]] = {}
        self._aliases: dict[str, dict[str, str]] = {}
        self._live: set[str] = set()
        self._members: dict[str, Member] = {}
        self._links: set[WorkerLink] = set()
        self._kinds: dict[str, list[Kind]] = {}
        self._unlisted: set[str] = set()
        self._grace: asyncio.TimerHandle | None = None
        # A gateway that never hears of a worker has none, and an alert is to know.
        metrics.at_zero(names.GATEWAY_WORKERS, [state.value for state in LinkState])
        self.known = asyncio.Event()
        """Set once any source has given a whole list."""

    # --- sources
    def update(self, source: str, change: router_pb2.WatchResponse) -> None:
        """Take one message of a Watch."""
        workers = self._sources.setdefault(source, {})
        before = set(workers)
        if change.snapshot:
            workers.clear()
            self._aliases[source] = dict(change.aliases)
            self._live.add(source)
            self.known.set()
        for status in change.workers:
            workers[status.info.worker_id] = status
        for worker_id in change.removed:
            workers.pop(worker_id, None)
        structural = change.snapshot or bool(change.removed) or set(workers) != before
        self._merge(change.workers, structural=structural)

    def source_lost(self, source: str) -> None:
        """The source's connection broke; what it said stays until another source is live."""
        self._live.discard(source)
        if self._live:
            self._merge((), structural=True)

    def _believe(self) -> None:
        """The time of grace is over: what no router lists is gone."""
        if self._unlisted:
            for worker_id in self._unlisted & set(self._members):
                self._drop(worker_id)
            self._unlisted.clear()
            self.changed()

    def forget(self, source: str) -> None:
        """Drop a source and all it said."""
        self._live.discard(source)
        self._aliases.pop(source, None)
        if self._sources.pop(source, None) is not None:
            self._merge((), structural=True)

    def _merge(self, changed: Iterable[router_pb2.WorkerStatus], *, structural: bool) -> None:
        for status in changed:
            self._put(status)
        if structural:
            sources = [self._sources[name] for name in self._live] or list(self._sources.values())
            wanted = {worker_id for workers in sources for worker_id in workers}
            if any(status.info.role in GENERATING for workers in sources for status in workers.values()):
                self._unlisted.clear()
                if self._grace is not None:
                    self._grace.cancel()
            elif self._grace_s > 0 and not self._unlisted:
                self._unlisted = {member.info.worker_id for member in self._members.values() if _flows(member)}
                self._grace = asyncio.get_running_loop().call_later(self._grace_s, self._believe)
            wanted |= self._unlisted
            for worker_id in [known for known in self._members if known not in wanted]:
                self._drop(worker_id)
            for workers in sources:
                for worker_id, status in workers.items():
                    if worker_id not in self._members:
                        self._put(status)
        self.changed()

    def _put(self, status: router_pb2.WorkerStatus) -> None:
        info = status.info
        member = self._members.get(info.worker_id)
        if member is not None and member.info.incarnation != info.incarnation:
            # A replica that lags may still name the incarnation before; the one whose frames flow is the living one.
            if member.link is not None and member.link.open:
                return
            self._drop(info.worker_id)
            member = None
        if member is None:
            member = self._members[info.worker_id] = Member(info, status.load)
            if info.role in GENERATING:
                member.link = self._connect(info)
        member.info = info
        member.load = status.load
        if member.link is not None:
            member.link.info = info
            if not member.link.open and status.HasField("load"):
                member.link.load = status.load

    def _connect(self, info: engine_pb2.WorkerInfo) -> WorkerLink:
        link = WorkerLink(
            info,
            gateway_id=self.gateway_id,
            open_channel=self._open_channel,
            tasks=self._tasks,
            silence_s=self._silence_s,
            on_load=self._on_load,
            on_state=self.changed,
        )
        self._links.add(link)
        link.start()
        return link

    def _drop(self, worker_id: str) -> None:
        member = self._members.pop(worker_id)
        if member.link is not None:
            member.link.retire()

    def changed(self) -> None:
        """Something that decides what can serve has changed."""
        for worker_id in [each for each in self._unlisted if each in self._members]:
            if not _flows(self._members[worker_id]):
                self._unlisted.discard(worker_id)
                self._drop(worker_id)
        self._kinds.clear()
        self._links = {link for link in self._links if link.state is not LinkState.CLOSED}
        states = [link.state for link in self._links]
        for state in LinkState:
            metrics.gauge(names.GATEWAY_WORKERS).labels(state.value).set(states.count(state))
        self._on_change()

    # --- questions
    def members(self) -> Iterator[Member]:
        """All workers of the list."""
        return iter(self._members.values())

    def links(self, model: str = "") -> list[WorkerLink]:
        """Links on which a request for `model` ("" = any) may be placed now."""
        found = [member.link for member in self._members.values() if member.link is not None]
        return [link for link in found if link.accepting and (not model or link.info.model == model)]

    def link(self, info: engine_pb2.WorkerInfo) -> WorkerLink | None:
        """The link to a worker that a router named; one it knows before our Watch does is connected now."""
        if info.role not in GENERATING or not info.address:
            return None
        member = self._members.get(info.worker_id)
        if member is None or member.info.incarnation != info.incarnation:
            self._put(router_pb2.WorkerStatus(info=info))
            member = self._members[info.worker_id]
        if member.link is None or member.info.incarnation != info.incarnation:
            return None
        return member.link

    @property
    def ready(self) -> bool:
        """True when at least one worker can take a request."""
        return bool(self.links())

    def example(self, model: str) -> engine_pb2.WorkerInfo | None:
        """A worker of the model or of what an alias stands for, one that can serve if there is any."""
        known = {m.info.model for m in self._members.values()}
        target = None if model in known else self.aliases().get(model)
        candidates = [m.info for m in self._members.values() if m.info.role in GENERATING]
        ready = [link.info for link in self.links()]
        for infos in (ready, candidates):
            if target == "":
                names_ = sorted(info.model for info in infos)
                chosen = max(sorted(set(names_)), key=names_.count) if names_ else None
            else:
                chosen = target or model
            for info in infos:
                if info.model == chosen:
                    return info
        return None

    def kinds(self, model: str) -> list[Kind]:
        """The kinds of prefix cache among the workers of a model."""
        kinds = self._kinds.get(model)
        if kinds is None:
            kinds = self._kinds[model] = kinds_of((member.info for member in self._members.values()), model)
        return kinds

    def aliases(self) -> dict[str, str]:
        """Alias → model ("" = what most workers serve), as the routers say; the built-in ones where none does."""
        told = {alias: model for given in self._aliases.values() for alias, model in given.items()}
        return told or ALIASES

    def context(self, model: str) -> int:
        """Longest prompt + output in tokens that EVERY worker of the model takes, so that any of them can serve it.

        A worker's pool may hold less than the model's context.
        """
        infos = [m.info for m in self._members.values() if m.info.role in GENERATING and m.info.model == model]
        pools = [info.total_pages * info.page_size for info in infos if info.total_pages and info.page_size]
        return min([info.max_model_len for info in infos] + pools, default=0)

    def models(self) -> list[pb.Model]:
        """Served models with their worker counts, by name."""
        found: dict[str, pb.Model] = {}
        for member in self._members.values():
            info = member.info
            if info.state not in THERE:
                continue
            model = found.get(info.model)
            if model is None:
                model = found[info.model] = pb.Model(
                    name=info.model,
                    revision=info.revision,
                    max_model_len=info.max_model_len,
                    architecture=info.architecture,
                    dtype=info.dtype,
                )
            model.max_model_len = min(model.max_model_len, info.max_model_len)
            if info.role == engine_pb2.WORKER_ROLE_PREFILL:
                model.prefill_workers += 1
            elif info.role == engine_pb2.WORKER_ROLE_DECODE:
                model.decode_workers += 1
            elif info.role == engine_pb2.WORKER_ROLE_UNIFIED:
                model.unified_workers += 1
        return [found[name] for name in sorted(found)]

    def close(self) -> None:
        """Close every link."""
        self._members.clear()
        for link in list(self._links):
            link.close()


def _flows(member: Member) -> bool:
    return member.link is not None and member.link.open
