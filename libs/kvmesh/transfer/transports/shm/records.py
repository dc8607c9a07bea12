"""What goes through the socket of a shm link after the hello: counts, and the writer's last word."""

from __future__ import annotations

import struct

# One count, or a word: immediate, kind, bytes.
RECORD = struct.Struct("<IIQ")
KIND_BYTES = 0
KIND_UNMAPPED = 1
