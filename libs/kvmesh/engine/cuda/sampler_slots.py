"""Which row of the device's token counts is which sequence's, and how many tokens that row has counted. Torch-free."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# (seq_id, choice)
Key = tuple[int, int]
_UNKNOWN = -1


@dataclass(slots=True)
class _Slot:
    index: int
    counted: int


class CountSlots:
    """Slots are kept until `forget`, or until somebody else needs one: what was used last stays longest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: OrderedDict[Key, _Slot] = OrderedDict()
        self._keys: defaultdict[int, set[Key]] = defaultdict(set)
        self._free = list(range(capacity))[::-1]

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, keys: Sequence[Key], lengths: Sequence[int]) -> tuple[list[int], list[bool]]:
        """(slot, whether its counts must be made anew) of each sequence of a step, given how many output tokens each
        has. More than `capacity` at once raise it."""
        fresh: list[bool] = []
        for key, length in zip(keys, lengths, strict=True):
            slot = self._slots.get(key)
            if slot is not None:
                self._slots.move_to_end(key)
            fresh.append(slot is None or slot.counted != length)
        known = sum(key in self._slots for key in keys)
        for key in keys:
            if key in self._slots:
                continue
            # What this step uses is at the end, so the first is somebody else's as long as there are others.
            if not self._free and len(self._slots) > known:
                self._drop(next(iter(self._slots)))
            if not self._free:
                self._free.append(self.capacity)
                self.capacity += 1
            self._slots[key] = _Slot(self._free.pop(), _UNKNOWN)
            self._keys[key[0]].add(key)
            known += 1
        for key, new in zip(keys, fresh, strict=True):
            if new:
                self._slots[key].counted = _UNKNOWN
        return [self._slots[key].index for key in keys], fresh

    def counted(self, keys: Sequence[Key], lengths: Sequence[int]) -> None:
        """A step is queued that has, or makes, counts of `lengths` tokens and adds one to each."""
        for key, length in zip(keys, lengths, strict=True):
            if key in self._slots:
                self._slots[key].counted = length + 1

    def forget(self, seq_ids: Iterable[int]) -> None:
        """These sequences have ended; unknown ones are ignored."""
        for seq_id in seq_ids:
            for key in list(self._keys.get(seq_id, ())):
                self._drop(key)

    def _drop(self, key: Key) -> None:
        self._free.append(self._slots.pop(key).index)
        keys = self._keys[key[0]]
        keys.discard(key)
        if not keys:
            del self._keys[key[0]]
