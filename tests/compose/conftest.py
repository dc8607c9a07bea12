"""`make test-compose` (tests/compose/run.sh) chooses an engine and builds the images; here the mesh is started."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from compose_mesh import Mesh, project_settings

from kvmesh.cli.ports import free_port
from kvmesh.client import SyncClient


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("KVMESH_DOCKER"):
        return
    for item in items:
        if "mesh" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="needs a Docker engine and the images: make test-compose"))


@pytest.fixture(scope="session")
def mesh() -> Iterator[Mesh]:
    """Up and healthy. Its down is a test of its own, the last one of test_mesh.py; here only as the net below it."""
    made = Mesh(f"kvmesh-test-{os.getpid()}", project_settings(free_port(), free_port()))
    try:
        took = made.up()
        print(f"the mesh was up and healthy after {took:.1f} s")
        yield made
    finally:
        if made.left():
            made.down()


@pytest.fixture(scope="session")
def client(mesh: Mesh) -> Iterator[SyncClient]:
    with mesh.client() as made:
        yield made
