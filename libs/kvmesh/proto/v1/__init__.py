"""Generated stubs of package kvmesh.v1."""
