"""Which workers could serve a request, and the gateway's own choice among them where no router makes one."""

from __future__ import annotations

import random

from kvmesh.errors import FailedPrecondition
from kvmesh.grammar.vocabulary import version
from kvmesh.proto.v1 import engine_pb2
from services.gateway.decision import Candidate, Decision, NoWorker
from services.gateway.fleet import Fleet
from services.gateway.job import Job, Progress, Share
from services.gateway.link import WorkerLink

ALTERNATES = 3
PREFILL_TARGETS = 3
# Library and version of this gateway's own check.
GRAMMARS = version()


class Choice:
    """Of the workers that this gateway knows."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self._fleet = fleet
        self._rng = rng

    def excluded(self, progress: Progress) -> list[str]:
        """Workers not to be asked again. One that was started anew since it failed may be."""
        now = {member.info.worker_id: member.info.incarnation for member in self._fleet.members()}
        return [
            worker_id
            for worker_id, incarnation in progress.excluded.items()
            if now.get(worker_id, incarnation) == incarnation
        ]

    def _fits(self, link: WorkerLink, job: Job, share: Share) -> bool:
        info = link.info
        return (
            info.model == job.served
            and info.tokenizer_fingerprint in ("", job.fingerprint)
            and share.revision in ("", info.revision)
            and (not share.unified_only(job) or info.role == engine_pb2.WORKER_ROLE_UNIFIED)
            # What compiled here must compile there.
            and (not job.sampling.HasField("grammar") or (info.grammars == GRAMMARS != ""))
        )

    def usable(self, job: Job, progress: Progress, share: Share) -> list[WorkerLink]:
        """Links that could be asked now."""
        return [link for link in self._fleet.links(job.served) if self.eligible(link, job, progress, share)]

    def eligible(self, link: WorkerLink, job: Job, progress: Progress, share: Share) -> bool:
        """Whether a worker may be asked for a share, be it full or not."""
        failed = progress.excluded.get(link.info.worker_id)
        return failed != link.info.incarnation and self._fits(link, job, share)

    def choose(self, job: Job, progress: Progress, share: Share, prefer: WorkerLink | None = None) -> Decision:
        """Power of two choices from the last worker list; the rest follow as alternates, least loaded first. `prefer`
        goes first where it can be used: there is a seat.

        Raises NoWorker, FailedPrecondition where no worker of the model ever could.
        """
        usable = self.usable(job, progress, share)
        if not usable:
            if share.unified_only(job) and not share.heal and self._fleet.links(job.served):
                raise FailedPrecondition("prompt_logprobs needs a worker of role unified, and none serves this model")
            if job.sampling.HasField("grammar") and not share.heal and self._fleet.links(job.served):
                raise FailedPrecondition(f"no worker of model {job.served!r} serves grammars by {GRAMMARS or 'any'}")
            raise NoWorker(f"no worker can serve model {job.served!r} now")
        # A worker that fails what it gets is better than none.
        trusted = [link for link in usable if link.breaker.allows]
        usable = trusted or usable
        some = self._rng.sample(usable, min(2, len(usable)))
        pick = prefer if prefer is not None and prefer in usable else min(some, key=_relative_load)
        # Alternates stay within one model, revision and tokenizer.
        rest = sorted(
            (link for link in usable if link is not pick and link.info.revision == pick.info.revision),
            key=_relative_load,
        )
        chosen = [pick, *rest[:ALTERNATES]]
        return Decision(
            job.served,
            pick.info.revision,
            candidates=[Candidate(link, self._prefill(link)) for link in chosen],
            heeds=bool(trusted),
        )

    def _prefill(self, link: WorkerLink) -> list[engine_pb2.PrefillTarget]:
        """Prefill workers whose pages fit the decode worker, least loaded of two first."""
        info = link.info
        if info.role != engine_pb2.WORKER_ROLE_DECODE or not info.kvtransfer_address:
            return []
        fitting = [
            member
            for member in self._fleet.members()
            if member.info.role == engine_pb2.WORKER_ROLE_PREFILL
            and member.info.state == engine_pb2.WORKER_STATE_SERVING
            and member.info.kvtransfer_address
            and (member.info.model, member.info.revision) == (info.model, info.revision)
            and _same_kv(member.info, info)
        ]
        # Pages of another size are slow: only where there are no others.
        equal = [member for member in fitting if member.info.page_size == info.page_size]
        fitting = equal or fitting
        picked = self._rng.sample(fitting, min(PREFILL_TARGETS, len(fitting)))
        head = sorted(picked[:2], key=lambda member: member.load.queued_tokens)
        return [
            engine_pb2.PrefillTarget(
                worker_id=member.info.worker_id, address=member.info.address, incarnation=member.info.incarnation
            )
            for member in (*head, *picked[2:])
        ]


def _relative_load(link: WorkerLink) -> float:
    """Sequences per seat. Our own open requests count even where the last report does not show them."""
    load = link.load
    known = max(load.running + load.waiting + load.transferring, len(link.demux))
    return known / max(1, link.info.max_batch)


def _same_kv(source: engine_pb2.WorkerInfo, target: engine_pb2.WorkerInfo) -> bool:
    """Whether KV of one can be written into the other's pages, be it token by token."""
    if source.kv_fingerprint and target.kv_fingerprint:
        return source.kv_fingerprint == target.kv_fingerprint
    return source.layout_fingerprint == target.layout_fingerprint
