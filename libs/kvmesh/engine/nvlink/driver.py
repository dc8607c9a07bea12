"""What is used of the CUDA driver, by ctypes: memory that is exported as a descriptor, imported, mapped; nothing else.

No CUDA is needed to import this module; `load()` raises FailedPrecondition where there is no driver.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ulonglong,
    c_ushort,
    c_void_p,
    create_string_buffer,
)
from typing import Any

from kvmesh.errors import FailedPrecondition, Unavailable

_HANDLE_POSIX_FD = 1
_ALLOCATION_PINNED = 1
_LOCATION_DEVICE = 1
_ACCESS_READ_WRITE = 3
_GRANULARITY_RECOMMENDED = 1
_HOST_REGISTER_PORTABLE = 1
_HOST_REGISTER_DEVICEMAP = 2
_ATTRIBUTE_DMA_BUF = 124
_ATTRIBUTE_GPU_DIRECT_RDMA_VMM = 110
_ATTRIBUTE_FLUSH_WRITES_OPTIONS = 117
_ATTRIBUTE_WRITES_ORDERING = 118
_HANDLE_DMA_BUF_FD = 1
_FLUSH_BY_HOST = 1
_ORDERED_FOR_OWNER = 100
_FLUSH_CURRENT_CONTEXT = 0
_FLUSH_TO_OWNER = 100
_PCI_CHARS = 32


class _Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocFlags(Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("gpu_direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _AllocationProp(Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _AllocFlags),
    )


class _AccessDesc(Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class CudaDriver:
    """libcuda's calls, each checked. Devices are ordinals as this process sees them."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self._contexts: dict[int, c_void_p] = {}
        self.check("cuInit", lib.cuInit(0))

    def check(self, what: str, code: int) -> None:
        """Raises Unavailable with the driver's name for the error."""
        if code == 0:
            return
        name = c_char_p()
        self._lib.cuGetErrorName(code, byref(name))
        raise Unavailable(f"{what}: {name.value.decode() if name.value else f'error {code}'}")

    def device_count(self) -> int:
        """GPUs that this process sees."""
        count = c_int()
        self.check("cuDeviceGetCount", self._lib.cuDeviceGetCount(byref(count)))
        return count.value

    def device_uuid(self, device: int) -> str:
        """Names a GPU in every process."""
        raw = (c_ubyte * 16)()
        self.check("cuDeviceGetUuid", self._lib.cuDeviceGetUuid_v2(byref(raw), device))
        return str(uuid.UUID(bytes=bytes(raw)))

    def pci_address(self, device: int) -> str:
        """Of a GPU, as sysfs writes it: 0000:18:00.0."""
        text = create_string_buffer(_PCI_CHARS)
        self.check("cuDeviceGetPCIBusId", self._lib.cuDeviceGetPCIBusId(text, _PCI_CHARS, device))
        return text.value.decode().lower()

    def attribute(self, number: int, device: int) -> int:
        """CUdevice_attribute; 0 where this driver does not know it."""
        value = c_int()
        return value.value if self._lib.cuDeviceGetAttribute(byref(value), number, device) == 0 else 0

    def can_access_peer(self, device: int, peer: int) -> bool:
        """True where `device` can reach the memory of `peer`."""
        can = c_int()
        self.check("cuDeviceCanAccessPeer", self._lib.cuDeviceCanAccessPeer(byref(can), device, peer))
        return bool(can.value)

    def set_device(self, device: int) -> None:
        """Make the device's primary context this thread's."""
        context = self._contexts.get(device)
        if context is None:
            context = c_void_p()
            self.check("cuDevicePrimaryCtxRetain", self._lib.cuDevicePrimaryCtxRetain(byref(context), device))
            self._contexts[device] = context
        self.check("cuCtxSetCurrent", self._lib.cuCtxSetCurrent(context))

    def _prop(self, device: int) -> _AllocationProp:
        prop = _AllocationProp()
        prop.type = _ALLOCATION_PINNED
        prop.handle_types = _HANDLE_POSIX_FD
        prop.location.type = _LOCATION_DEVICE
        prop.location.id = device
        # A NIC may then register it as a dma-buf.
        prop.flags.gpu_direct_rdma = 1 if self.attribute(_ATTRIBUTE_GPU_DIRECT_RDMA_VMM, device) else 0
        return prop

    def granularity(self, device: int) -> int:
        """Sizes of allocations are multiples of this many bytes."""
        size = c_size_t()
        prop = self._prop(device)
        code = self._lib.cuMemGetAllocationGranularity(byref(size), byref(prop), _GRANULARITY_RECOMMENDED)
        self.check("cuMemGetAllocationGranularity", code)
        return size.value

    def create(self, device: int, nbytes: int) -> int:
        """An allocation of a multiple of `granularity`; returns its handle (`release`)."""
        handle = c_ulonglong()
        prop = self._prop(device)
        self.check("cuMemCreate", self._lib.cuMemCreate(byref(handle), c_size_t(nbytes), byref(prop), c_ulonglong(0)))
        return handle.value

    def export_fd(self, handle: int) -> int:
        """A descriptor of an allocation, for another process; the caller's to close."""
        fd = c_int(-1)
        code = self._lib.cuMemExportToShareableHandle(byref(fd), c_ulonglong(handle), _HANDLE_POSIX_FD, c_ulonglong(0))
        self.check("cuMemExportToShareableHandle", code)
        return fd.value

    def import_fd(self, fd: int) -> int:
        """The handle of another process's allocation. The descriptor stays the caller's."""
        handle = c_ulonglong()
        code = self._lib.cuMemImportFromShareableHandle(byref(handle), c_void_p(fd), _HANDLE_POSIX_FD)
        self.check("cuMemImportFromShareableHandle", code)
        return handle.value

    def map(self, handle: int, nbytes: int, device: int) -> int:
        """Map an allocation for the use of `device`; returns its address. Nothing is left where it fails."""
        address = c_ulonglong()
        size = c_size_t(nbytes)
        code = self._lib.cuMemAddressReserve(byref(address), size, c_size_t(0), c_ulonglong(0), c_ulonglong(0))
        self.check("cuMemAddressReserve", code)
        mapped = False
        try:
            self.check("cuMemMap", self._lib.cuMemMap(address, size, c_size_t(0), c_ulonglong(handle), c_ulonglong(0)))
            mapped = True
            access = _AccessDesc()
            access.location.type = _LOCATION_DEVICE
            access.location.id = device
            access.flags = _ACCESS_READ_WRITE
            self.check("cuMemSetAccess", self._lib.cuMemSetAccess(address, size, byref(access), c_size_t(1)))
        except BaseException:
            if mapped:
                self._lib.cuMemUnmap(address, size)
            self._lib.cuMemAddressFree(address, size)
            raise
        return address.value

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map`. No kernel may use the memory any more."""
        self.check("cuMemUnmap", self._lib.cuMemUnmap(c_ulonglong(address), c_size_t(nbytes)))
        self.check("cuMemAddressFree", self._lib.cuMemAddressFree(c_ulonglong(address), c_size_t(nbytes)))

    def release(self, handle: int) -> None:
        """Let go of an allocation; it lives on while it is mapped or another process has it."""
        self.check("cuMemRelease", self._lib.cuMemRelease(c_ulonglong(handle)))

    # -- for NICs

    def has_dmabufs(self, device: int) -> bool:
        """Whether the GPU's memory can be exported as dma-bufs."""
        return bool(self.attribute(_ATTRIBUTE_DMA_BUF, device))

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        """A dma-buf of mapped device memory, in whole pages of the host, from `address` on; the caller's to close."""
        fd = c_int(-1)
        code = self._lib.cuMemGetHandleForAddressRange(
            byref(fd), c_ulonglong(address), c_size_t(nbytes), _HANDLE_DMA_BUF_FD, c_ulonglong(0)
        )
        self.check("cuMemGetHandleForAddressRange", code)
        return fd.value

    def nic_writes_ordered(self, device: int) -> bool:
        """Whether kernels on the GPU see what a NIC has written there without a flush."""
        return self.attribute(_ATTRIBUTE_WRITES_ORDERING, device) >= _ORDERED_FOR_OWNER

    def can_flush_nic_writes(self, device: int) -> bool:
        """Whether `flush_nic_writes` works there."""
        return bool(self.attribute(_ATTRIBUTE_FLUSH_WRITES_OPTIONS, device) & _FLUSH_BY_HOST)

    def flush_nic_writes(self, device: int) -> None:
        """Returns when what NICs have written to the GPU is visible to work that is submitted to it from now on."""
        self.set_device(device)
        code = self._lib.cuFlushGPUDirectRDMAWrites(_FLUSH_CURRENT_CONTEXT, _FLUSH_TO_OWNER)
        self.check("cuFlushGPUDirectRDMAWrites", code)

    def register_host(self, address: int, nbytes: int) -> int:
        """Pin mapped host memory and let the GPU at it; returns its address there."""
        flags = c_uint(_HOST_REGISTER_PORTABLE | _HOST_REGISTER_DEVICEMAP)
        code = self._lib.cuMemHostRegister_v2(c_void_p(address), c_size_t(nbytes), flags)
        self.check("cuMemHostRegister", code)
        pointer = c_ulonglong()
        code = self._lib.cuMemHostGetDevicePointer_v2(byref(pointer), c_void_p(address), c_uint(0))
        try:
            self.check("cuMemHostGetDevicePointer", code)
        except Unavailable:
            self._lib.cuMemHostUnregister(c_void_p(address))
            raise
        return pointer.value

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""
        self.check("cuMemHostUnregister", self._lib.cuMemHostUnregister(c_void_p(address)))

    def copy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """One copy between device addresses, on a stream (its handle)."""
        code = self._lib.cuMemcpyDtoDAsync_v2(c_ulonglong(dst), c_ulonglong(src), c_size_t(nbytes), c_void_p(stream))
        self.check("cuMemcpyDtoDAsync", code)


@functools.cache
def load() -> CudaDriver:
    """The driver. Raises FailedPrecondition where there is none, Unavailable where it does not start."""
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise FailedPrecondition(f"no CUDA driver: {error}") from None
    lib.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))
    return CudaDriver(lib)
