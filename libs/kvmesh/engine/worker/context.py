"""What the parts of a worker share."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvmesh.config import WorkerSettings
from kvmesh.engine.core import EngineCore
from kvmesh.engine.cuda.staging import Staging
from kvmesh.engine.runner import ModelInfo
from kvmesh.engine.worker.channels import PrefillChannels
from kvmesh.engine.worker.convert import ModelLimits
from kvmesh.engine.worker.gpudirect import NicWrites
from kvmesh.engine.worker.meters import Meters
from kvmesh.engine.worker.pump import EventPump
from kvmesh.engine.worker.steps import StepHook, no_hook
from kvmesh.errors import NotFound
from kvmesh.grammar.compiler import GrammarCompiler
from kvmesh.kv.layout import KvLayout
from kvmesh.rpc.tasks import BackgroundTasks
from kvmesh.transfer.link import SidecarLink

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """What this worker is, constant over its life. `incarnation` is new per process (u64)."""

    worker_id: str
    incarnation: int
    served_name: str
    info: ModelInfo
    layout: KvLayout
    base_seed: bytes
    max_model_len: int
    tokenizer_fingerprint: str = ""


@dataclass(slots=True)
class WorkerContext:
    """The engine and its surroundings, once the model is loaded."""

    settings: WorkerSettings
    identity: Identity
    core: EngineCore
    pump: EventPump
    tasks: BackgroundTasks
    channels: PrefillChannels
    meters: Meters
    link: SidecarLink | None = None
    # Where KV travels through host memory: its pages are named in descriptors in place of the engine's.
    staging: Staging | None = None
    # Where NICs write to the GPU's memory by themselves.
    nic_writes: NicWrites | None = None
    # None: this worker serves no grammars.
    grammars: GrammarCompiler | None = None
    at_step: StepHook = no_hook
    # A slot whose writer is done gets so long to count its last bytes; a sidecar so long to answer.
    lease_s: float = 5.0
    # A failed placement waits so long for its pages before the request goes on with others.
    drain_wait_s: float = 2.0
    # Tasks that give pages back after their request has ended.
    cleanups: set[asyncio.Task[Any]] = field(default_factory=set)
    # Names of placements in the core: unique over the process, so that a late message never meets a new placement.
    serials: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def limits(self) -> ModelLimits:
        """Bounds of a request here."""
        return ModelLimits(
            vocab_size=self.identity.info.vocab_size,
            max_model_len=self.identity.max_model_len,
            page_size=self.identity.layout.page_size,
            num_pages=self.identity.layout.num_pages,
            look_ahead=self.settings.look_ahead,
            max_message_bytes=self.settings.max_message_bytes,
            prompt_logprobs=self.settings.role == "unified",
        )

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """A background task whose failure is logged and ends nothing else."""
        try:
            return self.tasks.spawn(coro, name=name, essential=False)
        except RuntimeError:
            log.debug("%s: the worker is closed", name)
            return asyncio.get_running_loop().create_task(_never(), name=name)

    def spawn_cleanup(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """`spawn` for what must run to its end even when its request is gone; the worker waits for it when it stops."""
        task = self.spawn(coro, name=name)
        self.cleanups.add(task)
        task.add_done_callback(self.cleanups.discard)
        return task

    def check_model(self, model: str) -> None:
        """Raises NotFound for a model that is not served here."""
        if model != self.identity.served_name:
            raise NotFound("this worker does not serve that model", details={"field": "model"})


async def _never() -> Any:
    raise asyncio.CancelledError
