"""The engine's Prometheus metrics, from the core's totals and from what requests report at their end."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvmesh.engine.events import Counters, LoadSnapshot, StepDone, Usage
from kvmesh.kv.pool import PoolCounts
from kvmesh.telemetry import metrics, names

# Gauges follow the load at most this often: steps of a small model last milliseconds.
INTERVAL_S = 0.1


class Meters:
    """Metrics of one engine, labelled with the model it serves."""

    def __init__(
        self,
        model: str,
        counters: Callable[[], Counters],
        pages: Callable[[], PoolCounts],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`counters` and `pages` are read on this thread while the core's writes them: a little late is fine."""
        self._model = model
        self._counters = counters
        self._pages = pages
        self._clock = clock
        self._next = 0.0
        self._seen = Counters()
        for metric in (names.SPEC_DRAFTS, names.SPEC_DRAFT_TOKENS, names.SPEC_ACCEPTED_TOKENS):
            # Nothing is speculated yet.
            metrics.at_zero(metric, model)
        # Whoever measures here has loaded it, also where there was nothing to load.
        metrics.gauge(names.MODEL_LOAD_PROGRESS).labels(model).set(1.0)
        metrics.at_zero(names.REQUEST_SUCCESS, model, ("stop", "length"))
        metrics.at_zero(names.LOCAL_PREFILLS, model, ("no_target", "short", "no_sidecar", "scored", "failed"))
        metrics.at_zero(names.REMOTE_PREFILLS, model, ("ok", "cancelled", "unavailable", "deadline_exceeded"))
        metrics.at_zero(names.REMOTE_PREFILLS, model, ("overloaded", "transfer_failed"))
        metrics.at_zero(names.TRANSFER_LEASES, ("prefill", "sidecar"))
        self._ttft = metrics.histogram(names.TTFT).labels(model)
        self._inter_token = metrics.histogram(names.INTER_TOKEN).labels(model)

    def on_step(self, event: StepDone) -> None:
        """Follow the load (rate limited)."""
        now = self._clock()
        if now >= self._next or event.load.running + event.load.waiting + event.load.transferring == 0:
            self._next = now + INTERVAL_S
            self.refresh(event.load)

    def refresh(self, load: LoadSnapshot) -> None:
        """Set the gauges and add what the core has counted since the last time."""
        model = self._model
        metrics.gauge(names.NUM_REQUESTS_RUNNING).labels(model).set(load.running)
        metrics.gauge(names.NUM_REQUESTS_WAITING).labels(model).set(load.waiting)
        metrics.gauge(names.NUM_TOKENS_WAITING).labels(model).set(load.queued_tokens)
        metrics.gauge(names.KV_CACHE_USAGE).labels(model).set(1.0 - load.free_pages / max(1, load.total_pages))
        metrics.gauge(names.STALLED).labels(model).set(int(load.stalled))
        metrics.gauge(names.KV_POOL_PAGES).labels(model).set(load.total_pages)
        for state, count in self._pages()._asdict().items():
            metrics.gauge(names.KV_PAGES).labels(model, state).set(count)
        counters, seen = self._counters(), self._seen
        for metric, name in (
            (names.PROMPT_TOKENS, "prompt_tokens"),
            (names.GENERATION_TOKENS, "generation_tokens"),
            (names.NUM_PREEMPTIONS, "preemptions"),
            (names.PREFIX_QUERIES, "prefix_cache_queries"),
            (names.PREFIX_HITS, "prefix_cache_hits"),
        ):
            total = getattr(counters, name)
            metrics.counter(metric).labels(model).inc(max(0, total - getattr(seen, name)))
            setattr(seen, name, total)
        for phase, name in (("prefill", "prefill_tokens"), ("decode", "decode_tokens")):
            total = getattr(counters, name)
            metrics.counter(names.STEP_TOKENS).labels(model, phase).inc(max(0, total - getattr(seen, name)))
            setattr(seen, name, total)
        steps, seconds = counters.steps - seen.steps, counters.step_seconds - seen.step_seconds
        if steps > 0:
            # One observation for the steps since the last time: their mean.
            metrics.histogram(names.STEP_TIME).labels(model, "mixed").observe(seconds / steps)
            seen.steps, seen.step_seconds = counters.steps, counters.step_seconds

    def inter_token(self, seconds: float) -> None:
        """Time between two tokens of a choice."""
        self._inter_token.observe(seconds)

    def finished(self, usage: Usage, e2e_s: float, reasons: set[str]) -> None:
        """A request that succeeded. `reasons`: finish reasons of its choices."""
        model = self._model
        for reason in sorted(reasons) or ["none"]:
            metrics.counter(names.REQUEST_SUCCESS).labels(model, reason).inc()
        self._times(usage, e2e_s)

    def failed(self, usage: Usage | None, e2e_s: float, reason: str) -> None:
        """A request that ended with an error."""
        metrics.counter(names.REQUEST_FAILURE).labels(self._model, reason).inc()
        if usage is not None:
            self._times(usage, e2e_s)

    def _times(self, usage: Usage, e2e_s: float) -> None:
        model = self._model
        if usage.ttft_ms is not None:
            self._ttft.observe(usage.ttft_ms / 1e3)
        metrics.histogram(names.E2E).labels(model).observe(e2e_s)
        metrics.histogram(names.QUEUE_TIME).labels(model).observe(usage.queue_ms / 1e3)
        metrics.histogram(names.PREFILL_TIME).labels(model).observe(usage.prefill_ms / 1e3)
        metrics.histogram(names.DECODE_TIME).labels(model).observe(usage.decode_ms / 1e3)

    def local_prefill(self, cause: str) -> None:
        """A prompt is prefilled on decode; cause: no_target, short, no_sidecar, scored, failed."""
        metrics.counter(names.LOCAL_PREFILLS).labels(self._model, cause).inc()

    def lease_expired(self, peer_kind: str) -> None:
        """A peer's lease ran out: prefill (bytes it says it wrote did not come), sidecar (its own does not answer)."""
        metrics.counter(names.TRANSFER_LEASES).labels(peer_kind).inc()

    def remote_prefill(self, outcome: str) -> None:
        """A placement ended; outcome: ok, cancelled, or the reason of its failure."""
        metrics.counter(names.REMOTE_PREFILLS).labels(self._model, outcome).inc()
