"""The only place that imports pyverbs: versions 44 (Debian) and 59 (PyPI) behind one surface, or why there is none.

The names of the surface are pyverbs' own, so that a fake of it (`stub.py`) is a fake of pyverbs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.errors import Unavailable
from kvmesh.transfer.transports.verbs.native.rings import library

_EVENT_FILE = "anon_inode:[infinibandevent]"
_channel_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Api:
    """pyverbs' classes and enums, under its names. error: what its calls raise. channel_fd: a completion channel with
    the descriptor on which it becomes readable."""

    version: str
    get_device_list: Callable[[], list[Any]]
    Context: Any
    PD: Any
    MR: Any
    DmaBufMR: Any
    CompChannel: Any
    CQ: Any
    QPEx: Any
    QPInitAttrEx: Any
    QPCap: Any
    QPAttr: Any
    AHAttr: Any
    GlobalRoute: Any
    GID: Any
    SGE: Any
    RecvWR: Any
    enums: Any
    error: type[Exception]
    make_channel: Callable[[Any], tuple[Any, int]]
    # What posts and polls by itself (`native/rings.py`), None for pyverbs' own ways.
    native: Any = None


def load() -> Api:
    """pyverbs of this machine. Blocks for seconds where native code is compiled. Raises Unavailable with the reason."""
    try:
        enums = _first("pyverbs.libibverbs_enums", "pyverbs.enums")
        part = {name: importlib.import_module(f"pyverbs.{name}") for name in _MODULES}
    except ImportError as error:
        # Also where the library that it is linked to has another version.
        raise Unavailable(f"pyverbs cannot be imported: {error}") from None
    channels = part["cq"].CompChannel
    return Api(
        version="59" if enums.__name__.endswith("libibverbs_enums") else "44",
        get_device_list=part["device"].get_device_list,
        Context=part["device"].Context,
        PD=part["pd"].PD,
        MR=part["mr"].MR,
        DmaBufMR=part["mr"].DmaBufMR,
        CompChannel=channels,
        CQ=part["cq"].CQ,
        QPEx=part["qp"].QPEx,
        QPInitAttrEx=part["qp"].QPInitAttrEx,
        QPCap=part["qp"].QPCap,
        QPAttr=part["qp"].QPAttr,
        AHAttr=part["addr"].AHAttr,
        GlobalRoute=part["addr"].GlobalRoute,
        GID=part["addr"].GID,
        SGE=part["wr"].SGE,
        RecvWR=part["wr"].RecvWR,
        enums=enums,
        error=part["pyverbs_error"].PyverbsError,
        make_channel=lambda context: _channel(channels, context),
        native=library(),
    )


_MODULES = ("device", "pd", "mr", "cq", "qp", "addr", "wr", "pyverbs_error")


def _first(*names: str) -> Any:
    for name in names[:-1]:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return importlib.import_module(names[-1])


def _channel(make: Any, context: Any) -> tuple[Any, int]:
    """pyverbs 44 does not tell a channel's descriptor, and its own wait holds the GIL: find the one that is new."""
    with _channel_lock:
        before = _event_files()
        channel = make(context)
        if hasattr(channel, "fd"):
            return channel, int(channel.fd)
        new = _event_files() - before
        if len(new) != 1:
            channel.close()
            raise Unavailable(f"{len(new)} new completion channels where one was made")
    return channel, new.pop()


def _event_files() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry) == _EVENT_FILE:
                found.add(int(entry.name))
    return found
