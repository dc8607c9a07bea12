"""A Lua script by its digest: sent whole only to a server that does not know it yet."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError

Arg = str | bytes | int


class Script:
    """One script. All keys of one call must share a hash slot."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: Any, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """The script's reply from `client` (a Redis or a cluster of them). Raises what the client raises."""
        try:
            return await client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self.source, len(keys), *keys, *args)
