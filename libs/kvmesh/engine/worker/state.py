"""What state the worker is in, and what follows from it: readiness of its services and what routers are told."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvmesh.errors import Unavailable
from kvmesh.proto.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

ENGINE = "kvmesh.v1.Engine"
DECODE = "kvmesh.v1.Decode"
PREFILL = "kvmesh.v1.Prefill"

ROLES = {
    "prefill": pb.WORKER_ROLE_PREFILL,
    "decode": pb.WORKER_ROLE_DECODE,
    "unified": pb.WORKER_ROLE_UNIFIED,
}


def services_of(role: str, *, has_sidecar: bool) -> tuple[str, ...]:
    """Full names of the services that a role serves. A unified worker without a sidecar cannot prefill for others."""
    served = {"prefill": (ENGINE, PREFILL), "decode": (ENGINE, DECODE), "unified": (ENGINE, DECODE, PREFILL)}[role]
    return served if has_sidecar or role != "unified" else (ENGINE, DECODE)


class WorkerStatus:
    """Starting → serving ⇄ cordoned → draining, with two faults: no progress, and no sidecar.

    Without its sidecar decode still serves (it prefills on its own), so it stays SERVING and only its
    `kvtransfer_address` goes; prefill has nothing to offer then. Cordoned is what routers are told and no more: the
    worker is ready and takes what comes. Runs on the event loop.
    """

    def __init__(self, role: str, *, needs_sidecar: bool) -> None:
        self.role = role
        self.loaded = False
        self.draining = False
        self.stalled = False
        self.cordoned = False
        # Until the first connection the worker is starting; later losses are faults.
        self.sidecar_seen = not needs_sidecar
        self.sidecar_up = False
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change."""
        self._listeners.append(listener)

    def update(
        self,
        *,
        loaded: bool | None = None,
        draining: bool | None = None,
        stalled: bool | None = None,
        cordoned: bool | None = None,
        sidecar_up: bool | None = None,
    ) -> None:
        """Set what is given; tells the listeners if anything changed."""
        before = (self.loaded, self.draining, self.stalled, self.cordoned, self.sidecar_up)
        if loaded is not None:
            self.loaded = loaded
        if draining is not None:
            self.draining = draining
        if stalled is not None:
            self.stalled = stalled
        if cordoned is not None:
            self.cordoned = cordoned
        if sidecar_up is not None:
            self.sidecar_up = sidecar_up
            self.sidecar_seen = self.sidecar_seen or sidecar_up
        if before != (self.loaded, self.draining, self.stalled, self.cordoned, self.sidecar_up):
            log.info("worker state: %s", pb.WorkerState.Name(self.state).removeprefix("WORKER_STATE_").lower())
            for listener in self._listeners:
                listener()

    @property
    def state(self) -> pb.WorkerState.ValueType:
        """As it is told to routers."""
        if self.draining:
            return pb.WORKER_STATE_DRAINING
        if not (self.loaded and self.sidecar_seen):
            return pb.WORKER_STATE_STARTING
        if self.stalled or (self.role == "prefill" and not self.sidecar_up):
            return pb.WORKER_STATE_STALLED
        return pb.WORKER_STATE_CORDONED if self.cordoned else pb.WORKER_STATE_SERVING

    def ready(self, service: str) -> bool:
        """Readiness of one service."""
        if not (self.loaded and self.sidecar_seen) or self.draining or self.stalled:
            return False
        if service == PREFILL or (service == ENGINE and self.role == "prefill"):
            return self.sidecar_up
        return True

    def check_accepting(self) -> None:
        """Raises Unavailable while starting or draining."""
        if self.draining:
            raise Unavailable("this worker is draining")
        if not self.loaded:
            raise Unavailable("the model is still loading")
