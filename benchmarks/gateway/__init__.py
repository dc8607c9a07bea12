"""Parts of `benchmarks/gateway.py`."""
