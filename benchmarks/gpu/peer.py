"""Starts `vllm_side.py` and reads its lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_vllm(job: dict[str, Any], timeout_s: float, log: Callable[[str], None]) -> dict[str, Any]:
    """{"version", "load_s", "rows"}, or {"failed": why} with the rows it got to."""
    told: dict[str, Any] = {"rows": []}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        environment = dict(os.environ)
        if job.get("path"):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [job["path"], environment.get("PYTHONPATH", "")]))
        process = subprocess.Popen(
            ["timeout", "-k", "10", str(int(timeout_s)), sys.executable, str(Path(__file__).with_name("vllm_side.py")),
             file.name],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment,
        )  # fmt: skip
        assert process.stdout is not None
        last: list[str] = []
        for line in process.stdout:
            if not line.startswith("PEER "):
                last = [*last[-40:], line.rstrip()]
                continue
            said = json.loads(line[5:])
            if "ready" in said:
                told |= {"version": said["ready"], "load_s": said["load_s"]}
                log(f"vLLM {said['ready']}: ready after {said['load_s']} s")
            else:
                told["rows"].append(said["row"])
                log(f"vLLM: {said['row']}")
        code = process.wait()
    if code:
        told["failed"] = f"exit status {code}"
        log("\n".join([f"vLLM ended with {code}; its last lines:", *last]))
    return told
