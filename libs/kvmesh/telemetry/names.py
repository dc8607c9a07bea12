"""Every metric name, span name and attribute key of kvmesh. Nothing is measured under a name that is not here.

Prometheus names carry the prefix `kvmesh:`, the unit last, and `_total` on counters only. OpenTelemetry names are
those of the GenAI semantic conventions where one exists and `kvmesh.*` otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "kvmesh:"

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
RPC_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEP_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096)
TRANSFER_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)

AGE_BUCKETS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0, 2592000.0)
TOKEN_USAGE_BUCKETS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One Prometheus metric: full name, kind, help text, label names, buckets (histograms, in the metric's unit).

    across: what a gauge of several processes of one service is together.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    across: Literal["sum", "min", "max"] = "sum"

    def __post_init__(self) -> None:
        assert self.name.startswith(PREFIX), self.name
        assert (self.kind == "counter") == self.name.endswith("_total"), self.name
        assert (self.kind == "histogram") == bool(self.buckets), self.name


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str, across: Literal["sum", "min", "max"] = "sum") -> Metric:
    return Metric(PREFIX + name, "gauge", text, labels, across=across)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(PREFIX + name, "histogram", text, labels, buckets)


# --- every service -------------------------------------------------------------------------------------------------
BUILD_INFO = _gauge(
    "build_info", "Always 1; the labels tell what runs.", "service", "instance", "version", across="max"
)
READY = _gauge("ready", "1 while the service's readiness is SERVING.", "service", across="min")
RPC_HANDLED = _counter("rpc_handled_total", "Calls served, by method and status code.", "method", "code")
RPC_DURATION = _histogram("rpc_duration_seconds", "Time in the handler of a call.", RPC_BUCKETS, "method", "code")
RPC_IN_FLIGHT = _gauge("rpc_in_flight", "Calls being served now.", "method")
TRACE_SPANS_DROPPED = _counter(
    "trace_spans_dropped_total",
    "Finished spans that were wanted and never exported: held too long, the queue full, the collector away.",
    "cause",
)
LOGS_SUPPRESSED = _counter("log_lines_suppressed_total", "Warnings that repeated too often to be written.")
TASK_FAILURES = _counter("background_task_failures_total", "Background tasks that ended with an error.", "task")

# --- engine, gateway: the shapes that dashboards know --------------------------------------------------------------
NUM_REQUESTS_RUNNING = _gauge("num_requests_running", "Sequences in the batch.", "model_name")
NUM_REQUESTS_WAITING = _gauge("num_requests_waiting", "Sequences that wait for a batch place.", "model_name")
NUM_TOKENS_WAITING = _gauge(
    "num_tokens_waiting", "Prompt tokens that wait in the engine or are partly computed.", "model_name"
)
NUM_PREEMPTIONS = _counter("num_preemptions_total", "Sequences preempted for pages.", "model_name")
KV_CACHE_USAGE = _gauge("kv_cache_usage_perc", "Share of KV pages in use (0 to 1).", "model_name")
KV_PAGES = _gauge("kv_pages", "KV pages by state: free, owned, exposed, draining.", "model_name", "state")
KV_POOL_PAGES = _gauge("kv_pool_pages", "KV pages that the engine was given: what all states add up to.", "model_name")
PROMPT_TOKENS = _counter("prompt_tokens_total", "Prompt tokens processed.", "model_name")
GENERATION_TOKENS = _counter("generation_tokens_total", "Tokens generated.", "model_name")
REQUEST_SUCCESS = _counter("request_success_total", "Requests finished, by reason.", "model_name", "finished_reason")
REQUEST_FAILURE = _counter("request_failure_total", "Requests failed, by reason.", "model_name", "reason")
TTFT = _histogram("time_to_first_token_seconds", "Arrival to first sampled token.", TTFT_BUCKETS, "model_name")
INTER_TOKEN = _histogram("inter_token_latency_seconds", "Time between tokens of a stream.", TPOT_BUCKETS, "model_name")
E2E = _histogram("e2e_request_latency_seconds", "Arrival to terminal event.", DURATION_BUCKETS, "model_name")
QUEUE_TIME = _histogram("request_queue_time_seconds", "Time in the queue.", DURATION_BUCKETS, "model_name")
PREFILL_TIME = _histogram("request_prefill_time_seconds", "Time in prefill.", DURATION_BUCKETS, "model_name")
DECODE_TIME = _histogram("request_decode_time_seconds", "Time in decode.", DURATION_BUCKETS, "model_name")
PREFIX_QUERIES = _counter("prefix_cache_queries_total", "Tokens looked up in the prefix cache.", "model_name")
PREFIX_HITS = _counter("prefix_cache_hits_total", "Tokens found in the prefix cache.", "model_name")
SPEC_DRAFTS = _counter("spec_decode_num_drafts_total", "Drafts verified.", "model_name")
SPEC_DRAFT_TOKENS = _counter("spec_decode_num_draft_tokens_total", "Draft tokens verified.", "model_name")
SPEC_ACCEPTED_TOKENS = _counter("spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", "model_name")

# --- engine only ---------------------------------------------------------------------------------------------------
STEP_TIME = _histogram("step_duration_seconds", "Time of one engine step.", STEP_BUCKETS, "model_name", "phase")
STEP_TOKENS = _counter("step_tokens_total", "Tokens computed by steps.", "model_name", "phase")
STALLED = _gauge("engine_stalled", "1 while there is work and no progress.", "model_name")
LOCAL_PREFILLS = _counter("local_prefills_total", "Prompts prefilled on decode, by cause.", "model_name", "cause")
REMOTE_PREFILLS = _counter("remote_prefills_total", "Prompts prefilled elsewhere, by outcome.", "model_name", "outcome")
MODEL_LOAD_PROGRESS = _gauge("model_load_progress_ratio", "Share of the model loaded (0 to 1).", "model_name")

# --- gateway -------------------------------------------------------------------------------------------------------
GATEWAY_ACTIVE = _gauge("gateway_requests_active", "Requests held by the gateway.")
GATEWAY_WAITING = _gauge("gateway_requests_waiting", "Requests that wait for a worker in the gateway.")
GATEWAY_WAITING_TOKENS = _gauge("gateway_waiting_tokens", "Prompt tokens in the gateway's line.", "model_name")
GATEWAY_QUEUE_TIME = _histogram(
    "gateway_queue_time_seconds",
    "Time in the gateway's line until a worker had room, by priority: low (below 0), normal (0), high (above 0).",
    DURATION_BUCKETS,
    "model_name",
    "priority",
)
GATEWAY_QUEUE_DELAY = _gauge(
    "gateway_queue_delay_seconds",
    "Estimated wait of whoever came last, lined up or refused for it, at the measured pace.",
    "model_name",
    across="max",
)
SLO_REQUESTS = _counter(
    "slo_requests_total",
    "Requests ended, against slo_ttft_ms and slo_tpot_ms: good, late_first_token, slow_tokens, failed.",
    "model_name",
    "outcome",
)
TENANT_REQUESTS = _counter("tenant_requests_total", "Requests: ok, failed, refused, cancelled.", "tenant", "outcome")
TENANT_TOKENS = _counter("tenant_tokens_total", "Tokens by kind: prompt, completion, cached.", "tenant", "kind")
TENANT_TTFT = _histogram(
    "tenant_time_to_first_token_seconds", "Arrival to the first token at the client.", TTFT_BUCKETS, "tenant"
)
GATEWAY_REFUSED = _counter(
    "gateway_refused_total", "Requests that the line refused: late (early refusal), full, shed.", "cause"
)
GATEWAY_HEALS = _counter("gateway_heals_total", "Requests placed again after a lost worker.", "outcome")
GATEWAY_DEGRADED = _counter("gateway_degraded_total", "Requests placed without a router.")
GATEWAY_SLOW_READERS = _counter("gateway_slow_readers_total", "Requests aborted since their reader was too slow.")
GATEWAY_FLIGHTS = _counter("gateway_flights_total", "Shared generations, by what this gateway did in them.", "role")
GATEWAY_WORKERS = _gauge("gateway_workers", "Workers whose frames are open, by state.", "state", across="max")
LIMITS_REFUSED = _counter("limits_refused_total", "Requests that a tenant's limit kept out, by limit.", "limit")
LIMITS_LOCAL = _counter("limits_local_total", "Requests let in by this process alone, since Redis was away.")
LIMITS_STOPPED = _counter("limits_stopped_total", "Running requests that ended because their budget was spent.")
LIMITS_TOP_UPS = _counter(
    "limits_top_ups_total", "Times a running request took more of its budget, by outcome.", "outcome"
)
LIMITS_HOLDS = _gauge("limits_holds", "Requests of this process that hold something of a limit.")
LIMITS_UNSETTLED = _gauge("limits_unsettled", "Settlements that Redis has not confirmed yet.")
LIMITS_LOST = _counter(
    "limits_lost_total",
    "Settlements lost: Redis was away and no journal was set, or more than memory holds waited while the disk hung.",
)
LIMITS_DISK = _counter("limits_disk_errors_total", "Failed operations on the journal or the usage file.")
AUTH_FAILURES = _counter("auth_failures_total", "Calls refused by authentication, by cause.", "cause")

# --- router --------------------------------------------------------------------------------------------------------
ROUTER_DECISIONS = _counter("router_decisions_total", "Route answers, by kind.", "decision")
ROUTER_WORKERS = _gauge("router_workers", "Workers attached, by role.", "role")
ROUTER_PLACEMENTS = _counter("router_placements_total", "Requests placed, by worker named first.", "role", "worker")
ROUTER_IMBALANCE = _gauge(
    "router_imbalance_ratio",
    "Load of the most loaded serving worker over the mean of its role (1 = even).",
    "role",
    across="max",
)
ROUTER_BREAKERS = _gauge("router_breakers", "Workers by the state of their breaker: closed, open, half_open.", "state")
CLASS_DECISIONS = _counter(
    "router_class_decisions_total", "Classes decided for aliases, by pool and reason.", "alias", "pool", "reason"
)
CLASS_FEEDBACK = _counter("router_class_feedback_total", "Verdicts on answers of classes.", "pool", "verdict")
CLASS_CALIBRATION = _gauge(
    "router_class_calibration_gap", "Promised probability less the share of good answers, small pool, last verdicts."
)
CACHE_LOOKUPS = _counter("cache_lookups_total", "Cache look-ups, by cache and result.", "cache", "result")
CACHE_HIT_AGE = _histogram("cache_hit_age_seconds", "Age of the answers that were served again.", AGE_BUCKETS, "cache")
CACHE_SHADOWS = _counter("cache_shadows_total", "Semantic hits asked again, right, wrong or untold.", "verdict")
CACHE_FALSE_HITS = _gauge(
    "cache_false_hits_ratio",
    "Estimated share of wrong semantic hits: rate, and low and high of its 95 % interval; raw: of the verdicts alone.",
    "bound",
)
CACHE_ENTRIES = _gauge("cache_entries", "Entries in a cache.", "cache")
REDIS_ERRORS = _counter("redis_errors_total", "Redis operations that failed or timed out.", "operation")

# --- kvtransfer ----------------------------------------------------------------------------------------------------
TRANSFER_BYTES = _counter("transfer_bytes_total", "KV bytes moved.", "transport", "direction")
TRANSFER_WRITES = _counter("transfer_writes_total", "Writes posted, after merging.", "transport")
TRANSFER_SLOTS = _gauge("transfer_slots", "Slots by state.", "state")
TRANSFERS = _counter("transfers_total", "Transfers ended, by outcome.", "transport", "outcome")
TRANSFER_TIME = _histogram(
    "transfer_duration_seconds", "Descriptor accepted to slot complete.", TRANSFER_BUCKETS, "transport"
)
TRANSFER_EXPOSED = _histogram(
    "transfer_exposed_seconds",
    "The exposed tail: what decode waited for KV after the source had computed the last of it.",
    TRANSFER_BUCKETS,
    "transport",
)
TRANSFER_LEASES = _counter(
    "transfer_leases_expired_total",
    "Leases that ran out, by who was silent: writer (of a slot), peer (sidecar), prefill, sidecar (its engine's own).",
    "peer_kind",
)
TRANSFER_STALE = _counter("transfer_stale_total", "Writes and messages of old generations, dropped.", "transport")
TRANSFER_PEERS = _gauge("transfer_peers", "Connected peers.", "transport")
TRANSFER_LINKS = _gauge(
    "transfer_links",
    "Links by transport; reason_code: why the first transport of the destination's list was passed over, or `first`.",
    "transport",
    "direction",
    "reason_code",
)
PEER_FENCED = _counter(
    "transfer_peers_fenced_total",
    "Peers fenced: engine (ours left), idle (nothing was on its way), link (its transfers failed).",
    "cause",
)
HEARTBEATS_MISSED = _counter("heartbeats_missed_total", "Heartbeats that did not come in time.", "peer_kind")

# --- OpenTelemetry metrics (GenAI) ---------------------------------------------------------------------------------
GEN_AI_SERVER_REQUEST_DURATION = "gen_ai.server.request.duration"
GEN_AI_SERVER_TTFT = "gen_ai.server.time_to_first_token"
GEN_AI_SERVER_TPOT = "gen_ai.server.time_per_output_token"
GEN_AI_CLIENT_TOKEN_USAGE = "gen_ai.client.token.usage"

# --- spans ---------------------------------------------------------------------------------------------------------
# SERVER spans of calls are named by their method, "kvmesh.v1.Router/Route".
SPAN_CLIENT_REQUEST = "kvmesh.client.request"
SPAN_GATEWAY_ADMIT = "gateway.admit"
SPAN_GATEWAY_TOKENIZE = "gateway.tokenize"
SPAN_GATEWAY_PLACE = "gateway.place"
SPAN_GATEWAY_ATTEMPT = "gateway.attempt"
SPAN_GATEWAY_QUEUE = "gateway.queue"
SPAN_GATEWAY_REPLAY = "gateway.replay"
SPAN_GATEWAY_FOLLOW = "gateway.follow"
SPAN_ROUTER_ROUTE = "router.route"
SPAN_ROUTER_CACHE = "router.cache"
SPAN_CACHE_EXACT = "cache.exact"
SPAN_CACHE_SEMANTIC = "cache.semantic"
SPAN_ENGINE_SEQUENCE = "engine.sequence"
SPAN_ENGINE_QUEUE = "engine.queue"
SPAN_ENGINE_PREFILL = "engine.prefill"
SPAN_ENGINE_COMPUTE = "engine.compute"
SPAN_ENGINE_DECODE = "engine.decode"
SPAN_ENGINE_AWAIT_KV = "engine.await_kv"
SPAN_DECODE_REQUEST = "decode.request"
SPAN_DECODE_REMOTE_PREFILL = "decode.remote_prefill"
SPAN_TRANSFER_SEND = "kvtransfer.send"
SPAN_TRANSFER_RECEIVE = "kvtransfer.receive"


def gen_ai_span(operation: str, model: str) -> str:
    """Span name of a model operation, "{operation} {model}"."""
    return f"{operation} {model}"


# --- attribute keys ------------------------------------------------------------------------------------------------
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_TOKEN_TYPE = "gen_ai.token.type"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
ERROR_TYPE = "error.type"
PROVIDER = "kvmesh"

LEAVINGS = frozenset({"CANCELLED", "CancelledError", "ClientGone", "SinkClosed", "Gone", "GeneratorExit"})
"""Values of `error.type` for what ended since its client had left: nothing failed."""

REFUSALS = frozenset(
    {
        *("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "UNAUTHENTICATED", "PERMISSION_DENIED", "TOO_LARGE"),
        *("OVERLOADED", "RESOURCE_EXHAUSTED", "BUDGET_EXCEEDED", "FAILED_PRECONDITION", "NOT_CACHED", "UNIMPLEMENTED"),
    }
)
"""Values of `error.type` for what was not taken in: nothing broke."""

RPC_SYSTEM = "rpc.system"
RPC_SERVICE = "rpc.service"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.grpc.status_code"
SERVICE_NAME = "service.name"
SERVICE_INSTANCE = "service.instance.id"
SERVICE_VERSION = "service.version"

ATTR_KEPT = "kvmesh.trace.kept"
ATTR_LINK = "kvmesh.link"
ATTR_REQUEST_ID = "kvmesh.request.id"
ATTR_ATTEMPT = "kvmesh.request.attempt"
ATTR_REPLAYED_TOKENS = "kvmesh.request.replayed_tokens"
ATTR_TENANT = "kvmesh.tenant"
ATTR_QUEUE_ESTIMATE = "kvmesh.queue.estimated_wait_s"
ATTR_DECISION = "kvmesh.router.decision"
ATTR_CACHE = "kvmesh.cache"
ATTR_WORKER = "kvmesh.worker"
ATTR_PREFILL_WORKER = "kvmesh.worker.prefill"
ATTR_DECODE_WORKER = "kvmesh.worker.decode"
ATTR_TRANSPORT = "kvmesh.transfer.transport"
ATTR_TRANSFER_BYTES = "kvmesh.transfer.bytes"
ATTR_TRANSFER_ID = "kvmesh.transfer.id"
ATTR_SLOT = "kvmesh.transfer.slot"
ATTR_GENERATION = "kvmesh.transfer.generation"
ATTR_PREFIX_HIT_TOKENS = "kvmesh.prefix_cache.hit_tokens"


def all_metrics() -> list[Metric]:
    """Every Prometheus metric defined here."""
    return [value for value in globals().values() if isinstance(value, Metric)]
