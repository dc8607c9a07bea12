"""Classes: an alias has a small and a large pool, and a prompt's complexity chooses. `pools.Classes` is the way in."""
