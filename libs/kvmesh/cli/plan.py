"""Which processes make a local mesh, in the order in which they start. Pure: nothing is started here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.cli.process import ProcessSpec
from kvmesh.config import (
    DecodeSettings,
    GatewaySettings,
    KvTransferSettings,
    PrefillSettings,
    RouterSettings,
    ServiceSettings,
)

MODEL_LOAD_TIMEOUT_S = 180.0
ENGINE_HEALTH = "kvmesh.v1.Engine"
# Well below the 20 s after which a child is killed: what runs at Ctrl-C must get its terminal event before that.
DRAIN_TIMEOUT_S = 5
_SCHEMAS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "kvtransfer": KvTransferSettings,
}


@dataclass(frozen=True)
class MeshOptions:
    """What `kvmesh up` was told. Counts are processes; `threads` is per engine (0 = share the cores)."""

    model: str = "smollm2"
    runner: str = "torch"
    prefill: int = 1
    decode: int = 1
    unified: int = 0
    transports: str = "shm,tcp"
    gateway_port: int = 8080
    gateway_processes: int = 1
    """That share the gateway's ports."""
    http_port: int = -1
    """Of the OpenAI-compatible API; -1 = it is off, and the playground with it."""
    playground: bool = True
    router_port: int = 0
    routers: int = 1
    cache: bool = True  # exact and semantic
    embedder: str = "minilm"
    dtype: str = "bf16"
    threads: int = 0
    log_level: str = "info"
    otlp_endpoint: str = ""
    credentials_file: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    """Further settings: `decode.max_batch` -> value (passed to every process of that service)."""


@dataclass(frozen=True)
class MeshPlan:
    """Start order: each inner tuple starts together."""

    stages: tuple[tuple[ProcessSpec, ...], ...]
    gateway_address: str
    router_addresses: tuple[str, ...]
    http_address: str = ""
    """Of the HTTP API, "" where it is off."""
    playground: bool = False

    @property
    def router_address(self) -> str:
        """Of the first replica."""
        return self.router_addresses[0]

    @property
    def workers(self) -> set[str]:
        """Names under which the engines register with the router."""
        return {spec.name for spec in self.specs if spec.serving == ENGINE_HEALTH}

    @property
    def specs(self) -> tuple[ProcessSpec, ...]:
        return tuple(spec for stage in self.stages for spec in stage)


def unknown_setting(key: str) -> str:
    """What is wrong with `service.setting` as a name, "" when there is such a setting."""
    service, _, name = key.partition(".")
    schema = _SCHEMAS.get(service)
    if schema is None:
        return f"there is no service {service!r}; known: {', '.join(_SCHEMAS)}"
    if name.partition(".")[0].replace("-", "_") not in schema.model_fields:
        return f"{service} has no setting {name!r}; python -m services.{service} --help lists them"
    return ""


def _flag(name: str, value: object) -> str:
    """Settings of type bool are flags without a value: --name or --no-name."""
    switch = {"true": f"--{name}", "false": f"--no-{name}"}
    return switch.get(str(value).lower(), f"--{name}={value}")


def plan_mesh(
    options: MeshOptions,
    run_dir: Path,
    *,
    free_port: Callable[[], int],
    redis: tuple[str, ...] = (),
    redis_url: str = "",
) -> MeshPlan:
    """Build the plan. `redis` is the argv of an embedded Redis-compatible server, empty for none or an outside one.

    Ports of gateway, router, sidecars and of the playground's receiver of spans are fixed beforehand (`free_port` names
    one that nobody uses), because others hold their addresses and look for a successor there; engines bind a free port
    and tell the router.
    """
    addresses = [f"127.0.0.1:{options.router_port}"]
    addresses += [f"127.0.0.1:{free_port()}" for _ in range(1, options.routers)]
    routers = ",".join(addresses)
    gateway = f"127.0.0.1:{options.gateway_port}"

    http = f"127.0.0.1:{options.http_port}" if options.http_port >= 0 else ""
    playground = options.playground and bool(http)
    # Spans that somebody else collects are not the playground's to show.
    spans = f"127.0.0.1:{free_port()}" if playground and not options.otlp_endpoint else ""
    otlp_endpoint = options.otlp_endpoint or (f"http://{spans}" if spans else "")

    def flags(service: str, name: str, **values: object) -> tuple[str, ...]:
        given: dict[str, object] = {
            "instance": name,
            "ready_file": run_dir / f"{name}.ready",
            "metrics_listen": "127.0.0.1:0",
            "mesh_token_file": run_dir / "mesh.token",
            "log_level": options.log_level,
            "drain_timeout_s": DRAIN_TIMEOUT_S,
            **values,
        }
        if otlp_endpoint:
            # On one machine somebody looks at single requests.
            given |= {"otlp_endpoint": otlp_endpoint, "trace_sample_ratio": 1.0}
        for key, value in options.settings.items():
            scope, _, setting = key.partition(".")
            if scope == service:
                given[setting.replace("-", "_")] = value
        argv = [sys.executable, "-m", f"services.{service}"]
        argv += [_flag(key.replace("_", "-"), value) for key, value in given.items() if value not in ("", None)]
        return tuple(argv)

    def spec(service: str, name: str, serving: str, timeout: float = 60.0, **values: object) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            argv=flags(service, name, **values),
            ready_file=run_dir / f"{name}.ready",
            serving=serving,
            start_timeout_s=timeout,
        )

    first: list[ProcessSpec] = []
    if redis:
        first.append(ProcessSpec(name="redis", argv=redis, start_timeout_s=10.0, stop_timeout_s=5.0))
    first += [
        spec(
            "router",
            f"router-{index}" if index else "router",
            "kvmesh.v1.Router",
            listen=address,
            redis_url=redis_url,
            # The semantic cache needs no Redis: without this it would go on answering.
            cache="" if options.cache else "off",
            embedder=options.embedder if options.cache else "none",
        )
        for index, address in enumerate(addresses)
    ]
    sidecars: list[ProcessSpec] = []
    engines: list[ProcessSpec] = []
    roles = [("prefill", options.prefill), ("decode", options.decode), ("unified", options.unified)]
    for role, count in roles:
        for index in range(count):
            name = f"{role}-{index}"
            socket = run_dir / f"{name}.sock"
            # A sidecar is SERVING once its engine has registered, so it is waited for together with the engines.
            sidecars.append(
                spec(
                    "kvtransfer",
                    f"kvtransfer-{name}",
                    "",
                    listen=f"127.0.0.1:{free_port()}",
                    engine_socket=socket,
                    transports=options.transports,
                )
            )
            engines.append(
                spec(
                    "prefill" if role == "prefill" else "decode",
                    name,
                    ENGINE_HEALTH,
                    timeout=MODEL_LOAD_TIMEOUT_S,
                    role=role,
                    model=options.model,
                    runner=options.runner,
                    dtype=options.dtype,
                    threads=options.threads or "",
                    sidecar_socket=socket,
                    routers=routers,
                )
            )
    last = spec(
        "gateway",
        "gateway",
        "kvmesh.v1.Inference",
        listen=gateway,
        routers=routers,
        redis_url=redis_url,
        model="scripted" if options.runner == "scripted" else options.model,
        credentials_file=options.credentials_file,
        processes=options.gateway_processes if options.gateway_processes > 1 else "",
        http_listen=http,
        playground=str(playground).lower(),
        playground_spans=spans,
    )
    # A sidecar knows nobody but its engine, so it does not wait for a router. Who looks for these comes after them: who
    # is there first tries again, later and later.
    return MeshPlan(((*first, *sidecars), (*engines, last)), gateway, tuple(addresses), http, playground)
