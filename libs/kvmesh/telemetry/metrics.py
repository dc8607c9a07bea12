"""Prometheus metrics: one registry a process, metrics made on first use from their entry in `names`.

A second service in the same process (tests do that) shares the metric instead of failing on a duplicate.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)

from kvmesh.telemetry import names

disable_created_metrics()  # type: ignore[no-untyped-call]
REGISTRY = CollectorRegistry(auto_describe=True)
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

_lock = threading.Lock()
_made: dict[str, Counter | Gauge | Histogram] = {}


def _make(metric: names.Metric) -> Counter | Gauge | Histogram:
    with _lock:
        made = _made.get(metric.name)
        if made is None:
            if metric.kind == "counter":
                made = Counter(metric.name, metric.help, metric.labels, registry=REGISTRY)
            elif metric.kind == "gauge":
                # How it adds up matters only where `kvmesh.telemetry.multiprocess` is at work.
                made = Gauge(
                    metric.name,
                    metric.help,
                    metric.labels,
                    registry=REGISTRY,
                    multiprocess_mode=f"live{metric.across}",  # type: ignore[arg-type]
                )
            else:
                made = Histogram(metric.name, metric.help, metric.labels, registry=REGISTRY, buckets=metric.buckets)
            _made[metric.name] = made
        return made


def counter(metric: names.Metric) -> Counter:
    """The counter named by `metric`; call `.labels(...)` first when it has labels."""
    made = _make(metric)
    assert isinstance(made, Counter), metric.name
    return made


def gauge(metric: names.Metric) -> Gauge:
    """The gauge named by `metric`."""
    made = _make(metric)
    assert isinstance(made, Gauge), metric.name
    return made


def histogram(metric: names.Metric) -> Histogram:
    """The histogram named by `metric`; observations are in the unit at the end of the name."""
    made = _make(metric)
    assert isinstance(made, Histogram), metric.name
    return made


def at_zero(metric: names.Metric, *labels: str | Sequence[str]) -> None:
    """Begin the series of a metric at 0: `rate` sees the first event of a series only where it was there before.

    A sequence stands for each of its values.
    """
    made = _make(metric)
    for values in itertools.product(*([each] if isinstance(each, str) else each for each in labels)) if labels else ():
        made.labels(*values)


def value(metric: names.Metric, **labels: str) -> float:
    """Present value of a counter or gauge (for a histogram: the number of observations); 0.0 when never touched."""
    suffix = "_count" if metric.kind == "histogram" else ""
    return REGISTRY.get_sample_value(metric.name + suffix, labels) or 0.0


def render() -> bytes:
    """All metrics in the Prometheus text format."""
    return generate_latest(REGISTRY)


class MetricsServer:
    """The /metrics endpoint on a daemon thread; `address` is the bound "host:port"."""

    def __init__(self, address: str, server: WSGIServer, thread: threading.Thread) -> None:
        self.address = address
        self._server = server
        self._thread = thread

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def _plain(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """The same endpoint, always in the plain text format: asked for OpenMetrics, as Prometheus 2 does, the library
    writes `kvmesh_` where the name says `kvmesh:`."""

    def served(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        return app({**environ, "HTTP_ACCEPT": "text/plain;version=0.0.4"}, start_response)

    return served


def start_http(listen: str, registry: CollectorRegistry = REGISTRY) -> MetricsServer | None:
    """Serve /metrics on "host:port" (port 0 = any free port); "" = off, returns None. OSError when it cannot bind."""
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(int(port), addr=host.strip("[]"), registry=registry)
    except OSError as exc:
        raise OSError(exc.errno, f"metrics cannot listen on {listen}: {exc.strerror}") from None
    server.set_app(_plain(server.get_app()))  # type: ignore[arg-type]
    return MetricsServer(f"{host}:{server.server_port}", server, thread)
