"""Redis (or Valkey) as gateway and router share it: names of keys, a client with a breaker, scripts.

It holds remembered answers and running flights, never the fleet, and it may be slow, dead or gone at any time: then
there are misses, and nothing else. `keys` says who writes what.
"""

from kvmesh.store.client import RedisStore
from kvmesh.store.scripts import Script

__all__ = ["RedisStore", "Script"]
