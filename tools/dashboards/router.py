"""What routers decide, and what their answer cache does."""

from __future__ import annotations

from tools.dashboards.grafana import TOKENS_S, Board, Row, series, stat
from tools.dashboards.promql import ALL, ENGINE, GATEWAY, ROUTER, quantiles, share

ROUTING = Board(
    uid="kvmesh-router",
    title="kvmesh / router",
    help="What routers decide, and how evenly workers are loaded.",
    panels=[
        stat(
            "Decisions",
            "reqps",
            ROUTER.rate("router_decisions_total"),
            help="Route answers a second, all replicas.",
        ),
        stat(
            "Route p99",
            "s",
            ROUTER.quantile(0.99, "rpc_duration_seconds", 'method="kvmesh.v1.Router/Route"'),
            help="Time of a decision with its cache look-ups. Gateways wait route_timeout_ms (100 ms).",
            levels=(0.05, 0.1),
            runbook="routers-away",
        ),
        stat(
            "Without a router",
            "reqps",
            GATEWAY.rate("gateway_degraded_total"),
            help="Requests that gateways placed by themselves.",
            levels=(0.001, 1),
            runbook="routers-away",
        ),
        stat(
            "Breakers open",
            "short",
            ROUTER.gauge("max", "router_breakers", 'state="open"'),
            help="Workers that get nothing for a while.",
            levels=(1, 2),
            runbook="breaker-open",
        ),
        stat(
            "Imbalance, decode",
            "short",
            ROUTER.gauge("max", "router_imbalance_ratio", 'role=~"decode|unified"'),
            help="Load of the most loaded worker over the mean; 1 = even.",
            levels=(2, 3),
            runbook="router-imbalance",
        ),
        stat(
            "Workers",
            "short",
            f"sum({ROUTER.gauge('max', 'router_workers', by='role')})",
            help="Attached workers of all roles.",
        ),
        Row("Decisions"),
        series(
            "By kind",
            "reqps",
            (ROUTER.rate("router_decisions_total", by="decision"), "{{decision}}"),
            help="exact, semantic: answered from a cache. follow: a twin is running. placement: workers.",
            stacked=True,
        ),
        series(
            "Time of a decision",
            "s",
            *quantiles(ROUTER, "rpc_duration_seconds", 'method="kvmesh.v1.Router/Route"'),
            help="Handler time of Router.Route.",
            levels=(0.1,),
        ),
        series(
            "Classes",
            "ops",
            (ROUTER.rate("router_class_decisions_total", by="alias pool"), "{{alias}} → {{pool}}"),
            help="Aliases with two classes of model; nothing where none is set.",
        ),
        Row("Workers"),
        series(
            "Placements by worker",
            "reqps",
            (ROUTER.rate("router_placements_total", by="role worker"), "{{role}} {{worker}}"),
            help="Requests by the worker that was named first.",
            stacked=True,
            runbook="router-imbalance",
        ),
        series(
            "Imbalance",
            "short",
            (ROUTER.gauge("max", "router_imbalance_ratio", by="role"), "{{role}}"),
            help="Load of the most loaded serving worker over the mean of its role.",
            levels=(3,),
            runbook="router-imbalance",
        ),
        series(
            "Breakers",
            "short",
            (ROUTER.gauge("max", "router_breakers", by="state"), "{{state}}"),
            help="Workers by the state of their breaker.",
            stacked=True,
            runbook="breaker-open",
        ),
        series(
            "Attached workers",
            "short",
            (ROUTER.gauge("max", "router_workers", by="role"), "{{role}}"),
            help="Each worker attaches to every router replica.",
            runbook="worker-lost",
        ),
        series(
            "Sequences by worker",
            "short",
            (ENGINE.gauge("sum", "num_requests_running", by="job instance"), "{{job}} {{instance}}"),
            help="What the workers themselves count.",
            runbook="router-imbalance",
        ),
        series(
            "Prefix cache, share of tokens found",
            "percentunit",
            (
                share(
                    ENGINE.rate("prefix_cache_hits_total", by="job"),
                    ENGINE.rate("prefix_cache_queries_total", by="job"),
                ),
                "{{job}}",
            ),
            help="What affinity is for: a prompt goes where its beginning is.",
            most=1,
        ),
    ],
)

HITS = 'result="hit"'
CACHE = Board(
    uid="kvmesh-cache",
    title="kvmesh / answer cache",
    help="What the answer cache saves, and whether it is right.",
    panels=[
        *(
            stat(
                f"Hit rate, {cache}",
                "percentunit",
                share(
                    ROUTER.rate("cache_lookups_total", f'cache="{cache}"', HITS),
                    ROUTER.rate("cache_lookups_total", f'cache="{cache}"'),
                ),
                help=f"Hits among look-ups of the {cache} cache.",
                most=1,
            )
            for cache in ("exact", "semantic")
        ),
        stat(
            "False hits, estimated",
            "percentunit",
            ROUTER.gauge("max", "cache_false_hits_ratio", 'bound="rate"'),
            help="Share of semantic hits that are wrong, corrected for the judge's own errors.",
            levels=(0.01, 0.02),
            most=1,
            runbook="the-cache-is-wrong",
        ),
        stat(
            "At least",
            "percentunit",
            ROUTER.gauge("max", "cache_false_hits_ratio", 'bound="low"'),
            help="Low end of the 95 % interval; the alert is on this.",
            levels=(0.01, 0.02),
            most=1,
            runbook="the-cache-is-wrong",
        ),
        stat(
            "Entries",
            "short",
            ROUTER.gauge("max", "cache_entries", 'cache="semantic"'),
            help="Questions in the semantic index of a router.",
        ),
        stat(
            "Tokens saved",
            TOKENS_S,
            GATEWAY.rate("tenant_tokens_total", 'kind="cached"'),
            help="Prompt tokens that caches spared, answer and prefix caches together.",
        ),
        Row("Look-ups"),
        series(
            "Exact, by result",
            "ops",
            (ROUTER.rate("cache_lookups_total", 'cache="exact"', by="result"), "{{result}}"),
            help="follow: a twin is running. lead: the first of its kind. skipped: Redis is away.",
            stacked=True,
            runbook="cache-errors",
        ),
        series(
            "Semantic, by result",
            "ops",
            (ROUTER.rate("cache_lookups_total", 'cache="semantic"', by="result"), "{{result}}"),
            help="guarded: similar, but a guard saw a difference. timeout: no time left. skipped: not possible now.",
            stacked=True,
            runbook="cache-errors",
        ),
        series(
            "Age of what is served again",
            "s",
            (ROUTER.quantile(0.5, "cache_hit_age_seconds", by="cache"), "{{cache}} p50"),
            (ROUTER.quantile(0.95, "cache_hit_age_seconds", by="cache"), "{{cache}} p95"),
            help="Age of remembered answers at their hit; an answer's life counts from its storing.",
        ),
        Row("Is it right?"),
        series(
            "False hits with bounds",
            "percentunit",
            (ROUTER.gauge("max", "cache_false_hits_ratio", by="bound"), "{{bound}}"),
            help="rate, and low and high of its 95 % interval; raw: of the verdicts alone. No verdicts: 0 to 1.",
            levels=(0.02,),
            most=1,
            runbook="the-cache-is-wrong",
        ),
        series(
            "Shadow verdicts",
            "ops",
            (ROUTER.rate("cache_shadows_total", by="verdict"), "{{verdict}}"),
            help="Semantic hits that were asked again in the background (at most 1 %).",
            stacked=True,
            runbook="the-cache-is-wrong",
        ),
        series(
            "Redis errors",
            "ops",
            (ALL.rate("redis_errors_total", by="job operation"), "{{job}} {{operation}}"),
            help="Operations that failed or timed out. Requests are served without the cache then.",
            levels=(0.1,),
            runbook="redis-errors",
        ),
    ],
)
