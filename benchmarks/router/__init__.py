"""Benchmarks of the router; `benchmarks/router.py` is the way in."""
