"""What `kvmesh status` prints: workers, links, what was judged for them, transports with their NICs, threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvmesh.proto.v1 import engine_pb2, kvtransfer_pb2, router_pb2


@dataclass(frozen=True)
class MeshStatus:
    """`sidecars` is by worker id; None where the sidecar did not answer."""

    fleet: router_pb2.WatchResponse
    sidecars: dict[str, kvtransfer_pb2.GetStatusResponse | None]


def _enum(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def _table(title: str, *headers: str) -> Table:
    """A table whose cells are folded where they do not fit: half a worker's name tells nothing."""
    return Table(*(Column(header, overflow="fold") for header in headers), title=title)


def render(status: MeshStatus) -> Group:
    """Workers; links with their NICs; what else was judged for each link; transports; threads; a line on the caches."""
    names = {str(reply.engine_id): worker for worker, reply in status.sidecars.items() if reply is not None}
    parts: list[RenderableType] = [_workers(status), _links(status, names)]
    # A table of nothing tells nothing.
    parts += [table for table in (_judged(status, names), _transports(status), _threads(status)) if table.row_count]
    notes = dict.fromkeys(note for reply in status.sidecars.values() if reply for note in reply.topology_notes)
    parts += [Text(f"topology: {note}") for note in notes]
    cache = status.fleet.cache
    parts.append(
        Text(
            f"cache: redis {'up' if cache.redis_ok else 'down'}, embedder {cache.embedder or 'none'}, "
            f"{cache.exact_hits} exact and {cache.semantic_hits} semantic hits, {cache.misses} misses"
        )
    )
    return Group(*parts)


def _workers(status: MeshStatus) -> Table:
    table = _table("workers", "worker", "role", "state", "model", "tp", "address", "running", "waiting", "pages free")
    for entry in status.fleet.workers:
        info, load = entry.info, entry.load
        table.add_row(
            info.worker_id,
            _enum(engine_pb2.WorkerRole.Name(info.role), "WORKER_ROLE_"),
            _enum(engine_pb2.WorkerState.Name(info.state), "WORKER_STATE_"),
            f"{info.model} ({info.dtype})",
            str(info.tp or 1),
            info.address,
            str(load.running),
            str(load.waiting),
            f"{load.free_pages}/{load.total_pages or info.total_pages}",
        )
    return table


def _links(status: MeshStatus, names: dict[str, str]) -> Table:
    headers = ("sidecar of", "peer", "direction", "transport", "NICs", "NUMA", "state", "transfers", "bytes", "why")
    table = _table("links", *headers)
    for worker, reply in status.sidecars.items():
        for link in reply.links if reply is not None else ():
            used = [nic for nic in link.nics if nic.used]
            why = [link.reason, *(f"without {_pair(nic)}: {nic.reason}" for nic in link.nics if not nic.used)]
            table.add_row(
                worker,
                names.get(link.peer_engine_id, link.peer_engine_id),
                link.direction,
                link.transport,
                "\n".join(_pair(nic) for nic in used) or "–",
                _nodes(used),
                link.state,
                str(link.transfers),
                f"{link.bytes:,}",
                "\n".join(why),
            )
    return table


def _judged(status: MeshStatus, names: dict[str, str]) -> Table:
    """Where there was a choice: all candidates, best first; once where both ends tell the same."""
    table = _table("candidates", "link", "rank", "transport", "verdict", "why")
    told: set[tuple[str, ...]] = set()
    for worker, reply in status.sidecars.items():
        for link in reply.links if reply is not None else ():
            peer = names.get(link.peer_engine_id, link.peer_engine_id)
            title = f"{worker} → {peer}" if link.direction == "out" else f"{peer} → {worker}"
            for rank, item in enumerate(link.candidates if len(link.candidates) > 1 else (), 1):
                verdict = "chosen" if item.chosen else ("could be" if item.usable else "no")
                row = (title, str(rank), item.name, verdict, item.reason)
                if row not in told:
                    told.add(row)
                    table.add_row(*row)
    return table


def _transports(status: MeshStatus) -> Table:
    table = _table("transports", "sidecar of", "transport", "usable", "NICs", "NUMA", "waits by", "why")
    for worker, reply in status.sidecars.items():
        if reply is None:
            table.add_row(worker, "–", "no", "–", "–", "–", "the sidecar does not answer")
            continue
        for item in reply.transports:
            used = [nic for nic in item.nics if nic.used]
            why = [item.reason, *(f"not {nic.name}: {nic.reason}" for nic in item.nics if not nic.used)]
            table.add_row(
                worker,
                item.name,
                "yes" if item.usable else "no",
                "\n".join(f"{nic.name} {_rate(nic)}".strip() for nic in used) or "–",
                _nodes(used),
                item.waiting or "–",
                "\n".join(why),
            )
    return table


def _threads(status: MeshStatus) -> Table:
    table = _table("threads", "sidecar of", "thread", "CPUs", "why")
    for worker, reply in status.sidecars.items():
        for thread in reply.threads if reply is not None else ():
            table.add_row(worker, thread.name, thread.cpus or "any", thread.reason)
    return table


def _pair(nic: kvtransfer_pb2.NicStatus) -> str:
    return f"{nic.name} ↔ {nic.peer}" if nic.peer else nic.name


def _rate(nic: kvtransfer_pb2.NicStatus) -> str:
    return f"{nic.rate_gbps:g} Gbit/s" if nic.rate_gbps else ""


def _nodes(nics: Iterable[kvtransfer_pb2.NicStatus]) -> str:
    """NUMA nodes, each once; "?" where one is not told."""
    nodes = sorted({nic.numa_node for nic in nics})
    return ", ".join("?" if node < 0 else str(node) for node in nodes) or "–"
