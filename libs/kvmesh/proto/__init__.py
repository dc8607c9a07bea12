"""Generated protobuf stubs; see tools/gen_protos.py."""
