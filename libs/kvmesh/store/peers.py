"""Which gateways there are, in Redis: one sorted set, whose members fall out unless they are renewed.

kvmesh:gateways            zset  what a gateway says of itself -> expiry in ms of Redis' own clock
"""

from __future__ import annotations

from kvmesh.store.client import RedisStore
from kvmesh.store.scripts import Script

KEY = "kvmesh:gateways"
TTL_MS = 15_000
MAX_MEMBERS = 1024
MAX_MEMBER_BYTES = 512

_ANNOUNCE = Script(
    "peers_announce",
    """
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    local life = tonumber(ARGV[2])
    redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
    if ARGV[1] ~= '' then
        redis.call('ZADD', KEYS[1], now + life, ARGV[1])
        redis.call('PEXPIRE', KEYS[1], 2 * life)
    end
    return redis.call('ZREVRANGE', KEYS[1], 0, tonumber(ARGV[3]) - 1)
    """,
)


class PeerStore:
    """The set of gateways. Nothing here raises for Redis being away."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def announce(self, member: str) -> list[str] | None:
        """Renew what we say of ourselves ("" = nothing) and hear of all; None when Redis does not answer."""
        reply = await self._store.script(_ANNOUNCE, [KEY], [member, TTL_MS, MAX_MEMBERS])
        if not isinstance(reply, list):
            return None
        texts = [item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in reply]
        return [text for text in texts if len(text) <= MAX_MEMBER_BYTES]

    async def leave(self, member: str) -> None:
        """Take ourselves out at once."""
        await self._store.run("peers_leave", lambda client: client.zrem(KEY, member), None, write=True)
