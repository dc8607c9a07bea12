"""Where a running local mesh can be found by `kvmesh ask` and `kvmesh status`: one small JSON file a user."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class MeshState:
    """Addresses of a live mesh and the file that holds its mesh token (never the token itself)."""

    pid: int
    gateway: str
    router: str
    run_dir: str
    token_file: str
    model: str
    routers: tuple[str, ...] = ()
    """All replicas; `router` is the first."""
    http: str = ""
    """URL of the HTTP API, "" where it is off."""
    playground: bool = False

    @property
    def alive(self) -> bool:
        """Whether the `kvmesh up` that wrote this still runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def state_path() -> Path:
    """`$KVMESH_STATE` or `$XDG_STATE_HOME/kvmesh/mesh.json` (default `~/.local/state`)."""
    explicit = os.environ.get("KVMESH_STATE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "kvmesh" / "mesh.json"


def write_state(state: MeshState) -> Path:
    """Write atomically, readable by the owner alone."""
    path = state_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".mesh-")
    with os.fdopen(fd, "w") as file:
        json.dump(asdict(state), file)
    os.replace(temporary, path)
    return path


def read_state() -> MeshState | None:
    """The state of a mesh that still runs, or None."""
    try:
        fields = json.loads(state_path().read_text())
        # JSON has no tuples.
        state = MeshState(**{**fields, "routers": tuple(fields.get("routers", ()))})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return state if state.alive else None


def remove_state(pid: int) -> None:
    """Remove the file if it is still about this process."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(state_path().read_text()).get("pid") == pid:
            state_path().unlink()
