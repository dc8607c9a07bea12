"""The named steps of a request on decode and on prefill: what a request can be cancelled at.

Tests hang a hook on them (`at_step`) and cancel at each; nothing else depends on it.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable

from kvmesh.engine.events import RequestKey


class RequestStep(enum.Enum):
    """Where a request is. Each is passed through in code by exactly one call of the hook."""

    # decode
    SUBMITTED = "submitted"  # accepted by the worker, in the core's queue
    ADMITTED = "admitted"  # pages allocated, KV awaited
    OPENING_SLOT = "opening_slot"  # before the sidecar is asked
    SLOT_OPEN = "slot_open"  # expectation registered, pages not exposed
    EXPOSED = "exposed"  # pages may be named in a descriptor
    CALLING_PREFILL = "calling_prefill"  # the descriptor is about to leave
    PREFILL_ACCEPTED = "prefill_accepted"  # bytes may be landing
    KV_COMPLETE = "kv_complete"  # every byte landed, the core does not know yet
    JOINED = "joined"  # handed to the batch
    PLACEMENT_FAILED = "placement_failed"  # the generation is draining
    DRAINED = "drained"  # pages owned again after a failure
    LOCAL_PREFILL = "local_prefill"  # the rest of the prompt is computed here
    FIRST_TOKEN = "first_token"
    DECODING = "decoding"  # a later token
    # prefill
    RUN_RECEIVED = "run_received"  # descriptor checked
    RUN_SUBMITTED = "run_submitted"  # in the core's queue
    RUN_ADMITTED = "run_admitted"  # pages allocated, the sidecar not asked yet
    TRANSFER_STARTED = "transfer_started"  # the sidecar took the descriptor; cached pages leave
    COMPUTING = "computing"  # chunks run, pages leave behind them
    COMPUTED = "computed"  # all KV is in the pages, writes may be outstanding
    SENT = "sent"  # every write completed


StepHook = Callable[[RequestStep, RequestKey], Awaitable[None]]


async def no_hook(step: RequestStep, key: RequestKey) -> None:
    """The hook in production."""
