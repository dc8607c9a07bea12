"""The engine's doorbell where a GPU rings it: its page is registered with the driver, so that kernels store into it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvmesh.engine.nvlink.driver import CudaDriver, load
from kvmesh.engine.nvlink.host import address_of
from kvmesh.errors import Unavailable
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell

# A region for it has a whole page: that is what is pinned.
PAGE_BYTES = 4096
RING_S = 5.0


class HostBell(Doorbell):
    """`value` is what the device has stored so far; `device_pointer` is where its kernels store.

    The device counts for itself, so the host must not store: `ring` has the device do it, by `ringer(rings)`, which
    queues that many on the stream on which steps ring. Whoever rings steps sets it.
    """

    def __init__(self, region: Region, device: int) -> None:
        """Raises FailedPrecondition without a driver, Unavailable where it does not register memory."""
        super().__init__(region.buf)
        self.ringer: Callable[[int], None] | None = None
        self._driver: CudaDriver = load()
        self._driver.set_device(device)
        self._device = device
        self._registered = address_of(region)
        self.device_pointer = self._driver.register_host(self._registered, region.nbytes)
        self._closed = False

    def ring(self) -> int:
        """One ring that belongs to no layer (a step broke off); returns the new value, once the device has stored it.
        Raises Unavailable where it does not."""
        if self.ringer is None:
            return super().ring()
        before = self.value
        self.ringer(1)
        until = time.monotonic() + RING_S
        while (value := self.value) == before:
            if time.monotonic() > until:
                raise Unavailable("the GPU does not ring the doorbell")
            time.sleep(0.0005)
        return value

    def close(self) -> None:
        """Unregister. Idempotent. No kernel may use it any more."""
        if not self._closed:
            self._closed = True
            self.ringer = None
            self._driver.set_device(self._device)
            self._driver.unregister_host(self._registered)
            super().close()
