"""A rank without torch: answers SETUP with HELLO and what it was told, a step with DONE and its digest."""

from __future__ import annotations

import hashlib
import os
import socket
import sys

from kvmesh.engine.parallel.process import NO_STEPS
from kvmesh.engine.parallel.slots import StepSlots, bytes_for
from kvmesh.engine.parallel.wire import Kind, expect, recv_frame, send_frame, send_note
from kvmesh.kv.region import Region


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def main(sock: socket.socket, steps: int) -> int:
    note = expect(recv_frame(sock), Kind.SETUP).note()
    slots = None
    if steps != NO_STEPS:
        slots = StepSlots(Region.adopt(steps, bytes_for(note["local"]), "steps"), note["local"])
    send_note(sock, Kind.HELLO, note | {"pid": os.getpid(), "shares": slots is not None})
    while (frame := recv_frame(sock)) is not None:
        if frame.kind is Kind.STOP:
            return 0
        if frame.kind is Kind.BIND:
            send_note(sock, Kind.FAILED, {"reason": "it was told to fail"})
            return 1
        if frame.kind is Kind.SLOT:
            assert slots is not None
            send_frame(sock, Kind.DONE, digest(slots.take(note["rank"], int.from_bytes(frame.body, "little"))))
        else:
            send_frame(sock, Kind.DONE, digest(frame.body))
    return 4


if __name__ == "__main__":
    os._exit(main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
