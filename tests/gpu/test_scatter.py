"""The scatter kernel and the CUDA backend on one GPU: odd rows, many counters, several layers a launch, two groups."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.cuda is None, reason="needs a GPU"),
]

NBYTES = 8 << 20


@pytest.mark.parametrize(
    ("lengths", "multiple", "counters"),
    [
        ([65536, 65536, 65536], 16, 1),
        # Longer than a block's, no power of two, and a short one beside it.
        ([98304, 40960, 16, 4096], 16, 3),
        ([1, 7, 4095, 333], 1, 33),
        ([48], 16, 100),
    ],
)
def test_rows_of_any_shape(lengths: list[int], multiple: int, counters: int) -> None:
    from kvmesh.engine.nvlink.backend import Batch, GroupRows
    from kvmesh.engine.nvlink.cuda import CudaBackend
    from kvmesh.engine.nvlink.cuda_region import CudaRegion

    rng = np.random.default_rng(len(lengths))
    source, target = CudaRegion("a", NBYTES, 0), CudaRegion("b", NBYTES, 0)
    here = torch.as_tensor(source, device="cuda:0")
    there = torch.as_tensor(target, device="cuda:0")
    here.random_(1, 256)
    there.zero_()
    words = Region.create("counters", 4096 * 8)
    backend = CudaBackend({("main", 0): source}, 0)
    backend.warm()
    compiled = len(backend._kernels)
    infos = [pb.RegionInfo(group="main", nbytes=NBYTES, memory="cuda", device=target.device)]
    # The same memory once more, as another process would map it.
    peer = backend.open_peer(infos, [target.fd, words.fd], words.nbytes)
    layers, src_stride, dst_stride = 3, 1 << 20, (1 << 20) + 512
    cuts = np.cumsum([0, *[-(-length // multiple) * multiple + multiple for length in lengths]])[:-1]
    src = cuts + multiple * rng.integers(1, 1000)
    dst = cuts + multiple * 2000
    rows = GroupRows(
        source.address + src,
        peer.bases[0] + dst,
        np.array(lengths, dtype=np.int64),
        np.full(len(lengths), dst_stride, dtype=np.int64),
        src_stride,
    )
    values = np.arange(2 * counters, dtype=np.int64).reshape(2, counters) + (1 << 62)
    batch = Batch([None, rows], peer.counters + 8 * np.arange(counters, dtype=np.int64), values)
    prepared = backend.prepare(batch)
    backend.after_compute()
    backend.launch(prepared, 1, 0, 1, 0)
    backend.stream.synchronize()
    assert words.view("i8")[:counters].tolist() == values[0].tolist()
    backend.launch(prepared, 1, 1, layers - 1, 1)
    mark = backend.mark()
    backend.stream.synchronize()
    assert backend.reached(mark)
    assert words.view("i8")[:counters].tolist() == values[1].tolist()
    assert not words.view("i8")[counters:].any()
    want = np.zeros(NBYTES, dtype=np.uint8)
    have = here.cpu().numpy()
    for layer in range(layers):
        for s, d, n in zip(src, dst, lengths, strict=True):
            a, b = s + layer * src_stride, d + layer * dst_stride
            want[b : b + n] = have[a : a + n]
    np.testing.assert_array_equal(there.cpu().numpy(), want)
    # Nothing to copy: the counters alone.
    backend.launch(prepared, 0, 0, 1, 0)
    backend.stream.synchronize()
    assert words.view("i8")[:counters].tolist() == values[0].tolist()
    # Whatever the rows are, nothing had to be compiled for them.
    assert len(backend._kernels) == compiled
    backend.close_peer(peer)
    del here, there
    source.close()
    target.close()
    words.close()


def test_memory_of_another_kind_is_refused_and_nothing_stays_mapped() -> None:
    from kvmesh.engine.nvlink.cuda import CudaBackend
    from kvmesh.engine.nvlink.cuda_region import CudaRegion
    from kvmesh.errors import InvalidArgument, Unavailable

    region = CudaRegion("a", NBYTES, 0)
    backend = CudaBackend({("main", 0): region}, 0)
    memfd = Region.create("host", 4096 * 8)
    with pytest.raises(InvalidArgument, match="host memory, not cuda"):
        backend.open_peer([pb.RegionInfo(group="main", nbytes=NBYTES)], [region.fd, memfd.fd], memfd.nbytes)
    info = pb.RegionInfo(group="main", nbytes=NBYTES, memory="cuda")
    # A descriptor that is no GPU's, and counters that are no memfd.
    with pytest.raises(Unavailable, match="cuMemImportFromShareableHandle"):
        backend.open_peer([info], [memfd.fd, memfd.fd], memfd.nbytes)
    with pytest.raises(InvalidArgument):
        backend.open_peer([info], [region.fd, region.fd], memfd.nbytes)
    free, _ = torch.cuda.mem_get_info(0)
    for _ in range(50):
        peer = backend.open_peer([info], [region.fd, memfd.fd], memfd.nbytes)
        backend.close_peer(peer)
    assert torch.cuda.mem_get_info(0)[0] >= free - (4 << 20)
    backend.close()
    region.close()
    memfd.close()
