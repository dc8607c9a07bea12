"""Who asks for what, gets what, and what is refused."""

from __future__ import annotations

from tools.dashboards.grafana import TOKENS_S, Board, Row, series
from tools.dashboards.promql import ALL, GATEWAY, share

TENANT = 'tenant=~"$tenant"'
TENANTS = Board(
    uid="kvmesh-tenants",
    title="kvmesh / tenants",
    help="Who asks for what, gets what, and what is refused. The 101st tenant and further ones are `other`.",
    tenants=True,
    panels=[
        Row("Requests"),
        series(
            "Requests by tenant",
            "reqps",
            (GATEWAY.rate("tenant_requests_total", TENANT, by="tenant"), "{{tenant}}"),
            help="Requests that ended, whatever their end.",
            stacked=True,
        ),
        series(
            "Not answered",
            "reqps",
            (
                GATEWAY.rate("tenant_requests_total", TENANT, 'outcome!="ok"', by="tenant outcome"),
                "{{tenant}} {{outcome}}",
            ),
            help="failed: an error or a refusal. cancelled: the client left.",
            runbook="requests-fail",
        ),
        series(
            "Time to first token, p95",
            "s",
            (GATEWAY.quantile(0.95, "tenant_time_to_first_token_seconds", TENANT, by="tenant"), "{{tenant}}"),
            help="Arrival to the first token at the client. Priorities and weights of tenants show here.",
            levels=(2,),
            runbook="ttft-rises",
        ),
        Row("Tokens"),
        series(
            "Tokens by tenant",
            TOKENS_S,
            (GATEWAY.rate("tenant_tokens_total", TENANT, 'kind!="cached"', by="tenant kind"), "{{tenant}} {{kind}}"),
            help="Prompt and completion tokens.",
            stacked=True,
        ),
        series(
            "Share of prompt tokens from caches",
            "percentunit",
            (
                share(
                    GATEWAY.rate("tenant_tokens_total", TENANT, 'kind="cached"', by="tenant"),
                    GATEWAY.rate("tenant_tokens_total", TENANT, 'kind="prompt"', by="tenant"),
                ),
                "{{tenant}}",
            ),
            help="Tenants share neither answers nor prefixes.",
            most=1,
        ),
        series(
            "Generated today",
            "short",
            (
                GATEWAY.increase("tenant_tokens_total", TENANT, 'kind="completion"', by="tenant", window="1d"),
                "{{tenant}}",
            ),
            help="Completion tokens of the last 24 hours. Bills come from `kvmesh usage`, which loses nothing.",
        ),
        Row("Limits and budgets"),
        series(
            "Refused by a limit",
            "reqps",
            (GATEWAY.rate("limits_refused_total", by="limit"), "{{limit}}"),
            help="requests_per_minute, tokens_per_minute, max_concurrent, budget.",
            stacked=True,
        ),
        series(
            "Running requests: budget taken",
            "ops",
            (GATEWAY.rate("limits_top_ups_total", by="outcome"), "{{outcome}}"),
            (GATEWAY.rate("limits_stopped_total"), "ended: budget spent"),
            help="A request takes more of its budget while it streams.",
        ),
        series(
            "Strangers",
            "reqps",
            (ALL.rate("auth_failures_total", by="cause"), "{{cause}}"),
            help="Calls that authentication refused.",
        ),
        series(
            "Settlements that wait for Redis",
            "short",
            (GATEWAY.gauge("sum", "limits_unsettled"), "unsettled"),
            (GATEWAY.gauge("sum", "limits_holds"), "holds"),
            help="unsettled must fall back to 0; holds are of requests that run.",
            levels=(100,),
            runbook="budgets-unsettled",
        ),
        series(
            "Lost",
            "short",
            (GATEWAY.increase("limits_lost_total"), "settlements lost"),
            (GATEWAY.increase("limits_disk_errors_total"), "journal errors"),
            help="Both must be 0.",
            levels=(1,),
            runbook="limits-lost",
        ),
        series(
            "Limits without Redis",
            "reqps",
            (GATEWAY.rate("limits_local_total"), "let in by a process alone"),
            help="Redis is away or slow: each process keeps its share.",
            runbook="redis-errors",
        ),
    ],
)
