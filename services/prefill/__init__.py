"""The prefill worker as a process."""
