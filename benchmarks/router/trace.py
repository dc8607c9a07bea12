"""The one fixed trace of the simulation: sessions that grow a popular prefix, arriving in bursts.

A session begins with one of `prefixes` shared prompts (Zipf), and each turn's prompt is the whole of the session so
far and new text. Tokens are not made: blocks of a prompt are numbered, equal numbers mean an equal prefix up to there.
Arrivals are a Poisson process whose rate is `burst` times the base rate during bursts. Times are stretched so that a
fleet of `workers` is busy for `utilisation` of the time with what an infinite cache would leave it to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SEED = 20_260_501

_SPACE = 1 << 20
"""Numbers set aside for one prefix's or session's blocks."""
_SESSIONS = 1 << 50


@dataclass(frozen=True, slots=True)
class Shape:
    """Distributions. Lengths in tokens are lognormal (median, sigma), cut to [16, most]; turns are geometric."""

    prefixes: int = 4096
    zipf: float = 1.0
    prefix: tuple[float, float, int] = (1200.0, 0.6, 8192)
    user: tuple[float, float, int] = (250.0, 1.0, 4096)
    output: tuple[float, float, int] = (200.0, 0.7, 1024)
    turns: float = 3.0
    think_s: float = 12.0
    burst: float = 3.0
    burst_s: float = 5.0
    burst_every_s: float = 60.0
    block: int = 64


@dataclass(slots=True, eq=False)
class Request:
    """One request. Its prompt's block j is `prefix_base + j` up to `prefix_blocks`, then `tail_base + j`.

    ideal: prompt tokens that one infinite cache, which has everything that arrived before, would hold.
    """

    number: int
    at: float
    session: int
    prompt: int
    output: int
    prefix_base: int
    prefix_blocks: int
    tail_base: int
    ideal: int = 0

    def blocks(self, count: int) -> list[int]:
        """Numbers of the first `count` blocks of prompt and output."""
        shared = min(count, self.prefix_blocks)
        head = list(range(self.prefix_base, self.prefix_base + shared))
        return head + list(range(self.tail_base + shared, self.tail_base + count))


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of a worker. A step costs `step_s`, `sequence_s` for each sequence that decodes in it and `1 / prefill_rate`
    for each prompt token; it computes at most `chunk` prompt tokens."""

    prefill_rate: float = 4000.0
    chunk: int = 512
    step_s: float = 0.020
    sequence_s: float = 0.0005

    def work(self, computed: float, output: float) -> float:
        """Seconds of a worker that always has prompts to compute: the fluid limit of the steps."""
        return computed * (1 / self.prefill_rate + self.step_s / self.chunk) + output * self.sequence_s


def _lengths(rng: np.random.Generator, spec: tuple[float, float, int], count: int) -> npt.NDArray[np.int64]:
    median, sigma, most = spec
    return np.clip(rng.lognormal(np.log(median), sigma, count), 16, most).astype(np.int64)


def make(
    workers: int,
    seconds: float,
    *,
    utilisation: float = 0.7,
    cached: bool = True,
    shape: Shape = Shape(),
    cost: Cost = Cost(),
    seed: int = SEED,
) -> list[Request]:
    """Requests of `seconds` seconds for a fleet, in order of arrival. cached: whether `utilisation` counts the work
    that an infinite cache leaves, or all of it. Deterministic."""
    probe = _sessions(4000, shape, seed)
    mean_work = float(np.mean([cost.work(r.prompt - (r.ideal if cached else 0), r.output) for r in probe]))
    wanted = utilisation * workers * seconds / mean_work
    # Sessions run over the end of the trace; what begins before it is cut there.
    requests = _sessions(int(wanted / shape.turns * 1.3) + 64, shape, seed, span=1.3 * seconds + 1.0)
    requests = [r for r in requests if r.at < seconds]
    work = sum(cost.work(r.prompt - (r.ideal if cached else 0), r.output) for r in requests)
    # Thinned at random by sessions to the utilisation that is asked for; ideal hits are counted again.
    keep = min(1.0, utilisation * workers * seconds / work)
    kept = np.random.default_rng(seed + 1).random(1 + max(r.session for r in requests)) < keep
    requests = [r for r in requests if kept[r.session]]
    _warp(requests, seconds, shape, seed)
    _ideal(requests, shape.block)
    for number, request in enumerate(requests):
        request.number = number
    return requests


def _sessions(count: int, shape: Shape, seed: int, span: float = 1000.0) -> list[Request]:
    """Turns of `count` sessions that begin within `span` seconds, in order of arrival, at a steady rate."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, shape.prefixes + 1, dtype=np.float64) ** -shape.zipf
    lengths = _lengths(rng, shape.prefix, shape.prefixes)
    begins = np.sort(rng.random(count)) * span
    chosen = rng.choice(shape.prefixes, count, p=weights / weights.sum())
    turns = rng.geometric(1.0 / shape.turns, count)
    total = int(turns.sum())
    users, outputs = _lengths(rng, shape.user, total), _lengths(rng, shape.output, total)
    gaps = 3.0 + rng.exponential(shape.think_s, total)
    requests, at = [], 0
    for session in range(count):
        prefix = int(chosen[session])
        held, time = int(lengths[prefix]), float(begins[session])
        blocks = held // shape.block
        base, tail = (prefix + 1) * _SPACE, _SESSIONS + session * _SPACE
        for _ in range(int(turns[session])):
            prompt, output = held + int(users[at]), int(outputs[at])
            requests.append(Request(0, time, session, prompt, output, base, blocks, tail))
            held, time, at = prompt + output, time + float(gaps[at]), at + 1
    requests.sort(key=lambda request: request.at)
    _ideal(requests, shape.block)
    return requests


def _warp(requests: list[Request], seconds: float, shape: Shape, seed: int) -> None:
    """Move arrivals so that their rate is `burst` times as high during bursts; order stays."""
    rng = np.random.default_rng(seed + 2)
    begins = np.arange(0.0, seconds, shape.burst_every_s)
    begins = begins + rng.random(len(begins)) * (shape.burst_every_s - shape.burst_s)
    edges = np.concatenate([[0.0], np.stack([begins, begins + shape.burst_s], 1).ravel(), [seconds]])
    rates = np.ones(len(edges) - 1)
    rates[1::2] = shape.burst
    passed = np.concatenate([[0.0], np.cumsum(np.diff(edges) * rates)])
    even = np.array([request.at for request in requests]) / seconds * passed[-1]
    for request, at in zip(requests, np.interp(even, passed, edges).tolist(), strict=True):
        request.at = at


def _ideal(requests: list[Request], block: int) -> None:
    """Fill in `ideal`. What is stored of a prefix or session is a leading run of its blocks."""
    stored: dict[int, int] = {}
    for request in requests:
        most = (request.prompt - 1) // block
        held = min(stored.get(request.prefix_base, 0), request.prefix_blocks)
        if held == request.prefix_blocks:
            held = max(held, stored.get(request.tail_base, 0))
        request.ideal = min(held, most) * block
        whole = (request.prompt + request.output) // block
        stored[request.prefix_base] = request.prefix_blocks
        stored[request.tail_base] = max(stored.get(request.tail_base, 0), whole)


def burst_times(requests: list[Request], width: float = 1.0) -> npt.NDArray[np.int64]:
    """Arrivals a `width` seconds; for a look at the trace."""
    return np.bincount((np.array([request.at for request in requests]) / width).astype(np.int64))
