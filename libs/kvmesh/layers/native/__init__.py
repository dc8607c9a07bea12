"""Compiled CPU kernels for bf16 decoder layers, with plain torch as the fallback where they cannot be built."""
