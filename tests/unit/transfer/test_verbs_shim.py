"""Both versions of pyverbs behind one surface, without any of them."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvmesh.errors import InvalidArgument, Unavailable
from kvmesh.transfer.transports.verbs import VerbsOptions, shim
from kvmesh.transfer.transports.verbs import options as options_module

CLASSES = {
    "device": ["get_device_list", "Context"],
    "pd": ["PD"],
    "mr": ["MR", "DmaBufMR"],
    "cq": ["CompChannel", "CQ"],
    "qp": ["QPEx", "QPInitAttrEx", "QPCap", "QPAttr"],
    "addr": ["AHAttr", "GlobalRoute", "GID"],
    "wr": ["SGE", "RecvWR"],
    "pyverbs_error": [],
}


def install(monkeypatch: pytest.MonkeyPatch, enums: str, channel: Any) -> None:
    package = ModuleType("pyverbs")
    package.__path__ = []  # nothing is to be found beside what is put in
    monkeypatch.setitem(sys.modules, "pyverbs", package)
    for name, members in CLASSES.items():
        module = ModuleType(f"pyverbs.{name}")
        for member in members:
            setattr(module, member, member)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["pyverbs.cq"].CompChannel = channel  # type: ignore[attr-defined]
    sys.modules["pyverbs.pyverbs_error"].PyverbsError = RuntimeError  # type: ignore[attr-defined]
    for name in ("pyverbs.enums", "pyverbs.libibverbs_enums"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, f"pyverbs.{enums}", ModuleType(f"pyverbs.{enums}"))


def test_absent_pyverbs_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(Unavailable, match="pyverbs cannot be imported"):
        shim.load()


def test_version_59(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "libibverbs_enums", lambda context: SimpleNamespace(fd=12))
    api = shim.load()
    assert (api.version, api.QPEx, api.DmaBufMR) == ("59", "QPEx", "DmaBufMR")
    assert api.make_channel(None)[1] == 12


def test_version_44_finds_the_descriptor_of_a_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not tell it: the new event file is the one."""

    class Channel:
        def __init__(self, context: Any) -> None:
            self._descriptor = os.eventfd(0)

        def close(self) -> None:
            os.close(self._descriptor)

    install(monkeypatch, "enums", Channel)
    monkeypatch.setattr(shim, "_EVENT_FILE", "anon_inode:[eventfd]")
    other = os.eventfd(0)
    api = shim.load()
    assert api.version == "44"
    channel, fd = api.make_channel(None)
    assert fd == channel._descriptor != other
    channel.close()
    os.close(other)
    monkeypatch.setattr(shim, "_EVENT_FILE", "anon_inode:[nothing]")
    with pytest.raises(Unavailable, match="0 new completion channels"):
        api.make_channel(None)


def test_options_are_checked_and_auto_asks_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"qps": 0}, {"qps": 17}, {"receives": 1}, {"send_depth": 1}, {"polling": "sometimes"}, {"port": 0}):
        with pytest.raises(InvalidArgument, match="verbs: "):
            VerbsOptions(**wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(options_module.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert VerbsOptions().spins
    assert not VerbsOptions(polling="events").spins
    monkeypatch.setattr(options_module.os, "sched_getaffinity", lambda pid: {0, 1})
    assert not VerbsOptions().spins
    assert VerbsOptions(polling="thread").spins
