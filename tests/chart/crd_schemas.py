"""Closed schemas of the custom resources that the chart writes: what it may say, and in which form.

They are not the operators' own schemas (megabytes, most of it for fields that a chart does not set) but what those say
of the fields that are used here; one that is not listed is taken for a slip of the pen. Versions: Gateway API v1,
prometheus-operator monitoring/v1, KEDA v1alpha1, LeaderWorkerSet v1, cert-manager v1.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
ANY_TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
HOST: Schema = {
    "type": "string",
    "pattern": r"^(\*\.)?[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$",
}
# GEP-2257: up to four parts.
GATEWAY_DURATION: Schema = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
PROMETHEUS_DURATION: Schema = {
    "type": "string",
    "pattern": "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
    "minLength": 1,
}
# cert-manager takes what Go's time.ParseDuration does.
GO_DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(h|m|s|ms))+$"}
QUANTITY: Schema = {
    "type": ["string", "integer"],
    "pattern": r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?[0-9]+))?$",
}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
POD_TEMPLATE: Schema = {
    "type": "object",
    "required": ["metadata", "spec"],
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object", "required": ["containers"]}},
    "additionalProperties": False,
}


def closed(required: list[str], **properties: Schema) -> Schema:
    """A map of these keys and no others."""
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def many(item: Schema, least: int = 0, most: int = 1000) -> Schema:
    """A list."""
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def one_of(*values: str) -> Schema:
    """One of some words."""
    return {"enum": list(values)}


SELECTOR = closed(
    [],
    matchLabels=TEXTS,
    matchExpressions=many(
        closed(
            ["key", "operator"],
            key=TEXT,
            operator=one_of("In", "NotIn", "Exists", "DoesNotExist"),
            values=many(ANY_TEXT),
        )
    ),
)

# --- autoscaling behaviour, the same in an HPA and in a ScaledObject -------------------------------------------------
RULES = closed(
    [],
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy=one_of("Max", "Min", "Disabled"),
    tolerance=QUANTITY,
    policies=many(
        closed(
            ["type", "value", "periodSeconds"],
            type=one_of("Pods", "Percent"),
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        ),
        least=1,
    ),
)
BEHAVIOR = closed([], scaleUp=RULES, scaleDown=RULES)

# --- Gateway API -----------------------------------------------------------------------------------------------------
PARENT = closed(["name"], group=ANY_TEXT, kind=TEXT, namespace=NAME, name=NAME, sectionName=TEXT, port=PORT)
BACKEND = closed(["name", "port"], group=ANY_TEXT, kind=TEXT, name=NAME, namespace=NAME, port=PORT, weight=COUNT)
HTTP_FILTER = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": one_of(
            "RequestHeaderModifier", "ResponseHeaderModifier", "RequestMirror", "RequestRedirect", "URLRewrite",
            "ExtensionRef", "CORS",
        )
    },
}  # fmt: skip
GRPC_FILTER = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": one_of("RequestHeaderModifier", "ResponseHeaderModifier", "RequestMirror", "ExtensionRef")},
}
HTTP_ROUTE = closed(
    ["parentRefs", "rules"],
    parentRefs=many(PARENT, 1, 32),
    hostnames=many(HOST, 0, 16),
    rules=many(
        closed(
            ["backendRefs"],
            name=TEXT,
            matches=many(
                closed(
                    [],
                    path=closed(
                        ["type", "value"],
                        type=one_of("Exact", "PathPrefix", "RegularExpression"),
                        value={"type": "string", "pattern": "^/", "maxLength": 1024},
                    ),
                    headers=many(
                        closed(["name", "value"], name=TEXT, value=TEXT, type=one_of("Exact", "RegularExpression"))
                    ),
                    method=TEXT,
                ),
                0,
                64,
            ),
            filters=many(HTTP_FILTER, 0, 16),
            backendRefs=many(BACKEND, 1, 16),
            timeouts=closed([], request=GATEWAY_DURATION, backendRequest=GATEWAY_DURATION),
        ),
        1,
        16,
    ),
)
GRPC_ROUTE = closed(
    ["parentRefs", "rules"],
    parentRefs=many(PARENT, 1, 32),
    hostnames=many(HOST, 0, 16),
    rules=many(
        closed(
            ["backendRefs"],
            name=TEXT,
            matches=many(
                closed(
                    [],
                    method=closed([], type=one_of("Exact", "RegularExpression"), service=TEXT, method=TEXT),
                    headers=many(
                        closed(["name", "value"], name=TEXT, value=TEXT, type=one_of("Exact", "RegularExpression"))
                    ),
                ),
                0,
                64,
            ),
            filters=many(GRPC_FILTER, 0, 16),
            backendRefs=many(BACKEND, 1, 16),
        ),
        1,
        16,
    ),
)

# --- prometheus-operator ---------------------------------------------------------------------------------------------
RELABEL = closed(
    [],
    sourceLabels=many(TEXT),
    separator=ANY_TEXT,
    targetLabel=TEXT,
    regex=ANY_TEXT,
    modulus=COUNT,
    replacement=ANY_TEXT,
    action=one_of(
        "replace", "Replace", "keep", "Keep", "drop", "Drop", "hashmod", "HashMod", "labelmap", "LabelMap",
        "labeldrop", "LabelDrop", "labelkeep", "LabelKeep", "lowercase", "Lowercase", "uppercase", "Uppercase",
        "keepequal", "KeepEqual", "dropequal", "DropEqual",
    ),
)  # fmt: skip
SERVICE_MONITOR = closed(
    ["selector", "endpoints"],
    jobLabel=TEXT,
    targetLabels=many(TEXT),
    podTargetLabels=many(TEXT),
    selector=SELECTOR,
    namespaceSelector=closed([], any=FLAG, matchNames=many(NAME)),
    sampleLimit=COUNT,
    endpoints=many(
        closed(
            ["port"],
            port=TEXT,
            path={"type": "string", "pattern": "^/"},
            scheme=one_of("http", "https", "HTTP", "HTTPS"),
            interval=PROMETHEUS_DURATION,
            scrapeTimeout=PROMETHEUS_DURATION,
            honorLabels=FLAG,
            relabelings=many(RELABEL),
            metricRelabelings=many(RELABEL),
        ),
        least=1,
    ),
)
RULE = {
    "type": "object",
    "required": ["expr"],
    "properties": {
        "record": {"type": "string", "pattern": "^[a-zA-Z_:][a-zA-Z0-9_:]*$"},
        "alert": TEXT,
        "expr": {"type": ["string", "integer"], "minLength": 1},
        "for": PROMETHEUS_DURATION,
        "keep_firing_for": PROMETHEUS_DURATION,
        "labels": TEXTS,
        "annotations": TEXTS,
    },
    "oneOf": [{"required": ["record"]}, {"required": ["alert"]}],
    "additionalProperties": False,
}
PROMETHEUS_RULE = closed(
    ["groups"],
    groups=many(
        closed(
            ["name", "rules"],
            name=TEXT,
            interval=PROMETHEUS_DURATION,
            limit=COUNT,
            labels=TEXTS,
            rules=many(RULE, 1),
        ),
        1,
    ),
)

# --- KEDA ------------------------------------------------------------------------------------------------------------
SCALED_OBJECT = closed(
    ["scaleTargetRef", "triggers"],
    scaleTargetRef=closed(["name"], apiVersion=TEXT, kind=TEXT, name=NAME, envSourceContainerName=TEXT),
    pollingInterval={"type": "integer", "minimum": 1},
    cooldownPeriod=COUNT,
    initialCooldownPeriod=COUNT,
    idleReplicaCount=COUNT,
    minReplicaCount=COUNT,
    maxReplicaCount={"type": "integer", "minimum": 1},
    fallback=closed(
        ["failureThreshold", "replicas"],
        failureThreshold=COUNT,
        replicas=COUNT,
        behavior=one_of("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"),
    ),
    advanced=closed(
        [], restoreToOriginalReplicaCount=FLAG, horizontalPodAutoscalerConfig=closed([], name=NAME, behavior=BEHAVIOR)
    ),
    triggers=many(
        closed(
            ["type", "metadata"],
            type=TEXT,
            name=TEXT,
            metadata=TEXTS,
            metricType=one_of("AverageValue", "Value", "Utilization"),
            useCachedMetrics=FLAG,
            authenticationRef=closed(
                ["name"], name=NAME, kind=one_of("TriggerAuthentication", "ClusterTriggerAuthentication")
            ),
        ),
        least=1,
    ),
)

# --- LeaderWorkerSet -------------------------------------------------------------------------------------------------
LEADER_WORKER_SET = closed(
    ["leaderWorkerTemplate"],
    replicas=COUNT,
    startupPolicy=one_of("LeaderCreated", "LeaderReady"),
    networkConfig=closed([], subdomainPolicy=one_of("Shared", "UniquePerReplica")),
    rolloutStrategy=closed(
        ["type"],
        type=one_of("RollingUpdate"),
        rollingUpdateConfiguration=closed(
            [],
            partition=COUNT,
            maxUnavailable={"type": ["integer", "string"]},
            maxSurge={"type": ["integer", "string"]},
        ),
    ),
    leaderWorkerTemplate=closed(
        ["workerTemplate"],
        size={"type": "integer", "minimum": 1},
        restartPolicy=one_of("RecreateGroupOnPodRestart", "None", "RecreateGroupAfterStart"),
        leaderTemplate=POD_TEMPLATE,
        workerTemplate=POD_TEMPLATE,
    ),
)

# --- cert-manager ----------------------------------------------------------------------------------------------------
CERTIFICATE = closed(
    ["secretName", "issuerRef"],
    secretName=NAME,
    secretTemplate=closed([], labels=TEXTS, annotations=TEXTS),
    commonName={"type": "string", "maxLength": 64},
    dnsNames=many(HOST, 1),
    ipAddresses=many(TEXT),
    uris=many(TEXT),
    isCA=FLAG,
    duration=GO_DURATION,
    renewBefore=GO_DURATION,
    revisionHistoryLimit={"type": "integer", "minimum": 1},
    usages=many(
        one_of(
            "signing", "digital signature", "key encipherment", "server auth", "client auth", "cert sign", "crl sign"
        )
    ),
    issuerRef=closed(["name"], name=TEXT, kind=TEXT, group=TEXT),
    privateKey=closed(
        [],
        algorithm=one_of("RSA", "ECDSA", "Ed25519"),
        size=COUNT,
        encoding=one_of("PKCS1", "PKCS8"),
        rotationPolicy=one_of("Never", "Always"),
    ),
    subject={"type": "object"},
)
ISSUER: Schema = {
    "oneOf": [
        closed(["selfSigned"], selfSigned={"type": "object"}),
        closed(["ca"], ca=closed(["secretName"], secretName=NAME)),
    ]
}


def resource(api: str, kind: str, spec: Schema) -> Schema:
    """A whole object: nothing beside its head and its spec."""
    return closed(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api},
        kind={"const": kind},
        metadata=closed(["name", "labels"], name=NAME, namespace=NAME, labels=TEXTS, annotations=TEXTS),
        spec=spec,
    )


BY_KIND: dict[str, Schema] = {
    kind: resource(api, kind, spec)
    for api, kind, spec in (
        ("gateway.networking.k8s.io/v1", "HTTPRoute", HTTP_ROUTE),
        ("gateway.networking.k8s.io/v1", "GRPCRoute", GRPC_ROUTE),
        ("monitoring.coreos.com/v1", "ServiceMonitor", SERVICE_MONITOR),
        ("monitoring.coreos.com/v1", "PrometheusRule", PROMETHEUS_RULE),
        ("keda.sh/v1alpha1", "ScaledObject", SCALED_OBJECT),
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", LEADER_WORKER_SET),
        ("cert-manager.io/v1", "Certificate", CERTIFICATE),
        ("cert-manager.io/v1", "Issuer", ISSUER),
    )
}
