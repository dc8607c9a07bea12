"""KV transfer: the state machine, the engine side of the sidecar, transports. Above `kv`, below `engine`."""
