"""Kernels of the CUDA backend, in Triton. Nothing outside the CUDA backend imports this package."""
