"""The order of the unit tests: what takes long comes first, so that no worker is left alone with it at the end."""

from __future__ import annotations

import pytest

# Files over about 8 s on a quiet machine, the longest first.
LONG = (
    "fuzz/test_atheris.py",
    "model/test_model_logits.py",
    "fuzz/test_fuzz.py",
    "model/test_parallel_runner.py",
    "model/test_parallel_ahead.py",
    "worker/test_worker_leaks.py",
    "model/test_model_native.py",
    "gateway/test_gateway_flat.py",
    "engine/test_engine_property.py",
    "model/test_parallel_mla.py",
    "gateway/test_gateway_faults.py",
    "transfer/test_property.py",
    "telemetry/test_names_used.py",
    "gateway/test_streamed_is_whole.py",
    "gateway/test_gateway_heal.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """xdist would begin with the files of the most tests, and end with fuzzing, which is one."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"tests/unit/{name}": at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(LONG)))
