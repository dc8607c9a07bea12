"""The gateway: the public face of the mesh."""
