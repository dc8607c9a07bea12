"""Placement: which workers serve a request, by what they hold and how loaded they are. `placer` is the way in."""
