"""The parts of the answer cache, as the settings want them; none where they want none."""

from __future__ import annotations

from kvmesh.config import RouterSettings
from kvmesh.store import RedisStore
from services.router.cache.policy import CacheRules, Mode
from services.router.near.builder import CellsMaker
from services.router.near.embedder import load_embedder
from services.router.near.gpu import GpuMaker
from services.router.near.nearcache import NearCache


def build_store(settings: RouterSettings, rules: CacheRules) -> RedisStore | None:
    """Raises ValueError or OSError for a URL or a file that cannot be used."""
    if not settings.redis_url or rules.mode == Mode.OFF:
        return None
    return RedisStore(
        settings.redis_url,
        timeout_s=settings.redis_timeout_ms / 1000,
        password_file=settings.redis_password_file,
        ca_file=settings.redis_ca_file,
        cluster=settings.redis_cluster,
    )


def build_near(settings: RouterSettings, rules: CacheRules, *, fetchable: bool) -> NearCache | None:
    """`fetchable`: answers that memory lets go of can be had from Redis."""
    if not rules.embedder or rules.mode < Mode.SEMANTIC:
        return None
    return NearCache(
        lambda: load_embedder(settings.embedder),
        max_entries=settings.semantic_max_entries,
        max_bytes=settings.semantic_max_bytes,
        ttl_s=settings.cache_ttl_s,
        embed_timeout_s=settings.embed_timeout_ms / 1000,
        fetchable=fetchable,
        maker=GpuMaker if settings.semantic_index == "gpu" else CellsMaker,
    )
