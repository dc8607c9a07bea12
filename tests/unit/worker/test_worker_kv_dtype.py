"""The type of KV pages: what is refused, what is named, how many fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from kvmesh.config import WorkerSettings
from kvmesh.engine.cuda.profile import GIB, GpuMemory, pages_that_fit
from kvmesh.engine.runner import Runner
from kvmesh.engine.worker import loading
from kvmesh.engine.worker.memory import page_bytes, size_layout
from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvGroup, KvLayout

BF16 = KvLayout(1, "bf16", 64, (KvGroup("full", "full", tuple(range(32)), 8, 128),), 1)
FP8 = replace(BF16, dtype="fp8_e4m3", kv_scales=(1.0, 1.0))


class _Sized:
    """The part of a runner that sizes memory."""

    def __init__(self, one: KvLayout) -> None:
        self._one = one

    def layout(self, page_size: int, num_pages: int) -> KvLayout:
        return replace(self._one, page_size=page_size, num_pages=num_pages)


@pytest.mark.parametrize("runner", ["torch", "scripted"])
@pytest.mark.parametrize("given", [{"kv_dtype": "fp8_e4m3"}, {"dtype": "fp32", "kv_dtype": "bf16"}])
async def test_an_engine_on_cpu_has_pages_of_its_dtype_alone(runner: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="is not served on CPU") as caught:
        await loading.load_runner(WorkerSettings(runner=cast(Any, runner), model="/nowhere", **given))
    assert caught.value.details == {"field": "kv_dtype"}


@pytest.mark.parametrize(
    "given",
    [{}, {"kv_dtype": "bf16"}, {"dtype": "fp32"}, {"device": "cuda", "kv_dtype": "fp8_e4m3"}, {"device": "cuda"}],
)
def test_what_is_served(given: dict[str, Any]) -> None:
    loading.check_kv_dtype(WorkerSettings(**given))


def test_twice_as_many_pages_fit() -> None:
    memory = GpuMemory(free=100 * GIB, total=140 * GIB, weights=16 * GIB, workspaces=2 * GIB)
    bf16, fp8 = (pages_that_fit(memory, 0.9, page_bytes(layout)) for layout in (BF16, FP8))
    assert 0 <= fp8 - 2 * bf16 <= 1
    settings = WorkerSettings(device="cuda", kv_memory_bytes=1 << 30)
    pages = [size_layout(cast(Runner, _Sized(layout)), settings).num_pages for layout in (BF16, FP8)]
    assert pages == [128, 256]


def test_page_types_of_a_gpu() -> None:
    pytest.importorskip("torch")
    from kvmesh.engine.cuda.page_type import PageType

    assert PageType.of("auto", "bf16", 2.0, 3.0) == PageType.of("bf16", "bf16", 1.0, 1.0) == PageType("bf16", None)
    made = PageType.of("fp8_e4m3", "bf16", 0.5, 2)
    assert (made.scales, made.element.itemsize) == ((0.5, 2.0), 1)
    for kv_dtype, dtype in (("auto", "fp32"), ("fp16", "bf16"), ("fp8_e5m2", "bf16")):
        with pytest.raises(InvalidArgument, match="no kv_dtype") as caught:
            PageType.of(kv_dtype, dtype, 1.0, 1.0)
        assert caught.value.details == {"field": "kv_dtype"}
