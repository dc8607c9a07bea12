"""Words that exist, how common they are, and which of them mean the same, the opposite, or are of one kind.

From WordNet (see WORDNET_LICENSE), distilled by tools/training/build_lexicon.py. Words are known by hash only: a word
outside the list is taken for a known one in one case of 50,000.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmesh.errors import FailedPrecondition

VERSION = 1
FILE = Path(__file__).with_name("lexicon.npz")
MAX_BYTES = 2 << 20
RARE = 65535
_ARRAYS = {
    "version": np.int32,
    "words": np.uint32,
    "ranks": np.uint16,
    "sense_starts": np.uint32,
    "sense_ids": np.uint32,
    "parent_starts": np.uint32,
    "parent_ids": np.uint32,
    "antonyms": np.uint32,
}


class Lexicon:
    """All look-ups take lower-case words; `forms` gives the dictionary forms that a word may be one of."""

    def __init__(self, path: Path = FILE) -> None:
        """Raises FailedPrecondition when the file is missing, too large, of another version or inconsistent."""
        arrays = load_arrays(path, _ARRAYS, MAX_BYTES)
        if arrays["version"].shape != () or int(arrays["version"]) != VERSION:
            raise FailedPrecondition(f"{path.name} is not of version {VERSION}")
        words = arrays["words"]
        if words.ndim != 1 or not words.size or (words[1:] <= words[:-1]).any() or arrays["ranks"].shape != words.shape:
            raise FailedPrecondition(f"{path.name}: the words are not sorted, or their ranks are not theirs")
        self._index = {int(word): i for i, word in enumerate(words)}
        self._ranks = arrays["ranks"]
        self._senses = _rows(path, arrays, "sense", words.size)
        self._parents = _rows(path, arrays, "parent", words.size)
        if arrays["antonyms"].ndim != 2 or arrays["antonyms"].shape[1] != 2:
            raise FailedPrecondition(f"{path.name}: antonyms are not pairs")
        self._antonyms = {(int(a), int(b)) for a, b in arrays["antonyms"]}

    def knows(self, word: str) -> bool:
        """True for a word, or a regular form of one."""
        return any(_hash(form) in self._index for form in forms(word))

    def has(self, word: str) -> bool:
        """True for this very form."""
        return _hash(word) in self._index

    def rank(self, word: str) -> int:
        """Place in a list of words from the commonest on; RARE beyond it."""
        ranks = [int(self._ranks[i]) for form in forms(word) if (i := self._index.get(_hash(form))) is not None]
        return min(ranks, default=RARE)

    def same(self, a: str, b: str) -> bool:
        """Both words have one of their first senses in common."""
        return not self._of(self._senses, a).isdisjoint(self._of(self._senses, b))

    def sisters(self, a: str, b: str) -> bool:
        """Both are kinds of one thing (Monday and Tuesday), or one is a kind of the other's kind."""
        return not self._of(self._parents, a).isdisjoint(self._of(self._parents, b))

    def opposite(self, a: str, b: str) -> bool:
        """WordNet has them as antonyms."""
        return any((_hash(x), _hash(y)) in self._antonyms for x in forms(a) for y in forms(b))

    def _of(self, table: tuple[npt.NDArray[Any], npt.NDArray[Any]], word: str) -> set[int]:
        starts, values = table
        found: set[int] = set()
        for form in forms(word):
            i = self._index.get(_hash(form))
            if i is not None:
                found.update(values[starts[i] : starts[i + 1]].tolist())
        return found


def _hash(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "replace"))


def _rows(
    path: Path, arrays: dict[str, npt.NDArray[Any]], name: str, count: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    starts, values = arrays[f"{name}_starts"], arrays[f"{name}_ids"]
    if starts.shape != (count + 1,) or (starts[1:] < starts[:-1]).any() or int(starts[-1]) != values.size:
        raise FailedPrecondition(f"{path.name}: the {name}s do not fit the words")
    return starts, values


def load_arrays(path: Path, dtypes: dict[str, Any], max_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file, each of its dtype. Raises FailedPrecondition, which names the file."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise FailedPrecondition(f"{path.name} has {size} bytes; at most {max_bytes} are read")
        with np.load(path, allow_pickle=False) as stored:
            # A small file may unpack to much more; an entry's size stands in the archive's directory.
            unpacked = sum(info.file_size for info in stored.zip.infolist())
            if unpacked > 8 * max_bytes:
                raise FailedPrecondition(f"{path.name} unpacks to {unpacked} bytes; at most {8 * max_bytes} are read")
            arrays = {name: np.asarray(stored[name]) for name in dtypes}
    except FailedPrecondition:
        raise
    except Exception as exc:
        raise FailedPrecondition(f"{path.name} cannot be read: {type(exc).__name__}: {exc}") from exc
    for name, dtype in dtypes.items():
        if arrays[name].dtype != dtype:
            raise FailedPrecondition(f"{path.name}: {name} is {arrays[name].dtype}, not {np.dtype(dtype)}")
    return arrays


_IRREGULAR = """
went go; gone go; did do; done do; made make; got get; gotten get; took take; taken take; gave give; given give;
wrote write; written write; bought buy; brought bring; caught catch; taught teach; thought think; sought seek; built
build; sent send; spent spend; lent lend; lost lose; left leave; kept keep; slept sleep; felt feel; met meet; paid
pay; said say; told tell; sold sell; found find; held hold; heard hear; stood stand; understood understand; ran run;
came come; became become; began begin; begun begin; drank drink; drunk drink; sang sing; swam swim; broke break;
broken break; chose choose; chosen choose; spoke speak; spoken speak; stole steal; stolen steal; woke wake; froze
freeze; frozen freeze; forgot forget; forgotten forget; ate eat; eaten eat; fell fall; fallen fall; drove drive;
driven drive; rode ride; ridden ride; rose rise; risen rise; knew know; known know; grew grow; grown grow; threw
throw; thrown throw; flew fly; flown fly; drew draw; drawn draw; saw see; seen see; wore wear; worn wear; tore tear;
torn tear; won win; children child; people person; men man; women woman; feet foot; teeth tooth; mice mouse; lives
life; wives wife; knives knife; leaves leaf; halves half; shelves shelf; indices index; indexes index; matrices
matrix; vertices vertex; analyses analysis; criteria criterion; dying die; lying lie; tying tie; dug dig; fed feed;
led lead; bred breed; fought fight; hid hide; hidden hide; shook shake; shaken shake; struck strike; sank sink; sunk
sink; bit bite; bitten bite
"""
IRREGULAR = dict(pair.split() for pair in _IRREGULAR.replace("\n", " ").split(";"))


@lru_cache(maxsize=16384)
def forms(word: str) -> tuple[str, ...]:
    """The word itself and what it may be a form of: "stopping" → stopping, stopp, stop, stoppe."""
    found = [word]
    if word in IRREGULAR:
        found.append(IRREGULAR[word])
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        found.append(word[:-1])
        if word.endswith("es"):
            found.append(word[:-2])
        if word.endswith("ies"):
            found.append(word[:-3] + "y")
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            stem = word[: -len(ending)]
            found += [stem, stem + "e"]
            if stem[-1] == stem[-2]:
                found.append(stem[:-1])
            if ending == "ed" and stem.endswith("i"):
                found.append(stem[:-1] + "y")
    return tuple(found)


@lru_cache(maxsize=1)
def lexicon() -> Lexicon:
    """The package's, read once."""
    return Lexicon()
