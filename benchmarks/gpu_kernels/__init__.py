"""Kernels of the CUDA backend, each beside its floor and its plain version."""
