"""Traces, metrics and logs. Names live in `kvmesh.telemetry.names` and nowhere else."""

from kvmesh.telemetry import about, genai, logs, metrics, names, tracing
from kvmesh.telemetry.logs import redact, setup_logs

__all__ = ["about", "genai", "logs", "metrics", "names", "redact", "setup_logs", "tracing"]
