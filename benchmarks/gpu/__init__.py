"""What the GPU benchmarks share."""
