"""The decode worker as a process."""
