"""NIXL with its UCX backend: prepared descriptor lists over all pages, one WRITE by indices with a notification.

The clock runs from `transfer` until the writer sees it done and the target has its notification (it polls, as an engine
that waits would). Making the request is outside of the clock.
"""

import os
import sys
import time

from pair import Target, arguments, checksum, memory, say, serve_writer, told

args = arguments()
# shm: UCX wires up over tcp and puts by cma (UCX_PROTO_INFO=y shows it); without tcp the backend does not start.
os.environ["UCX_TLS"] = {"tcp": "tcp", "shm": "sysv,posix,cma,self,tcp"}[args.transport]
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
os.environ.setdefault("UCX_LOG_LEVEL", "ERROR")

import numpy as np  # noqa: E402
from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: E402


def columns(address):
    at = address + np.arange(args.pages, dtype=np.uint64) * np.uint64(args.page_bytes)
    return np.stack([at, np.full_like(at, args.page_bytes), np.zeros_like(at)], axis=1)


pool = memory(args)
# Without a progress thread: an idle agent takes nothing from the others of the same run.
agent = nixl_agent("target" if args.target else "writer", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")


def serve_target():
    say(metadata=agent.get_agent_metadata().hex(), address=pool.ctypes.data)
    writer = told(sys.stdin)
    agent.add_remote_agent(bytes.fromhex(writer["metadata"]))
    say(ok=True)
    while (order := told(sys.stdin)) is not None:
        if "check" in order:
            say(crc=checksum(pool, order["check"]))
            continue
        say(polling=True)
        while not any(agent.get_new_notifs().values()):
            pass
        say(at=time.monotonic())


def serve():
    target = Target()
    there = target.hear()
    remote = agent.add_remote_agent(bytes.fromhex(there["metadata"]))
    target.ask(metadata=agent.get_agent_metadata().hex())
    ours = agent.prep_xfer_dlist("NIXL_INIT_AGENT", columns(pool.ctypes.data), "DRAM")
    theirs = agent.prep_xfer_dlist(remote, columns(there["address"]), "DRAM")

    def move(src, dst):
        target.ask(poll=True)
        handle = agent.make_prepped_xfer("WRITE", ours, np.asarray(src), theirs, np.asarray(dst), b"done")
        begin = time.monotonic()
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = agent.check_xfer_state(handle)
        if state == "ERR":
            raise SystemExit("the transfer failed")
        end = time.monotonic()
        heard = target.hear()["at"]
        agent.release_xfer_handle(handle)
        return max(end, heard) - begin

    serve_writer(pool, target, move, "nixl")


serve_target() if args.target else serve()
