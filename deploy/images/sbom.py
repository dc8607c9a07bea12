#!/usr/bin/env python3
"""Prints what is installed where it runs, as a CycloneDX 1.6 document: Python's distributions and Debian's packages.

Runs inside an image, which needs nothing for it: `docker run --rm -i --entrypoint python3 IMAGE - NAME <sbom.py`
(`make sbom` does that for every image).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import urllib.parse
from pathlib import Path
from typing import Any

DPKG = Path("/var/lib/dpkg/status")
APP = Path("/opt/kvmesh")


def _licenses(metadata: Any) -> list[dict[str, Any]]:
    expression = metadata.get("License-Expression")
    if expression:
        return [{"expression": expression}]
    trove = [
        line.rsplit(" :: ", 1)[-1] for line in metadata.get_all("Classifier") or [] if line.startswith("License ::")
    ]
    names = trove or [line for line in (metadata.get("License") or "").splitlines()[:1] if line.strip()]
    return [{"license": {"name": name}} for name in names]


def distributions() -> list[dict[str, Any]]:
    """Of the environment, of the folder of models and of rdma-core."""
    found = {}
    # `-` as the script puts the working folder on the path: nothing of it is meant.
    for distribution in importlib.metadata.distributions(path=[path for path in sys.path if path]):
        name, version = distribution.metadata["Name"], distribution.version
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{urllib.parse.quote(version)}"
        entry: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}
        if licenses := _licenses(distribution.metadata):
            entry["licenses"] = licenses
        found[purl] = entry
    return [found[purl] for purl in sorted(found)]


def debian() -> list[dict[str, Any]]:
    """The packages of the base image that are installed."""
    if not DPKG.exists():
        return []
    found = []
    for block in DPKG.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines() if line and line[0] != " "]
        field = {key: value for key, _, value in lines}
        if field.get("Status", "").endswith(" installed"):
            version = urllib.parse.quote(field["Version"], safe="")
            purl = f"pkg:deb/debian/{field['Package']}@{version}?arch={field['Architecture']}"
            entry = {"type": "library", "name": field["Package"], "version": field["Version"], "purl": purl}
            found.append({**entry, "bom-ref": purl})
    return found


def rdma() -> list[dict[str, Any]]:
    """rdma-core and pyverbs, which are built from the sdist and leave no metadata but this file."""
    version = Path("/opt/rdma/VERSION")
    if not version.exists():
        return []
    purl = f"pkg:pypi/pyverbs@{version.read_text().strip()}"
    entry = {"type": "library", "name": "pyverbs", "version": version.read_text().strip(), "purl": purl}
    return [{**entry, "bom-ref": purl, "licenses": [{"license": {"name": "GPL-2.0 OR Linux-OpenIB"}}]}]


def main() -> int:
    image, _, tag = (sys.argv[1] if len(sys.argv) > 1 else os.uname().nodename).rpartition(":")
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "name": image,
                "version": tag,
                "licenses": [{"expression": "Apache-2.0"}],
            }
        },
        "components": [*distributions(), *rdma(), *debian()],
    }
    json.dump(document, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
