"""Other engines, each driven in a process and environment of its own."""
