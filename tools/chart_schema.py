"""Writes deploy/helm/kvmesh/values.schema.json; `--check` only compares. Every key of values.yaml is here and back."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from chart_pods import ENGINE, GATEWAY, MODEL, ONE_ENGINE, OPTIONAL, PLACING, ROUTER
from chart_shapes import (
    DEFINITIONS,
    FLAG,
    FREE,
    HOST,
    PATH,
    TEXT,
    Schema,
    integer,
    keyed,
    loose,
    many,
    number,
    positive,
    ref,
    secret,
    table,
    text,
    where,
    word,
)  # fmt: skip

FILE = Path(__file__).resolve().parents[1] / "deploy/helm/kvmesh/values.schema.json"

# Names of components, which engines must not have.
TAKEN = (
    "gateway", "gateway-headless", "router", "router-fleet", "redis", "kvtransfer", "mesh", "keys", "engine", "engines",
    "public", "ca", "dashboards", "rules", "test",
)  # fmt: skip

DOMAIN = "^" + HOST.removeprefix(r"(\*\.)?") + "$"

EVICTION = (
    "noeviction", "allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-lru", "volatile-lfu", "volatile-random",
    "volatile-ttl",
)  # fmt: skip
REDIS = table(
    {
        "bundled": table(
            {
                "enabled": FLAG,
                "image": ref("imageReference"),
                "pullPolicy": ref("pullPolicy"),
                "maxmemory": text(r"^[0-9]+([kKmMgG][bB]?)?$"),
                "config": TEXT,
                "maxmemoryPolicy": word("auto", *EVICTION),
                "auth": table({"enabled": FLAG, "passwordSecret": secret()}),
                "tls": table({"enabled": FLAG}),
                "persistence": table(
                    {
                        "enabled": word("auto", True, False),
                        "size": ref("quantity"),
                        "storageClassName": ref("optionalName"),
                        "appendfsync": word("always", "everysec", "no"),
                    }
                ),
                "resources": ref("resources"),
                **PLACING,
            },
            ("config", *PLACING),
        ),
        "external": table(
            {
                "url": text(r"^(rediss?://[^\s@]+)?$"),
                "cluster": FLAG,
                "passwordSecret": secret(),
                "caSecret": secret(),
            }
        ),
    }
)
TLS = table(
    {
        "enabled": FLAG,
        "mutual": FLAG,
        "serverName": ref("optionalHost"),
        "secretName": ref("optionalName"),
        "secretNames": loose(table({name: ref("optionalName") for name in ("gateway", "router", "engine", "redis")})),
        "certManager": table(
            {
                "enabled": FLAG,
                "issuerRef": ref("issuer"),
                "duration": ref("goDuration"),
                "renewBefore": ref("goDuration"),
            }
        ),
        "public": table(
            {
                "mode": word("mesh", "own", "off"),
                "secretName": ref("optionalName"),
                "certManager": table({"issuerRef": ref("issuer"), "dnsNames": many(ref("host"))}),
            }
        ),
        "clientCA": secret("secretName"),
    },
    ("secretNames",),
)
AUTH = table(
    {
        "keysSecret": secret(),
        "keysToml": TEXT,
        "keysInRedis": FLAG,
        "meshTokenSecret": secret(),
        "jwt": table(
            {
                "jwks": text(r"^(https://[^\s]+)?$", maxLength=2048),
                "jwksConfigMap": secret(),
                "issuer": text(maxLength=1024),
                "audience": text(maxLength=1024),
                "tenantClaim": text(minLength=1, maxLength=256),
            }
        ),
    }
)
LIMITS = table(
    {
        "ttftSeconds": positive(3600),
        "totalSeconds": positive(86_400),
        "replicas": integer(0, 10_000),
        "budgets": FLAG,
        "budgetAway": word("open", "closed"),
        "journal": table(
            {
                "type": word("none", "emptyDir", "pvc"),
                "size": ref("quantity"),
                "storageClassName": ref("optionalName"),
                "usageFile": FLAG,
            }
        ),
    }
)
POLICY_RULES = (
    "gatewayFrom", "dnsTo", "otlpTo", "redisTo", "jwksTo", "gatewayEgress", "engineEgress",
)  # fmt: skip
POLICY_SELECTORS = ("metricsNamespaceSelector", "metricsPodSelector")
MONITORING = table(
    {
        "serviceMonitor": table(
            {
                "enabled": FLAG,
                "interval": ref("prometheusDuration"),
                "scrapeTimeout": ref("prometheusDuration"),
                "labels": ref("labels"),
                "relabelings": ref("objects"),
                "metricRelabelings": ref("objects"),
            },
            ("labels", "relabelings", "metricRelabelings"),
        ),
        "prometheusRule": table(
            {
                "enabled": FLAG,
                "labels": ref("labels"),
                "alertLabels": ref("texts"),
                "disabled": many(text(r"^[A-Za-z][A-Za-z0-9_]*$")),
                "runbookBase": text(r"^(https?://[^\s]*)?$"),
            },
            ("labels", "alertLabels", "disabled", "runbookBase"),
        ),
        "dashboards": table(
            {"enabled": FLAG, "labels": ref("labels"), "annotations": ref("texts")}, ("labels", "annotations")
        ),
    }
)
AUTOSCALING = table(
    {
        "metricNames": table(
            {
                name: text(r"^[A-Za-z_:][A-Za-z0-9_:.-]*$", maxLength=253)
                for name in ("queueDelay", "kvUsage", "waitingTokens")
            }
        ),
        "prometheus": table(
            {
                "serverAddress": text(r"^https?://[^\s]+$"),
                "pollingIntervalSeconds": integer(1, 3600),
                "matchers": TEXT,
                "authenticationRef": loose(
                    table(
                        {
                            "name": ref("name"),
                            "kind": word("TriggerAuthentication", "ClusterTriggerAuthentication"),
                        }
                    )
                ),
            },
            ("matchers", "authenticationRef"),
        ),
    }
)
ROUTE = {
    "enabled": FLAG,
    "parentRefs": ref("parentRefs"),
    "hostnames": many(ref("host"), maxItems=16),
    "filters": ref("objects"),
    "annotations": ref("texts"),
}
HANGS_ON = {"allOf": [where("enabled", True, {"properties": {"parentRefs": {"minItems": 1}}})]}
FREE_ROUTE = ("hostnames", "filters", "annotations")
HOSTS = {"hosts": many(ref("host")), "tls": ref("objects"), "annotations": ref("texts")}
ROUTES = table(
    {
        "httpRoute": table(
            {**ROUTE, "pathPrefix": ref("urlPath"), "timeoutSeconds": integer(0, 99_999)}, FREE_ROUTE, HANGS_ON
        ),
        "grpcRoute": table(ROUTE, FREE_ROUTE, HANGS_ON),
        "ingress": table(
            {
                "enabled": FLAG,
                "className": ref("optionalName"),
                "controller": word("nginx", "none"),
                "path": ref("urlPath"),
                "timeoutSeconds": integer(0, 99_999),
                **HOSTS,
                "grpc": table({"enabled": FLAG, **HOSTS}, tuple(HOSTS)),
            },
            tuple(HOSTS),
        ),
    }
)

VALUES: dict[str, Schema] = {
    "nameOverride": text(r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?$", maxLength=63),
    "fullnameOverride": text(r"^([a-z]([a-z0-9-]*[a-z0-9])?)?$", maxLength=63),
    "commonLabels": ref("labels"),
    "commonAnnotations": ref("texts"),
    "clusterDomain": text(DOMAIN, maxLength=200),
    "ipv6": FLAG,
    "image": table(
        {
            "registry": text(r"^[A-Za-z0-9.:/\[\]_-]*$"),
            "repository": text(PATH),
            "tag": ref("tag"),
            "cudaSuffix": text(r"^[A-Za-z0-9._-]*$", maxLength=64),
            "pullPolicy": ref("pullPolicy"),
            "pullSecrets": many(ref("name")),
        },
        ("pullSecrets",),
    ),
    "model": MODEL,
    "gateway": GATEWAY,
    "router": ROUTER,
    "engineDefaults": table(ENGINE, (*OPTIONAL, "model", "runtimeClassName")),
    "engines": {**keyed({r"^[a-z]([a-z0-9-]{0,14}[a-z0-9])?$": ONE_ENGINE}), "properties": dict.fromkeys(TAKEN, False)},
    "kvtransfer": table(
        {
            "image": ref("image"),
            "native": word("auto", True, False),
            "socketSizeLimit": ref("quantity"),
            "resources": ref("resources"),
            "settings": ref("settings"),
            "extraEnv": ref("env"),
        },
        ("image", "settings", "extraEnv"),
    ),
    "redis": REDIS,
    "tls": TLS,
    "auth": AUTH,
    "cache": table(
        {"mode": word("off", "exact", "semantic"), "ttlSeconds": positive(31_536_000), "secret": secret()}
    ),
    "limits": LIMITS,
    "telemetry": table(
        {
            "otlpEndpoint": text(r"^(https?://[^\s@/]+(/[^\s]*)?)?$"),
            "sampleRatio": number(0, 1),
            "logs": table({"format": word("json", "text"), "level": word("debug", "info", "warning", "error")}),
        }
    ),
    "serviceAccount": table(
        {"create": FLAG, "name": ref("optionalName"), "annotations": ref("texts")}, ("annotations",)
    ),
    "networkPolicy": table(
        {
            "enabled": FLAG,
            **{name: ref("objects") for name in POLICY_RULES},
            **dict.fromkeys(POLICY_SELECTORS, FREE),
        },
        (*POLICY_RULES, *POLICY_SELECTORS),
    ),
    "topologySpread": table(
        {
            "enabled": FLAG,
            "zones": word("ScheduleAnyway", "DoNotSchedule", ""),
            "nodes": word("ScheduleAnyway", "DoNotSchedule", ""),
        }
    ),
    "monitoring": MONITORING,
    "autoscaling": AUTOSCALING,
    "routes": ROUTES,
    "helmTest": table(
        {
            "enabled": FLAG,
            "question": text(minLength=1, maxLength=4096),
            "timeoutSeconds": integer(1, 3600),
            "apiKeySecret": secret(),
        }
    ),
}  # fmt: skip
SCHEMA: Schema = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Values of the kvmesh chart",
    "description": "Made by tools/chart_schema.py.",
    "type": "object",
    "additionalProperties": False,
    "required": list(VALUES),
    "properties": {"global": FREE, **VALUES},
    "$defs": DEFINITIONS,
}


def written(item: Any, indent: int = 0) -> str:
    """JSON, in lines of at most 120 characters where that is possible."""
    flat = json.dumps(item)
    if indent + len(flat) <= 110 or not isinstance(item, dict | list):
        return flat
    pad = " " * (indent + 2)
    if isinstance(item, dict):
        lines = [f"{pad}{json.dumps(key)}: {written(value, indent + 2)}" for key, value in item.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(pad + written(value, indent + 2) for value in item) + "\n" + " " * indent + "]"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    content = written(SCHEMA) + "\n"
    if parser.parse_args().check:
        current = FILE.read_text() == content
        if not current:
            print(f"{FILE.name} is not what tools/chart_schema.py makes: run it", file=sys.stderr)
        return int(not current)
    FILE.write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
