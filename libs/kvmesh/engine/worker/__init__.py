"""The gRPC faces of an engine: decode, prefill, description, and what ties them to core, sidecar and routers."""
