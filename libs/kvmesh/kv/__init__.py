"""KV memory: layout, page pool, prefix cache, transfer planner, doorbell ring and shared regions.

Pure Python and numpy: no torch, no gRPC, so that the sidecar, the router and the gateway can import it.
"""
