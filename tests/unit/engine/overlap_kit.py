"""What tests of the core one step ahead have in common."""

from __future__ import annotations

from kvmesh.engine.core import RequestKey, Tokens
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from tests.unit.engine.world import BASES, World


def late(**config) -> World:
    """A device that runs a step no sooner than it is collected."""
    return World(soon=lambda: False, **config)


def output_of(base: int, length: int, seed: int, max_tokens: int = 8) -> list[int]:
    return scripted_output(list(BASES[base][:length]), SamplingParams(max_tokens=max_tokens, seed=seed))[0]


def tokens_of(world: World, key: RequestKey) -> list[int]:
    return [t for e in world.log if isinstance(e, Tokens) and e.key == key for t in e.token_ids]


def fed(world: World) -> list[list[int]]:
    """First token of every slice of every launched step."""
    return [[int(part.token_ids[0]) for part in batch.slices] for batch in world.device.launched]
