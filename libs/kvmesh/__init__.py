"""kvmesh: disaggregated serving of large language models over a gRPC mesh."""

__version__ = "0.1.0"
