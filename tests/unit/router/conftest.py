"""For the router's suites: a busy machine is not a hung one."""

from __future__ import annotations

import pytest

from services.router.near import batching, nearcache


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the semantic cache count as hung after a minute; tests of that set their own limit."""
    monkeypatch.setattr(batching, "HUNG_S", 60.0)
    monkeypatch.setattr(nearcache, "STUCK_S", 60.0)
