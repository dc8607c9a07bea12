"""The only place that imports pyverbs' EFA classes: what is needed of them, under their names, or why there is none."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import Unavailable
from kvmesh.transfer.transports.verbs.shim import Api, load

# The first whose SRDQPEx takes RDMA writes.
NEEDED_VERSION = 59


@dataclass(frozen=True, slots=True)
class EfaApi:
    """verbs: what is not EFA's own. can_write: whether SRDQPEx takes RDMA writes."""

    verbs: Api
    can_write: bool
    EfaContext: Any
    EfaAH: Any
    EfaQPInitAttr: Any
    SRDQPEx: Any


def load_efa() -> EfaApi:
    """pyverbs of this machine. Raises Unavailable with the reason."""
    verbs = load()
    try:
        efadv = importlib.import_module("pyverbs.providers.efa.efadv")
        classes = {name: getattr(efadv, name) for name in ("EfaContext", "EfaAH", "EfaQPInitAttr", "SRDQPEx")}
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"pyverbs was built without its EFA provider: {error}") from None
    return EfaApi(verbs=verbs, can_write=int(verbs.version) >= NEEDED_VERSION, **classes)
