"""Pieces of the chart's schema: values of engines, gateways and routers, and where models come from."""

from __future__ import annotations

from chart_shapes import (
    FLAG,
    FREE,
    LABEL,
    TEXT,
    Schema,
    integer,
    loose,
    many,
    number,
    ref,
    table,
    text,
    up_to,
    where,
    word,
)  # fmt: skip

PLACING = {
    "nodeSelector": ref("texts"),
    "tolerations": ref("objects"),
    "affinity": FREE,
    "podAnnotations": ref("podAnnotations"),
    "podLabels": ref("labels"),
    "priorityClassName": ref("optionalName"),
}
EXTRA = {
    "settings": ref("settings"),
    "extraEnv": ref("env"),
    "extraVolumes": ref("volumes"),
    "extraVolumeMounts": ref("mounts"),
}
OPTIONAL = ("image", "strategy", *EXTRA, *PLACING)
BUDGET = table({"enabled": FLAG, "maxUnavailable": ref("countOrPercent")})
# A budget of none would block every drain of a node. Of strategies there is RollingUpdate alone.
STRATEGY = table(
    {
        "rollingUpdate": table(
            {"maxSurge": ref("surge"), "maxUnavailable": ref("surge")}, ("maxSurge", "maxUnavailable")
        )
    },
    ("rollingUpdate",),
)
POD = {"resources": ref("resources"), **EXTRA, **PLACING, "strategy": STRATEGY, "podDisruptionBudget": BUDGET}

SOURCE_TYPES = {"pvc": "claimName", "hostPath": "path", "oci": "reference", "init": "image"}
SOURCE = table(
    {
        "type": word("packaged", *SOURCE_TYPES),
        "path": ref("relativePath"),
        "pvc": table({"claimName": ref("optionalName"), "subPath": ref("relativePath")}),
        "hostPath": table({"path": ref("hostFolder")}),
        "oci": table({"reference": ref("optionalImage"), "pullPolicy": ref("pullPolicy")}),
        "init": table(
            {
                "image": ref("optionalImage"),
                "pullPolicy": ref("pullPolicy"),
                "command": many(TEXT),
                "args": many(TEXT),
                "env": ref("env"),
                "envFrom": ref("objects"),
                "sizeLimit": ref("optionalQuantity"),
                "resources": ref("resources"),
            },
            ("command", "args", "env", "envFrom", "resources"),
        ),
    }
)
# What a type of source cannot do without.
NEEDS = {
    "allOf": [
        where(
            "type", kind, {"properties": {kind: {"required": [key], "properties": {key: {"minLength": 1}}}}}
        )
        for kind, key in SOURCE_TYPES.items()
    ]
}  # fmt: skip
MODEL = table(
    {
        "name": text(r"^[^\x00-\x1f]*$", minLength=1, maxLength=512),
        "servedName": text(r"^[^\x00-\x1f]*$", maxLength=256),
        "source": {**SOURCE, **NEEDS},
    }
)

SCALING = table(
    {
        "enabled": FLAG,
        "kind": word("hpa", "keda"),
        "minReplicas": integer(1, 10_000),
        "maxReplicas": integer(1, 10_000),
        "queueDelaySeconds": number(0, 3600),
        "kvUsage": number(0, 1),
        "waitingTokens": integer(0),
        "scaleUp": up_to("up"),
        "scaleDown": up_to("down"),
        "metrics": ref("objects"),
        "triggers": ref("objects"),
    },
    ("metrics", "triggers"),
)
ENGINE: dict[str, Schema] = {
    "enabled": FLAG,
    "replicas": integer(0, 10_000),
    "image": ref("image"),
    "device": word("cpu", "cuda"),
    "gpus": integer(0, 64),
    "gpuResource": ref("resourceName"),
    "tp": integer(1, 64),
    "dtype": word("bf16", "fp32", "fp16"),
    "revision": text(f"^({LABEL})?$"),
    "model": loose(MODEL),
    "kvtransfer": table({"enabled": FLAG, "transports": ref("transports")}),
    "rdma": table(
        {
            "enabled": FLAG,
            "resource": ref("resourceName"),
            "count": integer(1, 64),
            "transports": ref("transports"),
            "runAsUser": integer(0, 4_294_967_294),
        }
    ),
    "multiNode": table(
        {
            "enabled": FLAG,
            "hosts": integer(2, 64),
            "exclusiveTopology": text(r"^([A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?)?$", maxLength=317),
        },
        ("exclusiveTopology",),
    ),
    "startupSeconds": integer(10, 86_400),
    "preStopSeconds": integer(0, 600),
    "runtimeClassName": ref("optionalName"),
    **POD,
    "autoscaling": SCALING,
}
ONE_ENGINE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["role"],
    "properties": {"role": word("prefill", "decode", "unified"), **loose(ENGINE)},
}

GATEWAY = table(
    {
        "enabled": FLAG,
        "replicas": integer(0, 10_000),
        "processes": integer(1, 256),
        "image": ref("image"),
        "http": table(
            {"enabled": FLAG, "corsOrigins": many(text(r"^(\*|https?://[^\s,]+)$")), "playground": FLAG},
            ("corsOrigins",),
        ),
        "model": table({"source": {**loose(SOURCE), **NEEDS}}),
        "service": table(
            {
                "type": word("ClusterIP", "NodePort", "LoadBalancer"),
                "annotations": ref("texts"),
                "grpcPort": ref("port"),
                "httpPort": ref("port"),
                "loadBalancerClass": text(r"^[A-Za-z0-9./_-]*$"),
                "loadBalancerSourceRanges": many(text(r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")),
                "externalTrafficPolicy": word("", "Cluster", "Local"),
            },
            ("annotations", "loadBalancerClass", "loadBalancerSourceRanges", "externalTrafficPolicy"),
        ),
        "preStopSeconds": integer(0, 600),
        **POD,
        "autoscaling": table(
            {
                "enabled": FLAG,
                "minReplicas": integer(1, 10_000),
                "maxReplicas": integer(1, 10_000),
                "cpuPercent": integer(1, 1000),
                "scaleUp": up_to("up"),
                "scaleDown": up_to("down"),
            }
        ),
    },
    OPTIONAL,
)
ROUTER = table(
    {"enabled": FLAG, "replicas": integer(0, 10_000), "image": ref("image"), "preStopSeconds": integer(0, 600), **POD},
    OPTIONAL,
)
