"""Mooncake's transfer engine over tcp, handshake between the two: one synchronous batch of writes.

The clock runs around `batch_transfer_sync_write`, which returns when the writer knows that all is written; nobody is
woken at the target.
"""

import sys
import time

from mooncake.engine import TransferEngine
from pair import Target, arguments, checksum, memory, say, serve_writer, told

args = arguments()
pool = memory(args)
engine = TransferEngine()
if engine.initialize("127.0.0.1", "P2PHANDSHAKE", args.transport, ""):
    raise SystemExit("mooncake does not start")
if engine.register_memory(pool.ctypes.data, pool.nbytes):
    raise SystemExit("mooncake does not take the memory")


def serve_target():
    say(name=f"127.0.0.1:{engine.get_rpc_port()}", address=pool.ctypes.data)
    while (order := told(sys.stdin)) is not None:
        say(crc=checksum(pool, order["check"]))


def serve():
    target = Target()
    there = target.hear()

    def move(src, dst):
        size = args.page_bytes
        origin = [pool.ctypes.data + page * size for page in src]
        to = [there["address"] + page * size for page in dst]
        begin = time.monotonic()
        failed = engine.batch_transfer_sync_write(there["name"], origin, to, [size] * len(src))
        took = time.monotonic() - begin
        if failed:
            raise SystemExit(f"the transfer failed: {failed}")
        return took

    serve_writer(pool, target, move, "mooncake")


serve_target() if args.target else serve()
