"""`kvmesh status` tells which transport and which NICs a link goes through, and why not the others."""

from __future__ import annotations

import re

from rich.console import Console

from kvmesh.cli.render import MeshStatus, render
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import kvtransfer_pb2 as pb


def printed(status: MeshStatus) -> str:
    console = Console(width=260, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(status))
    console.file.close()
    return console.export_text()


def row(text: str, *cells: str) -> bool:
    """Whether a line of a table has these cells, in this order."""
    lines = [[cell.strip() for cell in re.split("[│┃]", line)] for line in text.splitlines()]
    return any(cells == tuple(cell for cell in line if cell in cells) for line in lines)


def a_mesh() -> MeshStatus:
    nics = [
        pb.NicStatus(name="mlx5_0", peer="mlx5_4", numa_node=0, rate_gbps=400, used=True, reason="x"),
        pb.NicStatus(name="mlx5_1", peer="mlx5_5", numa_node=-1, used=True),
        pb.NicStatus(name="mlx5_2", peer="mlx5_6", numa_node=1, reason="it failed lately"),
    ]
    candidates = [
        pb.TransportCandidate(name="shm", reason="another host", code="mismatch"),
        pb.TransportCandidate(name="verbs", chosen=True, usable=True, reason="RDMA by mlx5_4", code="chosen"),
        pb.TransportCandidate(name="tcp", usable=True, reason="reaches any host", code="later"),
    ]
    sidecar = pb.GetStatusResponse(
        engine_id="d-engine",
        links=[
            pb.LinkStatus(
                peer_engine_id="p-engine",
                direction="out",
                transport="verbs",
                state="up",
                reason="RDMA by mlx5_4; shm: another host",
                bytes=1_234_567,
                transfers=3,
                candidates=candidates,
                nics=nics,
            )
        ],
        transports=[
            pb.TransportStatus(
                name="verbs",
                usable=True,
                reason="mlx5_0 port 1",
                waiting="a polling thread (16 CPUs or more)",
                nics=[
                    pb.NicStatus(name="mlx5_0", numa_node=0, rate_gbps=400, used=True),
                    pb.NicStatus(name="mlx5_9", numa_node=0, reason="25 Gbit/s, others have 400"),
                ],
            ),
            pb.TransportStatus(name="efa", reason="no EFA device"),
        ],
        threads=[
            pb.ThreadStatus(name="mover", cpus="0-31", reason="NUMA node 0"),
            pb.ThreadStatus(name="verbs poller", reason="switched off"),
        ],
        topology_notes=["GPU 0000:13:00.0: its NUMA node is not told"],
    )
    return MeshStatus(router_pb2.WatchResponse(), {"decode-0": sidecar, "prefill-0": None})


def test_links_tell_their_nics_and_what_they_go_without() -> None:
    text = printed(a_mesh())
    assert row(text, "decode-0", "out", "verbs", "mlx5_0 ↔ mlx5_4", "?, 0", "up", "3", "1,234,567")
    assert "mlx5_1 ↔ mlx5_5" in text
    assert "without mlx5_2 ↔ mlx5_6: it failed lately" in text


def test_every_candidate_is_told_with_its_rank_and_reason() -> None:
    text = printed(a_mesh())
    assert row(text, "decode-0 → p-engine", "1", "shm", "no", "another host")
    assert row(text, "decode-0 → p-engine", "2", "verbs", "chosen", "RDMA by mlx5_4")
    assert row(text, "decode-0 → p-engine", "3", "tcp", "could be", "reaches any host")


def test_both_ends_of_a_link_tell_its_candidates_once() -> None:
    mesh = a_mesh()
    sidecar = mesh.sidecars["decode-0"]
    assert sidecar is not None
    other = pb.GetStatusResponse(
        engine_id="p-engine",
        links=[pb.LinkStatus(peer_engine_id="d-engine", direction="in", candidates=sidecar.links[0].candidates)],
    )
    text = printed(MeshStatus(mesh.fleet, {"decode-0": sidecar, "prefill-0": other}))
    lines = [line for line in text.splitlines() if "decode-0 → prefill-0" in line]
    assert len(lines) == 3


def test_transports_tell_their_nics_and_how_they_wait() -> None:
    text = printed(a_mesh())
    assert row(text, "verbs", "yes", "mlx5_0 400 Gbit/s", "0", "a polling thread (16 CPUs or more)", "mlx5_0 port 1")
    assert "not mlx5_9: 25 Gbit/s, others have 400" in text
    assert row(text, "efa", "no", "no EFA device")
    assert row(text, "prefill-0", "no", "the sidecar does not answer")


def test_threads_and_what_is_not_known() -> None:
    text = printed(a_mesh())
    assert row(text, "decode-0", "mover", "0-31", "NUMA node 0")
    assert row(text, "decode-0", "verbs poller", "any", "switched off")
    assert "topology: GPU 0000:13:00.0: its NUMA node is not told" in text


def test_workers_tell_how_many_ranks_they_have() -> None:
    workers = [
        router_pb2.WorkerStatus(info=engine_pb2.WorkerInfo(worker_id=name, model="m", dtype="bf16", tp=tp))
        for name, tp in (("sharded-0", 3), ("older-0", 0))
    ]
    text = printed(MeshStatus(router_pb2.WatchResponse(workers=workers), {}))
    assert row(text, "sharded-0", "m (bf16)", "3")
    assert row(text, "older-0", "m (bf16)", "1")


def test_an_older_sidecar_tells_less_and_nothing_breaks() -> None:
    old = pb.GetStatusResponse(
        links=[pb.LinkStatus(peer_engine_id="e", direction="in", transport="shm", state="up", reason="one host")],
        transports=[pb.TransportStatus(name="shm", usable=True, reason="one host")],
    )
    text = printed(MeshStatus(router_pb2.WatchResponse(), {"w": old}))
    assert row(text, "w", "e", "in", "shm", "–", "–", "up", "0", "0", "one host")
    assert "candidates" not in text
    assert "threads" not in text
