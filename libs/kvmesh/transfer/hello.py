"""What every connection to the sidecar's door has in common: regions as a hello tells of them, refusals as errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    return [
        pb.RegionInfo(
            group=name,
            rank=rank,
            nbytes=regions[name].nbytes,
            memory=regions[name].memory,
            device=regions[name].device,
        )
        for name in names
    ]
