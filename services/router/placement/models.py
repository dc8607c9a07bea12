"""Which model a name stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvmesh.errors import NotFound
from services.router.fleet import Family


def resolve_model(name: str, aliases: Mapping[str, str], families: Iterable[Family], serving: Iterable[Family]) -> str:
    """The model that a name stands for.

    A name that a worker bears is that model, whatever the aliases say. An alias with target "" means the model that
    most of the `serving` (one entry a decoding worker) serve, then the first by name. Raises NotFound.
    """
    known = {family.model for family in families}
    if name in known:
        return name
    if name in aliases:
        target = aliases[name]
        if target:
            if target not in known:
                raise NotFound(f"no worker serves model {target!r}, which {name!r} stands for")
            return target
        counts = Counter(family.model for family in serving)
        if counts:
            return min(counts, key=lambda model: (-counts[model], model))
        if known:
            return min(known)
    raise NotFound(f"no worker serves model {name!r}")
