"""Copies of whole KV pages in every layer of a region: copy on write of forks."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]

from kvmesh.layers.cuda import pdl as launches

_BLOCK_BYTES = 16 << 10


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["src", "dst"])  # type: ignore[untyped-decorator]
def copy_pages_kernel(  # type: ignore[no-untyped-def]
    region,  # (layers, pages, ELEMENTS)
    layer_stride,  # elements
    src,  # (pairs,) int64
    dst,
    pairs,
    ELEMENTS: tl.constexpr,  # of a page in one layer
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (ELEMENTS + BLOCK - 1) // BLOCK
    item = tl.program_id(0) // BLOCKS
    at = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = at < ELEMENTS
    pair = item % pairs
    # A region is larger than 2^31 elements.
    layer = region + (item // pairs).to(tl.int64) * layer_stride
    values = tl.load(layer + tl.load(src + pair).to(tl.int64) * ELEMENTS + at, mask=mask)
    tl.store(layer + tl.load(dst + pair).to(tl.int64) * ELEMENTS + at, values, mask=mask)


def copy_pages(region: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, *, pdl: bool = False) -> None:
    """region[:, dst] = region[:, src]; region (layers, pages, …) contiguous, src and dst int64 (n,) on its device.

    Destinations must be distinct and none of them a source: pairs are copied in no order. Sources may repeat.
    """
    pairs = len(src)
    if pairs == 0:
        return
    if region.element_size() == 1:
        # Bytes, not numbers: 8-bit floats are no type of every GPU's.
        region = region.view(torch.uint8)
    layers = region.shape[0]
    elements = region.stride(1)
    block = min(_BLOCK_BYTES // region.element_size(), triton.next_power_of_2(elements))
    grid = (layers * pairs * triton.cdiv(elements, block),)
    copy_pages_kernel[grid](
        region, region.stride(0), src, dst, pairs, ELEMENTS=elements, BLOCK=block, num_warps=8, **launches.options(pdl)
    )
