"""The kvmesh services, one package each; `python -m services.<name>` runs one."""
