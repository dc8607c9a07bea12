"""`TensorParallel` on the GPUs of one host over NCCL: one process and one GPU a rank."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from kvmesh.errors import FailedPrecondition, Unavailable

log = logging.getLogger(__name__)

# Read by NCCL and by torch's process group when they start. What the environment says already stays.
# - Watching for lost ranks is the engine's (`RankGroup`, `StepClock`): torch's own watchdog does not see collectives in
#   replayed graphs, and ends the process where we want one terminal for each request.
# - Multicast over NVLink needs rights on the host's fabric that a container rarely has; whoever has them turns it on.
# - Buffers that NCCL registers while a graph is captured are mapped by CUDA's old IPC, which in a virtual
#   machine was measured at a tenth of NVLink; a step's messages are too small to gain by it anyway.
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_GRAPH_REGISTER": "0",
}
# NCCL chooses an algorithm by size and connects it at its first use, which must not be inside a capture.
_WARM_BYTES = tuple(1 << power for power in range(6, 25, 2))
_POLL_S = 0.002
# For a collective of the host's that is being queued while the group is aborted.
_ABORT_LOCK_S = 2.0


class NcclParallel:
    """Collectives are queued on the current stream, like any kernel, and may be captured in a graph; nothing waits for
    them. All ranks must queue and capture them in the same order. The sums are equal to the last bit on every rank.

    A rank that is lost leaves the others' kernels waiting on their devices until `abort`.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float, device: torch.device, name: str = "tp"
    ) -> None:
        """Meet the other ranks at `store` (a torch Store) under `name`; blocks until all are connected.

        device: this rank's alone. timeout_s: for the meeting. Raises Unavailable, FailedPrecondition.
        """
        distributed = _distributed()
        if not distributed.is_nccl_available():
            raise FailedPrecondition("this build of torch has no NCCL")
        count = torch.cuda.device_count()
        if device.index is None or device.index >= count:
            raise FailedPrecondition(f"rank {rank} of {size} needs GPU {device.index}; this process sees {count}")
        self.rank, self.size, self.device = rank, size, device
        self._lock = threading.Lock()
        self._aborted = False
        c10d = distributed.distributed_c10d
        self._sum = _on_current_stream(c10d.AllreduceOptions())
        self._from_leader = _on_current_stream(c10d.BroadcastOptions())
        self._gathered = _on_current_stream(c10d.AllgatherOptions())
        for key, value in _ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        nccl = distributed.ProcessGroupNCCL
        try:
            with torch.cuda.device(device):
                options = nccl.Options()
                options._timeout = timedelta(seconds=timeout_s)
                self._group: Any = nccl(distributed.PrefixStore(name, store), rank, size, options)
                self._warm_up(timeout_s)
        except RuntimeError as error:
            raise Unavailable(f"rank {rank} of {size} does not meet the others: {_first_line(error)}") from error

    def _warm_up(self, timeout_s: float) -> None:
        """Connect everything that steps will use."""
        largest = _WARM_BYTES[-1]
        buffer = torch.zeros(largest, dtype=torch.uint8, device=self.device)
        gathered = torch.zeros(self.size * largest, dtype=torch.uint8, device=self.device)
        for nbytes in _WARM_BYTES:
            x, out = buffer[:nbytes], gathered[: self.size * nbytes]
            for dtype in (torch.float32, torch.bfloat16):
                self.all_reduce(x.view(dtype))
            self.broadcast(x.view(torch.int32))
            self.all_gather_into(out.view(torch.float32), x.view(torch.float32))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        # Not `synchronize`: a rank that stands still here would hold it up for ever.
        deadline = time.monotonic() + timeout_s
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                self.abort()
                raise Unavailable(f"rank {self.rank} of {self.size}: the others do not come within {timeout_s:g} s")
            time.sleep(_POLL_S)
        del buffer, gathered, x, out
        # KV pages are sized by what is free.
        torch.cuda.empty_cache()

    def _queue(self, start: Callable[[], Any]) -> None:
        with self._lock:
            if self._aborted:
                raise Unavailable(f"rank {self.rank} of {self.size}: the group is lost")
            try:
                work = start()
                if work is not None:
                    # Makes the current stream wait, not the host.
                    work.wait()
            except RuntimeError as error:
                message = f"rank {self.rank} of {self.size}: a collective failed: {_first_line(error)}"
                raise Unavailable(message) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel`. x must be contiguous."""
        if x.numel():
            self._queue(lambda: self._group.allreduce([x], self._sum))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel`."""
        parts = x.new_empty(self.size, *x.shape)
        self.all_gather_into(parts, x.contiguous())
        return torch.cat(parts.unbind(0), dim=-1)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel`."""
        if x.numel():
            self._queue(lambda: self._group._allgather_base(out, x, self._gathered))
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel`."""
        if x.numel():
            self._queue(lambda: self._group.broadcast([x], self._from_leader))
        return x

    def abort(self) -> None:
        """See `TensorParallel`: kernels that wait for another rank end at once, in replayed graphs too, and what they
        were to bring is garbage. Every later collective raises Unavailable. Idempotent."""
        # The abort itself also waits for the graphs that use the communicator to be dropped, hence the thread.
        threading.Thread(target=self._abort, name="nccl-abort", daemon=True).start()

    def _abort(self) -> None:
        # Waiting for it has an end: whoever holds it may itself stand in a full launch queue, behind a kernel that
        # waits for a lost rank.
        held = self._lock.acquire(timeout=_ABORT_LOCK_S)
        try:
            if self._aborted:
                return
            self._aborted = True
        finally:
            if held:
                self._lock.release()
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        log.debug("rank %d: communicator aborted", self.rank)


def _on_current_stream(options: Any) -> Any:
    """Options of a collective that is queued on the current stream itself: no stream of its own to wait for, which in
    a captured graph would be a fork and a join each."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
