"""The export of usage: a JSON line per settled request, appended to a file that several processes share.

A line may come twice when a process died right after it: `id` tells.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from kvmesh.store.limits import Spend
from services.gateway.limits.journal import write_whole

MAX_BYTES = 64 << 20
"""A file that has grown beyond this is put aside under the time of that; nothing is ever deleted here."""


def usage_line(journal: str, spend: Spend) -> str:
    """A settlement as people and programs read it."""
    return json.dumps(
        {
            "id": f"{journal}:{spend.number}",
            "at": dt.datetime.fromtimestamp(spend.at, dt.UTC).isoformat(timespec="milliseconds"),
            "tenant": spend.tenant,
            "key": spend.key,
            "request_id": spend.request_id,
            "model": spend.model,
            "prompt_tokens": spend.prompt,
            "cached_tokens": spend.cached,
            "completion_tokens": spend.completion,
            "cache": spend.cache,
            "code": spend.code,
            "unit": spend.unit,
            # Of the budget that was charged; a request that ends after midnight began in the day before.
            "period": spend.period.partition(":")[2],
            "cost": spend.cost,
        },
        separators=(",", ":"),
    )


class UsageFile:
    """Blocking: call it from a thread."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def write(self, journal: str, spends: Sequence[Spend]) -> bool:
        """Append whole lines: True. Raises OSError, and then none of them is there."""
        data = "".join(usage_line(journal, spend) + "\n" for spend in spends).encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            # Lines of several processes must not mix, and only one of them puts the file aside.
            fcntl.flock(handle, fcntl.LOCK_EX)
            write_whole(handle, data)
            there = os.fstat(handle)
            if there.st_size >= self._max_bytes and there.st_ino == os.stat(self._path).st_ino:
                self._path.rename(self._path.with_name(f"{self._path.name}.{time.time_ns()}"))
        except FileNotFoundError:
            # Put aside by another process between its opening and its lock: the lines are in it all the same.
            pass
        finally:
            os.close(handle)
        return True
