"""Remembered answers: what may be remembered, under which key, for how long, and how it is forgotten."""
