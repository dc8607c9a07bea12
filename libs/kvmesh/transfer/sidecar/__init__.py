"""The sidecar's parts: the engine's session, links in, links out. `services/kvtransfer` puts a process around it."""

from kvmesh.transfer.sidecar.options import SidecarOptions
from kvmesh.transfer.sidecar.sidecar import Sidecar

__all__ = ["Sidecar", "SidecarOptions"]
