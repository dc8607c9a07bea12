"""What a plan must do, told without the planner: an array [head, plane, token, dim] of distinct elements, laid by plain
indexing into each rank's region, and plans carried out byte by byte."""

import numpy as np

from kvmesh.kv.layout import KvGroup, KvLayout

JUNK = 0xEEEE


def kv_layout(heads, tp, page_size, num_pages, *, kind="full", dim=1, layers=1, dtype="fp16"):
    return KvLayout(1, dtype, page_size, (KvGroup("g", kind, tuple(range(layers)), heads, dim),), num_pages, tp)


def heads_of(heads, tp, rank):
    """The heads that a rank holds."""
    return range(rank * heads // tp, (rank + 1) * heads // tp) if tp <= heads else [rank * heads // tp]


def valid_tps(heads, limit=16):
    return [tp for tp in range(1, limit + 1) if heads % tp == 0 or tp % heads == 0]


def elements(heads, tokens, *, planes=2, dim=1):
    """uint16 (heads, planes, tokens, dim), all distinct, none zero or JUNK."""
    count = heads * planes * tokens * dim
    assert count < JUNK
    return np.arange(1, count + 1, dtype=np.uint16).reshape(heads, planes, tokens, dim)


def lay(kv, layout, pages):
    """(image, token), each (tp, layers, elements of a layer): uint16, `kv` in those pages of every layer, else JUNK;
    and the token number of each element, -1 for JUNK."""
    group = layout.groups[0]
    _, planes, tokens, dim = kv.shape
    number = np.arange(tokens)
    page, slot = np.asarray(pages, dtype=np.int64)[number // layout.page_size], number % layout.page_size
    held = len(heads_of(group.kv_heads, layout.tp, 0))
    # One rank's region as the design words it; a page of mla has one head of one plane.
    shape = (layout.tp, group.num_layers, layout.num_pages, held, planes, layout.page_size, dim)
    image = np.full(shape, JUNK, dtype=np.uint16)
    token = np.full(shape, -1, dtype=np.int64)
    for rank in range(layout.tp):
        for index, head in enumerate(heads_of(group.kv_heads, layout.tp, rank)):
            for plane in range(planes):
                image[rank][:, page, index, plane, slot] = kv[head, plane]
                token[rank][:, page, index, plane, slot] = number[:, None]
    return image.reshape(layout.tp, group.num_layers, -1), token.reshape(layout.tp, group.num_layers, -1)


def carry_out(rows, src_layout, dst_layout, source, target, written=None):
    """Copy the plan's rows, layer by layer, from `source` to `target` (both as `lay` makes them); refuses a row that
    leaves its layer. Returns how often each byte of the target was written: (tp, layers, bytes of a layer)."""
    src_stride, dst_stride = (layout.layer_stride("g") for layout in (src_layout, dst_layout))
    assert source.shape[2] * 2 == src_stride
    assert target.shape[2] * 2 == dst_stride
    layers = source.shape[1]
    if written is None:
        written = np.zeros((dst_layout.tp, layers, dst_stride), dtype=np.int64)
    if not len(rows):
        return written
    for column in (rows.src_rank, rows.src_offset, rows.dst_rank, rows.dst_offset, rows.length):
        assert column.dtype == np.int64
        assert column.shape == rows.length.shape
    assert rows.length.min() > 0
    for rank, offset, tp, stride in (
        (rows.src_rank, rows.src_offset, src_layout.tp, src_stride),
        (rows.dst_rank, rows.dst_offset, dst_layout.tp, dst_stride),
    ):
        assert rank.min() >= 0
        assert rank.max() < tp
        assert offset.min() >= 0
        assert (offset + rows.length).max() <= stride
    step = np.arange(rows.nbytes) - np.repeat(np.cumsum(rows.length) - rows.length, rows.length)
    src_rank, dst_rank = np.repeat(rows.src_rank, rows.length), np.repeat(rows.dst_rank, rows.length)
    src_byte, dst_byte = np.repeat(rows.src_offset, rows.length) + step, np.repeat(rows.dst_offset, rows.length) + step
    for layer in range(layers):
        taken = source.view(np.uint8).reshape(src_layout.tp, layers, -1)[src_rank, layer, src_byte]
        target.view(np.uint8).reshape(dst_layout.tp, layers, -1)[dst_rank, layer, dst_byte] = taken
        np.add.at(written, (dst_rank, layer, dst_byte), 1)
    return written


def check(written, target, image, token, first, end):
    """Every byte of tokens [first, end) was written once and is right, nothing else was touched."""
    wanted = (token >= first) & (token < end)
    assert (target == np.where(wanted, image, np.uint16(JUNK))).all()
    assert (written == np.repeat(wanted, 2, axis=2)).all()
