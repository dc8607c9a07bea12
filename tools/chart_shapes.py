"""Pieces of the chart's schema (JSON Schema draft-07): small functions for shapes, and those that have a name.

Templates write names, images and the like as they are. So what a pattern lets through must be harmless in YAML; free
text is quoted where it is used. Patterns are of the kind that Go knows (no look-ahead).
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
FREE: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    """One of `DEFINITIONS`."""
    return {"$ref": f"#/$defs/{name}"}


def text(pattern: str | None = None, **more: Any) -> Schema:
    """A string."""
    return {"type": "string", **({"pattern": pattern} if pattern else {}), **more}


def integer(least: int | None = None, most: int | None = None) -> Schema:
    """A whole number within bounds."""
    bounds = {"minimum": least, "maximum": most}
    return {"type": "integer", **{name: value for name, value in bounds.items() if value is not None}}


def number(least: float, most: float) -> Schema:
    """A number within bounds, both included."""
    return {"type": "number", "minimum": least, "maximum": most}


def positive(most: float) -> Schema:
    """A number above 0."""
    return {"type": "number", "exclusiveMinimum": 0, "maximum": most}


def word(*values: Any) -> Schema:
    """One of some values."""
    return {"enum": list(values)}


def many(item: Schema, **more: Any) -> Schema:
    """A list."""
    return {"type": "array", "items": item, **more}


def table(properties: dict[str, Schema], optional: tuple[str, ...] = (), more: Schema | None = None) -> Schema:
    """A map of these keys and no others. One that is not optional cannot be taken away (by null): templates need it."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "additionalProperties": False,
        **({"required": required} if required else {}),
        "properties": properties,
        **(more or {}),
    }


def loose(schema: Any) -> Any:
    """The same with nothing required: for what is laid over defaults."""
    if isinstance(schema, dict):
        return {
            key: loose(value) for key, value in schema.items() if not (key == "required" and isinstance(value, list))
        }
    return [loose(item) for item in schema] if isinstance(schema, list) else schema


def where(key: str, value: Any, then: Schema) -> Schema:
    """If `key` has this value, `then`."""
    return {"if": {"properties": {key: {"const": value}}, "required": [key]}, "then": then}


def keyed(patterns: dict[str, Any]) -> Schema:
    """A map whose keys have a form; messages then say where a wrong one is, which `propertyNames` does not."""
    return {"type": "object", "additionalProperties": False, "patternProperties": patterns}


def secret(key: str = "name") -> Schema:
    """A secret and a key in it."""
    return table({key: ref("optionalName"), "key": ref("dataKey")})


def up_to(word_: str) -> Schema:
    """How fast replicas come (`up`) or go (`down`)."""
    return table(
        {
            "stabilizationWindowSeconds": integer(0, 3600),
            "pods": integer(1, 1000),
            "periodSeconds": integer(1 if word_ == "up" else 0, 1800),
        }
    )


LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
HOST = r"(\*\.)?[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
NAME = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
IMAGE = r"^[a-zA-Z0-9][a-zA-Z0-9._:/-]*(@sha256:[0-9a-f]{64})?$"
PATH = r"^[a-z0-9]+([._/-]+[a-z0-9]+)*$"
QUANTITY = r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPEm]|[eE][0-9]{1,2})?"
NO_WAY_UP = {"pattern": r"(^|/)\.\.(/|$)"}

DEFINITIONS: dict[str, Schema] = {
    "name": text(f"^{NAME}$", maxLength=253),
    "optionalName": text(f"^({NAME})?$", maxLength=253),
    "dataKey": text(r"^[A-Za-z0-9._-]+$", maxLength=253),
    "resourceName": text(r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"),
    "relativePath": text(r"^([^/\x00-\x1f][^\x00-\x1f]*)?$", maxLength=1024, **{"not": NO_WAY_UP}),
    "hostFolder": text(r"^(/[^\x00-\x1f]*)?$", maxLength=1024, **{"not": NO_WAY_UP}),
    "urlPath": text(r"^/[^\s]*$", maxLength=1024),
    "host": text(f"^{HOST}$", maxLength=253),
    "optionalHost": text(f"^({HOST})?$", maxLength=253),
    "port": integer(1, 65535),
    "pullPolicy": word("Always", "IfNotPresent", "Never"),
    "tag": text(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"),
    "imageReference": text(IMAGE, maxLength=512),
    "optionalImage": {"anyOf": [{"const": ""}, ref("imageReference")]},
    "image": loose(
        table(
            {
                "registry": text(r"^[A-Za-z0-9.:/\[\]_-]*$"),
                "repository": text(PATH),
                "name": text(PATH),
                "tag": ref("tag"),
                "digest": text(r"^(sha256:[0-9a-f]{64})?$"),
                "pullPolicy": ref("pullPolicy"),
            }
        )
    ),
    "texts": {"type": "object", "additionalProperties": TEXT},
    "podAnnotations": keyed({"": TEXT, r"^(kubectl\.kubernetes\.io/default-container$|checksum/)": False}),
    # Labels and annotations that the chart gives itself are not for others.
    "labels": keyed(
        {f"^({NAME}/)?{LABEL}$": text(f"^({LABEL})?$"), r"^(app\.kubernetes\.io|helm\.sh|kvmesh\.io)/": False}
    ),
    "objects": many(FREE),
    "setting": {"type": ["string", "number", "boolean", "null"]},
    "settings": keyed(
        {r"^[a-z][a-z0-9_]*$": {"anyOf": [ref("setting"), many(ref("setting")), ref("settings")]}}
    ),
    "env": many(
        table({"name": text(r"^[A-Za-z_][A-Za-z0-9_.-]*$"), "value": TEXT, "valueFrom": FREE}, ("value", "valueFrom"))
    ),
    "volumes": many({"type": "object", "required": ["name"], "properties": {"name": ref("name")}}),
    "mounts": many(
        {
            "type": "object",
            "required": ["name", "mountPath"],
            "properties": {"name": ref("name"), "mountPath": text("^/")},
        }
    ),
    "quantity": text(f"^{QUANTITY}$"),
    "optionalQuantity": text(f"^({QUANTITY})?$"),
    "quantities": {
        "type": "object",
        "additionalProperties": {"anyOf": [ref("quantity"), {"type": "number", "minimum": 0}]},
    },
    "resources": loose(
        table({"requests": ref("quantities"), "limits": ref("quantities"), "claims": ref("objects")})
    ),
    "surge": {"anyOf": [integer(0), text(r"^([0-9]{1,2}|100)%$")]},
    "countOrPercent": {"anyOf": [integer(1), text(r"^([1-9][0-9]?|100)%$")]},
    "transports": many(word("tcp", "verbs", "efa", "shm", "nvlink"), minItems=1, uniqueItems=True),
    "goDuration": text(r"^([0-9]+(\.[0-9]+)?(h|m|s))+$"),
    "prometheusDuration": text(r"^([0-9]+(ms|s|m|h|d))+$"),
    "issuer": table({"name": ref("optionalName"), "kind": text(r"^[A-Z][A-Za-z]*$"), "group": ref("name")}),
    "parentRefs": many(
        table(
            {
                "group": TEXT,
                "kind": TEXT,
                "namespace": ref("name"),
                "name": ref("name"),
                "sectionName": ref("name"),
                "port": ref("port"),
            },
            ("group", "kind", "namespace", "sectionName", "port"),
        )
    ),
}  # fmt: skip
