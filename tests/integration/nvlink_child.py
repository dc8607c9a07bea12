"""A posting engine in a process of its own, driven by lines of JSON: see test_transfer_nvlink.py."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from nvlink_kit import PostingEngine
from transfer_kit import make_layout


class Served:
    """Only the socket of a SidecarProcess."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket


async def main(socket: Path, life: int) -> None:
    loop = asyncio.get_running_loop()
    sidecar: Any = Served(socket)
    engine = await PostingEngine("child", sidecar, make_layout(), life).connect()
    engine.fill(4)
    print(json.dumps({"ok": True}), flush=True)
    transfer: Any = None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        ask = json.loads(line)
        answer: dict[str, Any] = {"ok": True}
        if ask["do"] == "start":
            descriptor = pb.Descriptor.FromString(bytes.fromhex(ask["descriptor"]))
            transfer = await engine.client.start_transfer(descriptor, {"main": ask["pages"]}, ready_pages=ask["ready"])
            answer["transport"] = transfer.transport
        elif ask["do"] == "layers":
            if ask["hold"]:
                engine.backend.gate.clear()
            step = engine.begin([transfer], ask["first"], ask["count"])
            assert step is not None
            for layer in range(ask["layers"]):
                step.layer(layer)
        elif ask["do"] == "open":
            slot = await engine.open(ask["pages"])
            answer["descriptor"] = engine.describe(slot, ask["pages"]).SerializeToString().hex()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
