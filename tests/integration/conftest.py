"""Compute threads are set on purpose: several engines share the cores of the machine."""

from __future__ import annotations

import pytest

# Files that take longest, longest first: one that begins last is waited for by a single process while the others idle.
LONGEST = (
    "test_kill_rounds.py",
    "test_real_model.py",
    "test_rolling.py",
    "test_tensor_parallel.py",
    "test_tensor_parallel_hosts.py",
    # Not beside the other one with a real model: each holds it several times.
    "test_kill_rounds_model.py",
    "test_streams.py",
    "test_mesh.py",
    "test_transfer_ends.py",
    "test_router_faults.py",
    "test_sidecar_folder.py",
    "test_transfer_sharded.py",
    "test_bad_input.py",
    "test_gateway_processes.py",
    "test_fuzz_http.py",
    "test_grammar_model.py",
    "test_mla_model.py",
    "test_router_mesh.py",
    "test_heal_mesh.py",
    "test_bad_input_table.py",
    "test_worker_disagg.py",
    "test_worker_staging.py",
    "test_playground.py",
    "test_flights.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
