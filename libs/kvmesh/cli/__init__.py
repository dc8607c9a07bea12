"""The `kvmesh` command: start a mesh on this machine, ask it, look at it. Imports no torch."""
