"""kill -9 of any one process of the scripted mesh under load; see `kill_kit` for what must hold."""

from __future__ import annotations

import os

import pytest

from kill_kit import SERVING, Tell, run
from mesh_kit import SCRIPTED

ROUNDS = 50 if os.environ.get("KVMESH_SOAK") else 5


@pytest.mark.timeout(300 + 60 * ROUNDS)
@pytest.mark.parametrize("victim", list(SERVING))
async def test_any_one_process_may_be_killed(victim: str, record_property: Tell) -> None:
    await run(SCRIPTED, {"clients": 8, "max_tokens": 8}, (victim,), ROUNDS, record_property)
