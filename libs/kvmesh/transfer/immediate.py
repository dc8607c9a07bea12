"""The 32 bits that every write carries: slot (12) | generation (20)."""

from __future__ import annotations

from kvmesh.errors import InvalidArgument

SLOT_BITS = 12
GENERATION_BITS = 20
MAX_SLOTS = 1 << SLOT_BITS
GENERATIONS = 1 << GENERATION_BITS


def pack(slot: int, generation: int) -> int:
    """The immediate of a slot's generation. Raises InvalidArgument out of range."""
    if not 0 <= slot < MAX_SLOTS or not 0 <= generation < GENERATIONS:
        raise InvalidArgument(f"slot {slot} generation {generation} does not fit an immediate")
    return slot << GENERATION_BITS | generation


def unpack(immediate: int) -> tuple[int, int]:
    """(slot, generation)."""
    return immediate >> GENERATION_BITS & (MAX_SLOTS - 1), immediate & (GENERATIONS - 1)
