"""What workers do: transfers, KV memory, speculation."""

from __future__ import annotations

from tools.dashboards.grafana import TOKENS_S, Board, Row, series, stat
from tools.dashboards.promql import ALL, GATEWAY, Source, quantiles, share
from tools.dashboards.promql import DECODE as ALL_DECODE

SIDECAR = Source("kvmesh-kvtransfer", chosen=True)
ENGINES = "kvmesh-(prefill|decode)"
ENGINE = Source(ENGINES, chosen=True)
DECODE = Source("kvmesh-decode", chosen=True)

TRANSFER = Board(
    uid="kvmesh-transfer",
    title="kvmesh / KV transfer",
    help="KV pages between prefill and decode.",
    instances="kvmesh-kvtransfer",
    panels=[
        stat(
            "Bandwidth",
            "Bps",
            SIDECAR.rate("transfer_bytes_total", 'direction="in"'),
            help="KV bytes that arrived, all sidecars.",
        ),
        stat(
            "Exposed tail p95",
            "s",
            ALL_DECODE.quantile(0.95, "transfer_exposed_seconds"),
            help="What decode waited for KV after the source had computed the last of it. The rest was hidden.",
            levels=(0.05, 0.25),
            runbook="ttft-rises",
        ),
        stat(
            "Leases expired",
            "short",
            ALL.increase("transfer_leases_expired_total", window="1h"),
            help="In the last hour.",
            levels=(1, 10),
            runbook="leases-expired",
        ),
        stat(
            "Stale immediates",
            "ops",
            SIDECAR.rate("transfer_stale_total"),
            help="Writes and messages of old generations, dropped. A few come with each aborted transfer.",
            levels=(1, 10),
            runbook="stale-immediates",
        ),
        stat(
            "Links not on their first transport",
            "short",
            'sum(kvmesh:transfer_links{job="kvmesh-kvtransfer",namespace=~"$namespace",instance=~"$instance",'
            'direction="out",reason_code!="first"}) or vector(0)',
            help="Where RDMA is expected this must be 0.",
            levels=(1, 2),
            runbook="nic-down",
        ),
        stat("Slots in use", "short", SIDECAR.gauge("sum", "transfer_slots", 'state="open"'), help="Open slots."),
        Row("Flow"),
        series(
            "Bandwidth by transport",
            "Bps",
            (SIDECAR.rate("transfer_bytes_total", by="transport direction"), "{{transport}} {{direction}}"),
            help="KV bytes a second.",
            runbook="nic-down",
        ),
        series(
            "Exposed tail",
            "s",
            *quantiles(ALL_DECODE, "transfer_exposed_seconds"),
            help="What decode waited after the source had computed the last layer: what TTFT pays for it.",
            runbook="ttft-rises",
        ),
        series(
            "Descriptor to complete slot",
            "s",
            *quantiles(SIDECAR, "transfer_duration_seconds"),
            help="Long where prefill computes long: layers leave as they are done.",
        ),
        series(
            "Transfers by outcome",
            "ops",
            (SIDECAR.rate("transfers_total", by="transport outcome"), "{{transport}} {{outcome}}"),
            help="done; aborted: the destination asked for it; failed: the source could not.",
            stacked=True,
            runbook="nic-down",
        ),
        series(
            "Bytes a write",
            "bytes",
            (
                share(
                    SIDECAR.rate("transfer_bytes_total", 'direction="out"', by="transport"),
                    SIDECAR.rate("transfer_writes_total", by="transport"),
                ),
                "{{transport}}",
            ),
            help="After merging; larger is cheaper. Ascending runs of pages merge.",
        ),
        series(
            "Where prompts were computed",
            "ops",
            (ALL_DECODE.rate("remote_prefills_total", by="outcome"), "elsewhere: {{outcome}}"),
            (ALL_DECODE.rate("local_prefills_total", by="cause"), "on decode: {{cause}}"),
            help="short: cheaper here. no_target, no_sidecar, failed: not what was wanted.",
            stacked=True,
            runbook="ttft-rises",
        ),
        Row("Links"),
        series(
            "Links by transport and reason",
            "short",
            (
                SIDECAR.gauge("sum", "transfer_links", 'direction="out"', by="transport reason_code"),
                "{{transport}}: {{reason_code}}",
            ),
            help="first: the first transport of the destination's list. Else why that was passed over.",
            stacked=True,
            runbook="nic-down",
        ),
        series(
            "Peers",
            "short",
            (SIDECAR.gauge("sum", "transfer_peers", by="transport"), "{{transport}}"),
            help="Connected peers.",
        ),
        series(
            "Slots",
            "short",
            (SIDECAR.gauge("sum", "transfer_slots", by="state"), "{{state}}"),
            help="Slots by state; they return on completion, Drained or a fence.",
            runbook="pages-leak",
        ),
        Row("Faults"),
        series(
            "Leases expired",
            "ops",
            (ALL.rate("transfer_leases_expired_total", by="peer_kind"), "{{peer_kind}}"),
            help="Waits for a peer that outlived their lease.",
            runbook="leases-expired",
        ),
        series(
            "Stale immediates",
            "ops",
            (SIDECAR.rate("transfer_stale_total", by="transport"), "{{transport}}"),
            help="Writes and messages of old generations, counted and dropped.",
            runbook="stale-immediates",
        ),
        series(
            "Peers fenced",
            "ops",
            (SIDECAR.rate("transfer_peers_fenced_total", by="cause"), "{{cause}}"),
            help="engine: its process ended. link: the connection broke.",
            runbook="leases-expired",
        ),
    ],
)

MEMORY = Board(
    uid="kvmesh-memory",
    title="kvmesh / KV memory and steps",
    help="Pages, prefix cache, batches and steps of the engines.",
    instances=ENGINES,
    panels=[
        stat(
            "KV use, decode",
            "percentunit",
            DECODE.gauge("avg", "kv_cache_usage_perc"),
            help="Mean over the workers. Decode scales on it.",
            levels=(0.85, 0.95),
            most=1,
            runbook="kv-memory-full",
        ),
        stat(
            "Fullest worker",
            "percentunit",
            ENGINE.gauge("max", "kv_cache_usage_perc"),
            help="Pages that only the prefix cache holds count as free.",
            levels=(0.9, 0.98),
            most=1,
            runbook="kv-memory-full",
        ),
        stat(
            "Prefix hits",
            "percentunit",
            share(ENGINE.rate("prefix_cache_hits_total"), ENGINE.rate("prefix_cache_queries_total")),
            help="Share of prompt tokens that were found.",
            most=1,
        ),
        stat(
            "Draining",
            "short",
            ENGINE.gauge("sum", "kv_pages", 'state="draining"'),
            help="Pages that wait for a writer to say that it is done. Must fall back to 0.",
            levels=(1, 1000),
            runbook="pages-leak",
        ),
        stat(
            "Preemptions",
            "ops",
            ENGINE.rate("num_preemptions_total"),
            help="Sequences that lost their pages and are computed again.",
            levels=(0.01, 0.1),
            runbook="kv-memory-full",
        ),
        stat(
            "Stalled engines",
            "short",
            ENGINE.gauge("sum", "engine_stalled"),
            help="Work and no progress.",
            levels=(1, 2),
            runbook="engine-stalled",
        ),
        Row("Pages"),
        series(
            "Pages by state",
            "short",
            (ENGINE.gauge("sum", "kv_pages", by="state"), "{{state}}"),
            help="free → owned → exposed (named in a live descriptor) → draining → free.",
            stacked=True,
            runbook="pages-leak",
        ),
        series(
            "Use by worker",
            "percentunit",
            (ENGINE.gauge("max", "kv_cache_usage_perc", by="job instance"), "{{job}} {{instance}}"),
            help="Share of pages in use.",
            levels=(0.95,),
            most=1,
            runbook="kv-memory-full",
        ),
        series(
            "Sum of all states, by worker",
            "short",
            (ENGINE.gauge("sum", "kv_pages", by="job instance"), "{{job}} {{instance}}"),
            help="The size of the pool: a straight line. A step down is a leak.",
            runbook="pages-leak",
        ),
        series(
            "Exposed and draining, by worker",
            "short",
            (
                ENGINE.gauge("sum", "kv_pages", 'state=~"exposed|draining"', by="instance state"),
                "{{instance}} {{state}}",
            ),
            help="Both fall to 0 when nothing runs.",
            runbook="pages-leak",
        ),
        series(
            "Prefix cache, tokens",
            TOKENS_S,
            (ENGINE.rate("prefix_cache_queries_total"), "looked up"),
            (ENGINE.rate("prefix_cache_hits_total"), "found"),
            help="Tokens of prompts.",
        ),
        series(
            "Preemptions by worker",
            "ops",
            (ENGINE.rate("num_preemptions_total", by="instance"), "{{instance}}"),
            help="The lowest priority, newest sequence goes first.",
            runbook="kv-memory-full",
        ),
        Row("Batches and steps"),
        series(
            "Batch",
            "short",
            (ENGINE.gauge("sum", "num_requests_running", by="job instance"), "{{job}} {{instance}} running"),
            (ENGINE.gauge("sum", "num_requests_waiting", by="job instance"), "{{job}} {{instance}} waiting"),
            help="Sequences in the batch, and those that wait for a place.",
        ),
        series(
            "Time of a step",
            "s",
            (ENGINE.quantile(0.5, "step_duration_seconds", by="job"), "{{job}} p50"),
            (ENGINE.quantile(0.95, "step_duration_seconds", by="job"), "{{job}} p95"),
            help="A decode step is what TPOT is made of.",
            runbook="tpot-rises",
        ),
        series(
            "Tokens computed",
            TOKENS_S,
            (ENGINE.rate("step_tokens_total", by="job phase"), "{{job}} {{phase}}"),
            help="prefill tokens on decode workers take time from running streams.",
            stacked=True,
            runbook="tpot-rises",
        ),
    ],
)

ACCEPTED = DECODE.rate("spec_decode_num_accepted_tokens_total")
DRAFTED = DECODE.rate("spec_decode_num_draft_tokens_total")
DRAFTS = DECODE.rate("spec_decode_num_drafts_total")
SPECULATION = Board(
    uid="kvmesh-speculation",
    title="kvmesh / speculation",
    help="Speculative decoding. Everything is 0 where no drafts are made.",
    instances="kvmesh-decode",
    panels=[
        stat(
            "Acceptance",
            "percentunit",
            share(ACCEPTED, DRAFTED),
            help="Share of draft tokens that the model accepted.",
            most=1,
            width=8,
        ),
        stat(
            "Tokens a verification",
            "short",
            f"1 + {share(ACCEPTED, DRAFTS)}",
            help="Accepted draft tokens and the model's own one. 1 = nothing is won.",
            width=8,
        ),
        stat("Drafts", "ops", DRAFTS, help="Drafts verified a second.", width=8),
        Row("Over time"),
        series(
            "Acceptance by worker",
            "percentunit",
            (
                share(
                    DECODE.rate("spec_decode_num_accepted_tokens_total", by="instance"),
                    DECODE.rate("spec_decode_num_draft_tokens_total", by="instance"),
                ),
                "{{instance}}",
            ),
            help="Equal on all workers. Lower after a hand-over from prefill means a wrong hidden state.",
            most=1,
            width=12,
            runbook="tpot-rises",
        ),
        series(
            "Draft tokens",
            TOKENS_S,
            (DRAFTED, "verified"),
            (ACCEPTED, "accepted"),
            help="What verification computes, and what of it is used.",
            width=12,
        ),
        series(
            "Generated",
            TOKENS_S,
            (DECODE.rate("generation_tokens_total"), "tokens"),
            help="Tokens that decode workers generated.",
            width=12,
        ),
        series(
            "Time between tokens",
            "s",
            *quantiles(GATEWAY, "inter_token_latency_seconds"),
            help="At the client: what speculation is for.",
            levels=(0.1,),
            width=12,
            runbook="tpot-rises",
        ),
    ],
)
