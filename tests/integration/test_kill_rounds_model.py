"""kill -9 of any one process of the mesh on the real model under load; see `kill_kit` for what must hold."""

from __future__ import annotations

import pytest

from kill_kit import SERVING, Tell, run
from kvmesh.cli.plan import MeshOptions
from mesh_kit import PATIENT

ROUNDS = 2


@pytest.mark.model
@pytest.mark.timeout(900)
async def test_any_one_process_may_be_killed(record_property: Tell) -> None:
    real = MeshOptions(gateway_port=0, threads=1, settings=PATIENT)
    await run(real, {"clients": 2, "max_tokens": 3}, tuple(SERVING), ROUNDS, record_property)
