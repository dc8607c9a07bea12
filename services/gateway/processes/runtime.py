"""The folder that the processes of one gateway share: sockets, a secret, ready files, counters,
names of tenants. Only we enter it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services.gateway.processes.child import TOKEN_FILE

PREFIX = "kvmesh-gateway-"
METRICS = "metrics"
TENANTS = "tenants"
_PID = "pid"


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """A fresh folder, gone at the end. What a killed parent of this user has left is swept first."""
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        (folder / _PID).write_text(str(os.getpid()))
        (folder / METRICS).mkdir()
        token = folder / TOKEN_FILE
        token.touch(mode=0o600)
        token.write_text(secrets.token_urlsafe(32) + "\n")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(where: Path) -> None:
    for path in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            pid = int((path / _PID).read_text())
            if path.stat().st_uid == os.getuid() and not path.is_symlink() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(path, ignore_errors=True)
