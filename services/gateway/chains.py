"""A prompt as routers know prefixes: one hash chain per kind of prefix cache among the workers of a model.

Workers hash their blocks under their own base seed and block size, so a prompt has one chain for each such pair; they
are few, since workers of one model and revision share both. A router gets the hashes and never the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvmesh.kv.hashing import CHAIN_STRIDE, HASH_BYTES, chain_hashes, prompt_digest, request_seed
from kvmesh.proto.v1 import engine_pb2, router_pb2

MAX_CHAINS = 8
MAX_HASHES = 4096
"""Of one chain: 2^15 blocks; a longer prompt is told by its beginning."""

Kind = tuple[bytes, int]
"""(base seed, block size) of a prefix cache."""


def kinds_of(infos: Iterable[engine_pb2.WorkerInfo], model: str) -> list[Kind]:
    """The kinds of prefix cache among the workers of a model, the most common first, at most MAX_CHAINS."""
    kinds = Counter(
        (info.base_seed, info.page_size)
        for info in infos
        if info.model == model and len(info.base_seed) == HASH_BYTES and info.page_size
    )
    return sorted(kinds, key=lambda kind: (-kinds[kind], kind))[:MAX_CHAINS]


@dataclass(slots=True)
class PromptNames:
    """Digest and chains of one request's prompt, each computed once however often the request is placed."""

    _tokens: Sequence[int] = ()
    _salt: str = ""
    _digest: bytes = b""
    _chains: dict[Kind, bytes] = field(default_factory=dict)

    def fill(
        self, request: router_pb2.RouteRequest, tokens: Sequence[int], salt: str, kinds: Iterable[Kind] | None
    ) -> None:
        """Set prompt_tokens, prompt_digest and chains of `request`; kinds None: not known to the caller.

        salt: the inner one (tenant and client's salt). Tokens are compared by identity: they are another list when
        the request was made anew for another model.
        """
        if tokens is not self._tokens or salt != self._salt or not self._digest:
            self._tokens, self._salt = tokens, salt
            self._digest, self._chains = prompt_digest(tokens), {}
        request.prompt_tokens = len(tokens)
        request.prompt_digest = self._digest
        told = list(kinds or ())[:MAX_CHAINS]
        request.chains_incomplete = not told
        for kind in told:
            seed, size = kind
            hashes = self._chains.get(kind)
            if hashes is None:
                longest = MAX_HASHES * CHAIN_STRIDE * size
                hashes = chain_hashes(request_seed(seed, salt=salt), tokens[:longest], size)
                while len(self._chains) >= MAX_CHAINS:
                    del self._chains[next(iter(self._chains))]
                self._chains[kind] = hashes
            request.chains.add(base_seed=seed, block_size=size, hashes=hashes)
