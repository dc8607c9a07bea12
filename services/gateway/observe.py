"""What a request leaves behind in metrics and on its span. Times are seconds of the event loop's clock."""

from __future__ import annotations

from opentelemetry.trace import Span

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.telemetry import genai, metrics, names, tracing
from services.gateway.tally import Tallies, Tally


class Observer:
    """Measures one request: `tokens` when some have reached the client, `finished` or `failed`, then `ended`."""

    def __init__(self, span: Span, operation: str, model: str, started: float, tally: Tally | None = None) -> None:
        self._span = span
        self._operation = operation
        self._model = model
        self._used = pb.Usage()
        self._error = ""
        self._started = started
        self._tally = tally or Tallies().begin("")
        # Of each choice: when its first and its last tokens came, and how many came after the first.
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._after: dict[int, int] = {}
        self.ttft_s: float | None = None
        self._inter_token = metrics.histogram(names.INTER_TOKEN).labels(model)

    def tokens(self, choice: int, count: int, now: float) -> None:
        """`count` output tokens of a choice reached the client."""
        if count == 0:
            return
        if self.ttft_s is None:
            self.ttft_s = now - self._started
            metrics.histogram(names.TTFT).labels(self._model).observe(self.ttft_s)
            self._tally.first_token(self.ttft_s)
            self._span.add_event("first token")
        last = self._last.get(choice)
        if last is not None:
            # Tokens that left together share the time since the last ones.
            for _ in range(count):
                self._inter_token.observe((now - last) / count)
            self._after[choice] = self._after.get(choice, 0) + count
        else:
            self._first[choice] = now
        self._last[choice] = now

    def finished(self, usage: pb.Usage, reasons: list[str]) -> None:
        """The request went well; one finish reason a choice."""
        for reason in reasons:
            metrics.counter(names.REQUEST_SUCCESS).labels(self._model, reason).inc()
        self._usage(usage)
        self._tally.finished(self._model, self.ttft_s, self._tpot_s())
        self._span.set_attribute(names.GEN_AI_FINISH_REASONS, reasons)

    def failed(self, usage: pb.Usage, error: KvmeshError) -> None:
        """The request ended with an error, or the client left (reason CANCELLED)."""
        metrics.counter(names.REQUEST_FAILURE).labels(self._model, error.reason).inc()
        self._usage(usage)
        self._tally.failed(error, self._model)
        self._error = error.reason
        tracing.mark_failed(self._span, error.reason)

    def ended(self, now: float) -> None:
        """Whatever the end was."""
        metrics.histogram(names.E2E).labels(self._model).observe(now - self._started)
        genai.genai().record(
            self._operation,
            self._model,
            duration_s=now - self._started,
            ttft_s=self.ttft_s,
            input_tokens=self._used.prompt_tokens,
            output_tokens=self._used.completion_tokens,
            error_type=self._error,
        )

    def _tpot_s(self) -> float:
        """Seconds a token after the first ones, of the slowest choice."""
        first, last = self._first, self._last
        return max(((last[choice] - first[choice]) / count for choice, count in self._after.items()), default=0.0)

    def _usage(self, usage: pb.Usage) -> None:
        self._used = usage
        self._tally.used(usage)
        metrics.counter(names.PROMPT_TOKENS).labels(self._model).inc(usage.prompt_tokens)
        metrics.counter(names.GENERATION_TOKENS).labels(self._model).inc(usage.completion_tokens)
        self._span.set_attribute(names.GEN_AI_USAGE_INPUT_TOKENS, usage.prompt_tokens)
        self._span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, usage.completion_tokens)
        self._span.set_attribute(names.GEN_AI_USAGE_CACHED_TOKENS, usage.cached_tokens)
