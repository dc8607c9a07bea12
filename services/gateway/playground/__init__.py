"""A page for trying the mesh, and where the time of each of its answers went."""
