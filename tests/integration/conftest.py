"""Compute threads are set on purpose: several engines share the cores of the machine."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
