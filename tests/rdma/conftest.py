"""These tests run where an RDMA device is: in the VM of `make test-rdma`, or on a machine that has one."""

from __future__ import annotations

import pytest

from kvmesh.errors import KvmeshError
from kvmesh.transfer.native.moves import library
from kvmesh.transfer.transports.verbs import VerbsOptions
from kvmesh.transfer.transports.verbs.device import Device
from kvmesh.transfer.transports.verbs.shim import load


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        Device(load(), VerbsOptions()).close()
    except KvmeshError as error:
        reason = f"{error.message}: `make test-rdma` runs these in a VM that has a device"
        for item in items:
            if "rdma" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def native_code() -> None:
    """What sidecars compile at their first start takes a minute in the VM: that is not theirs to wait for."""
    library()
