"""What every connection to the sidecar's door has in common: regions as a hello tells of them, refusals as errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvmesh import errors
from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb

_BY_REASON: dict[str, type[KvmeshError]] = {
    cls.reason: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KvmeshError)
}


def refusal(refused: pb.Refused) -> KvmeshError:
    """What the sidecar refused, as the error that it is."""
    return _BY_REASON.get(refused.reason, Unavailable)(refused.message)


def region_infos(regions: Mapping[str, Region], names: Iterable[str], rank: int) -> list[pb.RegionInfo]:
    """One rank's regions, as its hello tells of them."""
    infos = []
    for name in names:
        region = regions[name]
        info = pb.RegionInfo(group=name, rank=rank, nbytes=region.nbytes, memory=region.memory, device=region.device)
        if region.dmabuf is not None:
            info.dmabuf = True
            info.dmabuf_offset = region.dmabuf.offset
            info.pci_address = region.dmabuf.pci_address
        infos.append(info)
    return infos


def region_fds(regions: Mapping[str, Region], names: Sequence[str]) -> list[int]:
    """The descriptors that go with `region_infos`: of the regions, then of their dma-bufs. They stay the regions'."""
    dmabufs = (regions[name].dmabuf for name in names)
    return [*(regions[name].fd for name in names), *(dmabuf.fd for dmabuf in dmabufs if dmabuf is not None)]
