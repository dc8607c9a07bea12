"""Files that may change while a service runs: read when their state on disk changes, never trusted half-written."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp:
    """What changes when the file does: mtime in ns, size, inode (a rename into place changes the inode)."""
    info = os.stat(path)
    return info.st_mtime_ns, info.st_size, info.st_ino


def read_bounded(path: Path, limit: int) -> bytes:
    """Contents of a file of at most `limit` bytes; ValueError above."""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit} bytes")
    return data


class ReloadingFile(Generic[T]):
    """A parsed value that follows one or more files.

    `get` looks at the files at most every `interval_s`. A broken or missing new version is logged once and the old
    value stays; the first load must succeed (its error is raised). A new version of more than `aside_bytes` is loaded
    beside, on a thread: an event loop that calls `get` must not stand still meanwhile.
    """

    def __init__(
        self,
        paths: list[Path],
        load: Callable[[], T],
        *,
        what: str,
        interval_s: float = 1.0,
        aside_bytes: int | None = None,
    ) -> None:
        self._paths = paths
        self._aside_bytes = aside_bytes
        self._loading = False
        self._load = load
        self._what = what
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._stamps = [stamp(path) for path in paths]
        self._value = load()
        self._checked = time.monotonic()
        self.version = 1

    def get(self) -> T:
        """The present value; reloads first when the files have changed."""
        now = time.monotonic()
        with self._lock:
            if now - self._checked >= self._interval_s and not self._loading:
                self._checked = now
                self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            stamps = [stamp(path) for path in self._paths]
        except OSError as exc:
            if self._stamps:
                log.error("%s: %s; the old version stays in use", self._what, exc.strerror)
            self._stamps = []
            return
        if stamps == self._stamps:
            return
        self._stamps = stamps
        if self._aside_bytes is not None and sum(size for _, size, _ in stamps) > self._aside_bytes:
            self._loading = True
            threading.Thread(target=self._load_aside, name="reload", daemon=True).start()
            return
        self._take(self._loaded())

    def _load_aside(self) -> None:
        loaded = self._loaded()
        with self._lock:
            self._loading = False
            self._take(loaded)

    def _loaded(self) -> tuple[T] | None:
        try:
            return (self._load(),)
        except Exception as exc:
            # The class only: a parse error may quote the file, and the file holds secrets.
            log.error("%s: new version is unusable (%s); the old one stays in use", self._what, type(exc).__name__)
            return None

    def _take(self, loaded: tuple[T] | None) -> None:
        if loaded is None:
            return
        (self._value,) = loaded
        self.version += 1
        log.info("%s: reloaded", self._what)
