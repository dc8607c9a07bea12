"""The efa transport on a device that is no EFA: it says so by name, and takes nothing with it."""

from __future__ import annotations

import errno

import pytest

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.transfer.transports.efa import EfaOptions, EfaTransport
from kvmesh.transfer.transports.efa.shim import load_efa
from kvmesh.transfer.transports.verbs import VerbsOptions
from kvmesh.transfer.transports.verbs.device import Device
from kvmesh.transfer.transports.verbs.shim import load

pytestmark = [pytest.mark.rdma, pytest.mark.asyncio(loop_scope="module")]


async def test_soft_roce_is_no_efa_device() -> None:
    device = Device(load(), VerbsOptions())
    name = device.name
    device.close()
    if "efa" in name or name.startswith("rdmap"):
        pytest.skip(f"{name} may be one")
    for options in (EfaOptions(polling="events"), EfaOptions(device=name, polling="events")):
        transport = EfaTransport(options)
        with pytest.raises(Unavailable, match=rf"{name} is no EFA device \(errno {errno.EOPNOTSUPP}\)"):
            await transport.start()
        usable, reason = transport.status
        assert not usable
        print(f"\nefa on {name}: {reason}")
        with pytest.raises(KvmeshError):
            transport.offer()
        await transport.close()
    # The real classes are those that the fake stands for.
    api = load_efa()
    for made in (api.EfaContext, api.EfaAH, api.EfaQPInitAttr, api.SRDQPEx):
        assert made is not None
    for call in ("wr_start", "wr_abort", "wr_complete", "wr_rdma_write_imm", "wr_set_ud_addr", "wr_set_sge"):
        assert hasattr(api.SRDQPEx, call)
    for call in ("to_rtr", "modify", "post_recv", "close", "qp_num"):
        assert hasattr(api.SRDQPEx, call)
    assert hasattr(api.EfaAH, "query_efa_ah")
