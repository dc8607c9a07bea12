"""The engine on an NVIDIA GPU. Nothing here is imported by an engine that runs on CPU, but what says so."""
