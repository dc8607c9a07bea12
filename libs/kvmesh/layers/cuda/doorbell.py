"""The doorbell as the GPU rings it: kernels count in device memory and store the count into the mapped host counter.

Reading the host's counter from a kernel costs a round trip over PCIe, so the device keeps the count beside it. The
address of the counter lies in device memory too: a captured graph rings whatever the bell is bound to when it runs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]

from kvmesh.layers.cuda import pdl as launches

_VALUE, _ADDRESS, _NOWHERE = range(3)

NATIVE = not launches.INTERPRETED
"""Whether kernels may hold machine instructions."""

# One thread of the block, one posted store; an atomic would wait for the host's answer.
STORE_SYSTEM = tl.constexpr(
    """{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.release.sys.global.b64 [$1], $2;
    mov.u32 $0, 0;
    }"""
)


@triton.jit  # type: ignore[untyped-decorator]
def ring_bell(state, count, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count and tell the host, behind gdc_wait: what earlier kernels wrote is visible to who sees the new value."""
    value = tl.load(state) + count
    address = tl.load(state + 1)
    if NATIVE:
        tl.inline_asm_elementwise(STORE_SYSTEM, "=r,l,l", [address, value], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(address.to(tl.pointer_type(tl.int64)), value)
    tl.store(state, value)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def ring_kernel(state, count, NATIVE: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ring_bell(state, count.to(tl.int64), NATIVE)


class DeviceBell:
    """The one ringer of a host counter (`kv.ring.Doorbell`), which must not be rung from elsewhere meanwhile.

    counter: address of the counter as the device sees it (mapped pinned memory, registered by the caller), 8-byte
    aligned. value: what the counter holds now. Without a counter the bell counts for itself: for warm-up and capture.
    """

    def __init__(self, device: torch.device | str, counter: int | None = None, value: int = 0) -> None:
        self.state = torch.zeros(3, dtype=torch.int64, device=device)
        """int64 (3,) on the device: the count, the counter's address, and where a bell without a counter stores."""
        self.bind(counter, value)

    def bind(self, counter: int | None, value: int) -> None:
        """Ring another counter from now on, captured graphs included; synchronizes with the current stream.

        No kernel that rings may be queued on another stream.
        """
        address = self.state.data_ptr() + 8 * _NOWHERE if counter is None else counter
        self.state.copy_(torch.tensor([value, address, 0], dtype=torch.int64))
        if self.state.is_cuda:
            torch.cuda.current_stream(self.state.device).synchronize()

    def value(self) -> int:
        """The count on the device; synchronizes."""
        return int(self.state[_VALUE].item())

    def ring(self, count: int = 1, *, pdl: bool = False) -> None:
        """Queue `count` rings at once on the current stream: one kernel of one warp. Capturable."""
        ring_kernel[(1,)](self.state, count, NATIVE=NATIVE, num_warps=1, **launches.options(pdl))


def state_of(ring: DeviceBell | None, otherwise: torch.Tensor) -> Any:
    """What a kernel that may ring takes: the bell's state, or any tensor where it does not."""
    return otherwise if ring is None else ring.state
