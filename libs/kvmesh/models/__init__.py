"""Model architectures, one file each, over `kvmesh.layers`."""
