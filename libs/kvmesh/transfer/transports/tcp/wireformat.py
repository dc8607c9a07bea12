"""What goes over a stream of a tcp link after the hellos.

writer       u32 immediate, u32 region, u32 runs, u32 flags, u64 bytes, u64 number; runs x (u64 offset, u64 length);
             the bytes, run after run; with FLAG_CHECKSUM u64 crc32 of the bytes
destination  u64 number, u64 bytes: landed; REFUSED: dropped; CORRUPT: the checksum is another
"""

from __future__ import annotations

import struct

HEAD = struct.Struct("<IIIIQQ")
ACK = struct.Struct("<QQ")
TRAILER = struct.Struct("<Q")
RUN_BYTES = 16
REFUSED = (1 << 64) - 1
CORRUPT = (1 << 64) - 2
FLAG_CHECKSUM = 1
MAX_RUNS = 1 << 16
MAX_WRITE_BYTES = 1 << 40
MAX_STREAMS = 16
