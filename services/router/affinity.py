"""How much of a prompt each worker already holds, by the block hashes that workers publish.

The chain is the one of `kvmesh.kv.hashing`, so a worker's blocks are found only under its own base seed and page size
and the request's own salt. Hashing stops at the first block that no worker holds: a cold prompt costs one hash.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from kvmesh.kv.hashing import HASH_BYTES, hash_block, request_seed, token_bytes
from services.router.fleet import Worker

MAX_BLOCKS_CHAINED = 4096


def matched_tokens(workers: Iterable[Worker], token_ids: Sequence[int], salt: str) -> dict[str, int]:
    """Worker id → leading tokens of the prompt in its prefix cache, at most len(token_ids) − 1; zeros left out."""
    groups: dict[tuple[bytes, int], list[Worker]] = defaultdict(list)
    for worker in workers:
        info = worker.info
        # A worker without a proper seed publishes nothing that could be compared.
        if worker.blocks and len(info.base_seed) == HASH_BYTES and info.page_size > 0:
            groups[(info.base_seed, info.page_size)].append(worker)
    if not groups or len(token_ids) < 2:
        return {}
    matched: dict[str, int] = {}
    for (base_seed, page_size), holders in groups.items():
        limit = min(len(token_ids) - 1, MAX_BLOCKS_CHAINED * page_size)
        depth = _depths(request_seed(base_seed, salt=salt), token_ids[:limit], page_size, [w.blocks for w in holders])
        for worker, blocks in zip(holders, depth, strict=True):
            if blocks:
                matched[worker.worker_id] = blocks * page_size
    return matched


def _depths(seed: bytes, tokens: Sequence[int], page_size: int, held: Sequence[Collection[bytes]]) -> list[int]:
    """For each set of hashes: how many blocks of the chain it holds without a gap."""
    depths = [0] * len(held)
    running = list(range(len(held)))
    raw = token_bytes(list(tokens))
    step = 4 * page_size
    for at in range(0, len(raw) - step + 1, step):
        seed = hash_block(seed, raw[at : at + step])
        running = [index for index in running if seed in held[index]]
        if not running:
            break
        for index in running:
            depths[index] += 1
    return depths
