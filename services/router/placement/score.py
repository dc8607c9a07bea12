"""The score of a worker: what it holds of the prompt against how loaded it is. Pure arithmetic on arrays.

    score = matched / prompt − β · relative load − β_over · max(0, relative load − over) + bonus

Relative load is a worker's tokens over (the mean of the candidates + the prompt + what an idle worker may have): one
hot worker raises the mean and so makes the others look closer together, never farther apart, and on an idle fleet a
few tokens do not outweigh a held prefix. Far above the mean each further token weighs more (β_over), so that no prefix,
however hot, pulls everything to one worker, while a worker a little above it keeps its prefix's requests.

A worker with more of the prompt and less load has the higher score, whatever the weights; the jitter keeps to that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Weights:
    """How placement weighs.

    beta_prefill, beta_decode: relative load against the share of the prompt that is held. queued, inflight, recent:
    tokens of load for a token waiting to be computed, for one held in KV, and for one of work that this router placed a
    moment ago (decaying over `recent_s` seconds). Work of a placement is what the worker has to compute of the prompt;
    where it generates, `recent_prompt` of the whole prompt and `recent_each` tokens too, since nobody knows how long
    the answer will be. idle: load that is next to nothing, in tokens. over, beta_over: from which relative load on more
    is taken off, and how much. jitter: scores that close to the best are as good. session: bonus of a session's last
    worker.
    """

    beta_prefill: float = 2.0
    beta_decode: float = 2.0
    queued: float = 1.0
    inflight: float = 0.03
    recent: float = 2.0
    recent_s: float = 10.0
    recent_prompt: float = 0.5
    recent_each: float = 256.0
    idle: float = 4096.0
    over: float = 2.0
    beta_over: float = 1.0
    jitter: float = 0.02
    session: float = 0.03


def relative_load(load: Floats, prompt_tokens: int, idle: float) -> Floats:
    """Of each candidate; about 1 on a busy fleet, near 0 on an idle one, at most the number of candidates."""
    if not len(load):
        return load
    return load / (max(1, prompt_tokens) + idle + float(load.sum()) / len(load))


def score(matched: Ints, relative: Floats, prompt_tokens: int, beta: float, weights: Weights) -> Floats:
    """The score without bonus. matched: at most prompt_tokens each."""
    over = np.maximum(relative - weights.over, 0.0)
    return matched / max(1, prompt_tokens) - beta * relative - weights.beta_over * over


def ranking(
    scores: Floats,
    *,
    matched: Ints,
    load: Floats,
    sequences: Floats,
    preferred: npt.NDArray[np.bool_],
    jitter: float,
    rng: np.random.Generator,
) -> Ints:
    """Indices, best first: preferred before all others, then by score, less load, fewer sequences, at random.

    The first place goes to any of those within `jitter` of the best one, but to none that another one there beats in
    both load and match.
    """
    noise = rng.random(len(scores))
    order = np.lexsort((noise, sequences, load, -scores, ~preferred))
    if jitter <= 0.0 or len(order) < 2:
        return order
    close = scores[order] >= scores[order[0]] - jitter
    close &= preferred[order] == preferred[order[0]]
    near = order[: _leading(close)]
    if len(near) > 1:
        near = _unbeaten(near, matched, load)
        pick = near[int(noise[order[0]] * len(near))]
        order = np.concatenate([[pick], order[order != pick]])
    return order


def power_of_two(load: Floats, preferred: npt.NDArray[np.bool_], rng: np.random.Generator) -> Ints:
    """Indices: of two at random the less loaded, then all others by load. For when nothing better is known."""
    noise = rng.random(len(load))
    order = np.lexsort((noise, load, ~preferred))
    choice = np.flatnonzero(preferred) if preferred.any() else np.arange(len(load))
    if len(choice) > 2:
        two = rng.choice(choice, 2, replace=False)
        pick = two[int(load[two[1]] < load[two[0]])]
        order = np.concatenate([[pick], order[order != pick]])
    return order


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    return len(flags) if flags.all() else int(np.argmin(flags))


def _unbeaten(near: Ints, matched: Ints, load: Floats) -> Ints:
    """Those of `near` than which no other has both strictly more match and strictly less load."""
    held = matched[near]
    if held.min() == held.max():
        return near
    kept, least, at = [], np.inf, 0
    by_match = near[np.lexsort((load[near], -held))]
    while at < len(by_match):
        end = at
        while end < len(by_match) and matched[by_match[end]] == matched[by_match[at]]:
            end += 1
        group = by_match[at:end]
        kept.append(group[load[group] <= least])
        least, at = min(least, float(load[group].min())), end
    return np.concatenate(kept)
