"""Verdicts on answers of classes: counted, held against the probability that was promised, and written down if asked.

A line of the file is a decision and its verdict, never a text unless a setting says so: rows that can be trained on
need texts, rows that watch the calibration do not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvmesh.config import RouterSettings
from kvmesh.errors import NotFound
from kvmesh.telemetry import metrics, names
from services.router.classes.pools import ClassDecision

log = logging.getLogger(__name__)

MAX_OPEN = 16384
OPEN_S = 24 * 3600.0
MAX_FILE_BYTES = 64 << 20
MAX_TEXT_CHARS = 8192
WINDOW = 1000
MIN_WINDOW = 50


@dataclass(frozen=True, slots=True)
class _Open:
    expires: float
    ids: tuple[str, ...]
    decision: ClassDecision
    text: str


class Feedback:
    """Open decisions by (tenant, request id), bounded in number and life; verdicts of each counted once."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        texts: bool = False,
        max_bytes: int = MAX_FILE_BYTES,
        limit: int = MAX_OPEN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path`: JSONL file, None = none; at `max_bytes` it becomes `path`.1 and a new one begins."""
        self._path = path
        self._texts = texts
        self._max_bytes = max_bytes
        self._limit = limit
        self._clock = clock
        self._open: OrderedDict[tuple[str, str], _Open] = OrderedDict()
        self._small: deque[tuple[float, bool]] = deque(maxlen=WINDOW)

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> Feedback:
        """See `class_feedback_file` and `class_feedback_texts`."""
        return cls(settings.class_feedback_file, texts=settings.class_feedback_texts)

    @property
    def waiting(self) -> int:
        """Names of decisions that may still be judged."""
        return len(self._open)

    def remember(self, tenant: str, request_ids: Iterable[str], decision: ClassDecision, text: str = "") -> None:
        """A decision that may be judged, under each id the request has. The text is kept only where it is written."""
        ids = tuple(dict.fromkeys(i for i in request_ids if i))
        if not ids:
            return
        kept = text[:MAX_TEXT_CHARS] if self._texts and self._path is not None else ""
        entry = _Open(self._clock() + OPEN_S, ids, decision, kept)
        for name in ids:
            self._open[(tenant, name)] = entry
            self._open.move_to_end((tenant, name))
        while len(self._open) > self._limit:
            self._open.popitem(last=False)

    def verdict(self, tenant: str, request_id: str, good: bool) -> ClassDecision:
        """Count and write a verdict. Raises NotFound for a decision that is unknown, forgotten, judged, another's."""
        entry = self._open.get((tenant, request_id))
        if entry is None or self._clock() >= entry.expires:
            raise NotFound(f"no class was decided for the request {request_id[:64]!r}, or it has been judged")
        for name in entry.ids:
            if self._open.get((tenant, name)) is entry:
                del self._open[(tenant, name)]
        decision = entry.decision
        metrics.counter(names.CLASS_FEEDBACK).labels(decision.pool, "good" if good else "bad").inc()
        if decision.pool == "small" and decision.reason == "probability":
            self._small.append((decision.probability, good))
            gap = self.calibration_gap()
            if gap is not None:
                metrics.gauge(names.CLASS_CALIBRATION).set(gap)
        self._write(entry, good)
        return decision

    def calibration_gap(self) -> float | None:
        """Mean promised probability less the share of good answers, over the last small-pool verdicts.

        Above 0: the classifier promises too much. None before MIN_WINDOW verdicts. Verdicts are not a random sample
        (people report what annoys them), so watch its change, not its value.
        """
        if len(self._small) < MIN_WINDOW:
            return None
        return sum(p for p, _ in self._small) / len(self._small) - sum(g for _, g in self._small) / len(self._small)

    def _write(self, entry: _Open, good: bool) -> None:
        if self._path is None:
            return
        decision = entry.decision
        rounded = {name: round(value, 4) for name, value in decision.features.items()}
        digest = hashlib.blake2b(json.dumps(rounded, sort_keys=True).encode(), digest_size=12).hexdigest()
        row: dict[str, object] = {
            "time": round(time.time(), 3),
            "alias": decision.alias,
            "pool": decision.pool,
            "reason": decision.reason,
            "probability": round(decision.probability, 5),
            "features": digest,
            "good": good,
        }
        if self._texts:
            row["text"] = entry.text
        line = (json.dumps(row, ensure_ascii=True) + "\n").encode()
        try:
            if self._path.exists() and self._path.stat().st_size + len(line) > self._max_bytes:
                os.replace(self._path, self._path.with_name(self._path.name + ".1"))
            # Only its owner reads it: with texts it holds what people asked.
            with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
                file.write(line)
        except OSError as exc:
            log.warning("feedback is not written: %s", exc.strerror or type(exc).__name__)
