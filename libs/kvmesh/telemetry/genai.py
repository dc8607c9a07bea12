"""OpenTelemetry GenAI metrics: the histograms that generic LLM dashboards read, pushed over OTLP when switched on.

The Prometheus metrics in `metrics` stay the primary ones; these repeat the four that the conventions name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.metrics import Histogram, MeterProvider, NoOpMeterProvider

from kvmesh import __version__
from kvmesh.telemetry import names

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader

EXPORT_INTERVAL_MS = 10_000
EXPORT_TIMEOUT_S = 3


class GenAiMetrics:
    """The four histograms; times in seconds, token counts in tokens."""

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter("kvmesh", __version__)

        def histogram(name: str, unit: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(
                name, unit=unit, description=text, explicit_bucket_boundaries_advisory=list(buckets)
            )

        self._duration = histogram(
            names.GEN_AI_SERVER_REQUEST_DURATION, "s", "Arrival to terminal event.", names.DURATION_BUCKETS
        )
        self._ttft = histogram(names.GEN_AI_SERVER_TTFT, "s", "Arrival to first token.", names.TTFT_BUCKETS)
        self._tpot = histogram(names.GEN_AI_SERVER_TPOT, "s", "Time a token after the first.", names.TPOT_BUCKETS)
        self._usage = histogram(names.GEN_AI_CLIENT_TOKEN_USAGE, "{token}", "Tokens used.", names.TOKEN_USAGE_BUCKETS)

    def record(
        self,
        operation: str,
        model: str,
        *,
        duration_s: float,
        ttft_s: float | None = None,
        input_tokens: int = 0,
        output_tokens: int = 0,
        error_type: str = "",
    ) -> None:
        """Record one finished request. `ttft_s` None: no token was sampled. `error_type`: reason of a failure."""
        common: Mapping[str, str] = {
            names.GEN_AI_OPERATION_NAME: operation,
            names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
            names.GEN_AI_REQUEST_MODEL: model,
        }
        failed = {names.ERROR_TYPE: error_type} if error_type else {}
        self._duration.record(duration_s, {**common, **failed})
        if ttft_s is not None:
            self._ttft.record(ttft_s, common)
            if output_tokens > 1:
                self._tpot.record((duration_s - ttft_s) / (output_tokens - 1), common)
        self._usage.record(input_tokens, {**common, names.GEN_AI_TOKEN_TYPE: "input"})
        self._usage.record(output_tokens, {**common, names.GEN_AI_TOKEN_TYPE: "output"})


_provider: SdkMeterProvider | None = None
_metrics = GenAiMetrics(NoOpMeterProvider())


def genai() -> GenAiMetrics:
    """The GenAI metrics of this process; they go nowhere unless `setup` was given somewhere to export to."""
    return _metrics


def setup(service: str, otlp_endpoint: str = "", *, instance: str = "", reader: MetricReader | None = None) -> None:
    """Start pushing to `otlp_endpoint` every 10 s ("" and no `reader` = off). `reader`: used instead (tests)."""
    global _provider, _metrics
    shutdown(timeout_s=1.0)
    if not otlp_endpoint and reader is None:
        return
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    if reader is None:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        exporter = OTLPMetricExporter(
            endpoint=otlp_endpoint, insecure=not otlp_endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S
        )
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=EXPORT_INTERVAL_MS)
    resource = Resource.create(
        {
            names.SERVICE_NAME: f"kvmesh-{service}",
            names.SERVICE_INSTANCE: instance,
            names.SERVICE_VERSION: __version__,
        }
    )
    _provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    _metrics = GenAiMetrics(_provider)


def shutdown(timeout_s: float = 3.0) -> None:
    """Push what is left and stop; gives up after `timeout_s`."""
    global _provider, _metrics
    provider, _provider = _provider, None
    if provider is None:
        return
    _metrics = GenAiMetrics(NoOpMeterProvider())
    thread = threading.Thread(
        target=provider.shutdown, args=(timeout_s * 1000,), name="kvmesh-metric-flush", daemon=True
    )
    thread.start()
    thread.join(timeout_s)
