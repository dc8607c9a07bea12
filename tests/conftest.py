"""For every suite: a property holds or not, however slow the machine is (hypothesis fails examples over 200 ms)."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("kvmesh", deadline=None)
settings.load_profile("kvmesh")
