"""A KV region in a GPU's memory that another process can map: allocated by cuMem, exported as a POSIX descriptor."""

from __future__ import annotations

import logging
import os
from typing import Any

from kvmesh.engine.nvlink.driver import CudaDriver, load
from kvmesh.errors import InvalidArgument, Unavailable
from kvmesh.kv.region import DmaBuf

log = logging.getLogger(__name__)


class CudaRegion:
    """`nbytes` bytes of a GPU. Like `kvmesh.kv.region.Region` to a sidecar's client: it has `fd`, `nbytes`, `memory`.

    address: where this process's kernels find it. `__cuda_array_interface__` makes it an array of bytes:
    `torch.as_tensor(region, device=…)`; such tensors may not outlive the region. New memory is not zeroed.
    dmabuf: the same memory for a NIC, owned by the region; None where it was not asked for, or cannot be had.
    """

    memory = "cuda"

    def __init__(self, name: str, nbytes: int, device: int, *, dmabuf: bool = False) -> None:
        """dmabuf: export it for NICs too, where the device can. Raises Unavailable (no memory, no driver's help),
        FailedPrecondition (no driver)."""
        if nbytes < 1:
            raise InvalidArgument(f"region {name!r} of {nbytes} bytes")
        self._driver: CudaDriver = load()
        self.name = name
        self.nbytes = nbytes
        self.ordinal = device
        self.device = self._driver.device_uuid(device)
        self._driver.set_device(device)
        self._size = padded(nbytes, self._driver.granularity(device))
        handle = self._driver.create(device, self._size)
        try:
            self._fd = self._driver.export_fd(handle)
            try:
                os.set_inheritable(self._fd, False)
                self.address = self._driver.map(handle, self._size, device)
            except BaseException:
                os.close(self._fd)
                raise
        finally:
            # The mapping keeps it.
            self._driver.release(handle)
        self._closed = False
        self.dmabuf: DmaBuf | None = None
        if dmabuf:
            self.dmabuf = self._exported()

    def _exported(self) -> DmaBuf | None:
        if not self._driver.has_dmabufs(self.ordinal):
            log.warning("GPU %s does not export its memory as dma-bufs", self.device)
            return None
        try:
            # The whole allocation: a multiple of any host's page size.
            where = self._driver.pci_address(self.ordinal)
            fd = self._driver.export_dmabuf(self.address, self._size)
        except Unavailable as error:
            log.warning("region %s is not exported as a dma-buf: %s", self.name, error.message)
            return None
        os.set_inheritable(fd, False)
        return DmaBuf(fd, 0, where)

    @property
    def fd(self) -> int:
        """The descriptor, owned by the region."""
        if self._closed:
            raise InvalidArgument(f"region {self.name!r} is closed")
        return self._fd

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def close(self) -> None:
        """Unmap it here. Idempotent. No kernel of this process may use it any more."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)
            dmabuf, self.dmabuf = self.dmabuf, None
            if dmabuf is not None:
                os.close(dmabuf.fd)
            self._driver.unmap(self.address, self._size)


class PeerRegion:
    """Another process's CudaRegion, mapped for the use of our `device`."""

    def __init__(self, fd: int, nbytes: int, device: int) -> None:
        """The descriptor stays the caller's. Raises Unavailable where the driver does not let us."""
        self._driver: CudaDriver = load()
        self._driver.set_device(device)
        self.nbytes = nbytes
        self._size = padded(nbytes, self._driver.granularity(device))
        handle = self._driver.import_fd(fd)
        try:
            self.address = self._driver.map(handle, self._size, device)
        finally:
            self._driver.release(handle)
        self._closed = False

    def close(self) -> None:
        """Unmap it. Idempotent. No kernel may use it any more."""
        if not self._closed:
            self._closed = True
            self._driver.unmap(self.address, self._size)


def padded(nbytes: int, granularity: int) -> int:
    """Bytes of the allocation behind a region of `nbytes`."""
    return -(-nbytes // granularity) * granularity
