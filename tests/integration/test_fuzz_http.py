"""schemathesis against the HTTP surface of a whole mesh, by its own OpenAPI document.

No request makes a fault of the service or hangs, every answer is as documented, and afterwards all is well.
60 s in CI with the same inputs in every run; 600 s with new ones with KVMESH_SOAK=1.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mesh_kit import Mesh, answer, mesh_up, settled

SOAK = bool(os.environ.get("KVMESH_SOAK"))
SECONDS = 600 if SOAK else 60
SEED = int(os.environ.get("KVMESH_FUZZ_SEED", "0")) or (random.SystemRandom().randrange(1, 1 << 31) if SOAK else 1)
# A call that takes longer than this counts as hanging.
CALL_S = 30
# What the run may take beyond its time: to start, and for what is under way when its time is over.
GRACE_S = 120
CHECKS = (
    "no_fault,streams_are_whole,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "response_headers_conformance,unsupported_method"
)
HOOKS = "fuzz_http_hooks.py"
BODIES = ("Chat", "Completion", "Embeddings", "Tokenize")
GENERATIONS = ["/v1/chat/completions", "/v1/completions"]
# First every bound of every field, then whatever comes to mind, then what should be answered: options, and the part of
# the time.
PHASES: dict[str, tuple[list[str], float]] = {
    "coverage": (["--phases=coverage", "--mode=all"], 0.15 if SOAK else 0.4),
    "fuzzing": (["--phases=fuzzing", "--mode=all", "--max-examples=100"], 0.65 if SOAK else 0.4),
    "plain": (
        [
            "--phases=fuzzing",
            "--mode=positive",
            "--max-examples=15",
            *(f"--include-path={path}" for path in GENERATIONS),
        ],
        0.2,
    ),
}
# Of what is asked plainly.
PLAIN = {
    *("model", "messages", "prompt", "stream", "temperature", "top_p", "seed", "max_tokens", "ignore_eos", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "user", "cache", "session_id", "logprobs"),
}


@asynccontextmanager
async def small_mesh(folder: Path) -> AsyncIterator[Mesh]:
    """One on which whatever is asked ends soon: few tokens, few choices."""
    program = folder / "program.json"
    program.write_text('{"eos_after": 8, "max_model_len": 256}')
    settings = {
        "decode.scripted_faults": str(program),
        "prefill.scripted_faults": str(program),
        "decode.prefix_cache": "false",
        "decode.scripted_step_ms": "1",
        "prefill.scripted_step_ms": "1",
        "gateway.max_choices": "2",
    }
    async with mesh_up(cache=False, http_port=0, settings=settings) as mesh:
        yield mesh


def known(document: dict[str, Any], models: list[str]) -> dict[str, Any]:
    """The document with the models that there are, so that not every request ends at an unknown name."""
    for name in BODIES:
        document["components"]["schemas"][name]["properties"]["model"]["enum"] = models
    return document


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """The document without what goes only with something else: nearly all that it allows is answered."""
    schemas = document["components"]["schemas"]
    for name in ("Chat", "Completion"):
        fields = {field: value for field, value in schemas[name]["properties"].items() if field in PLAIN}
        schemas[name]["properties"] = fields | {
            "n": {"type": "integer", "minimum": 1, "maximum": 2},
            "stream": {"type": "boolean"},
        }
        schemas[name]["required"].append("stream")
    text = {"type": "string", "maxLength": 40}
    schemas["Completion"]["properties"]["prompt"] = text | {"minLength": 1}
    schemas["Completion"]["properties"]["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 2**32 - 1}
    schemas["Message"]["properties"] = {"role": {"enum": ["system", "user", "assistant"]}, "content": text}
    schemas["Message"]["required"] = ["role", "content"]
    schemas["Chat"]["properties"]["messages"]["maxItems"] = 4
    return document


async def documents(mesh: Mesh, folder: Path) -> None:
    """The mesh's document in files, one for each phase, and the checks beside them."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        text = (await client.get(f"{mesh.state.http}/openapi.json")).text
    for phase in PHASES:
        models = ["scripted"] if phase == "plain" else ["scripted", "auto", "no-such-model"]
        document = known(json.loads(text), models)
        (folder / f"{phase}.json").write_text(json.dumps(plain(document) if phase == "plain" else document))
    # Streams are read to their end, or up to the limit of time, which then counts as hanging.
    (folder / "schemathesis.toml").write_text("max-stream-events = 1000000\n")
    shutil.copyfile(Path(__file__).with_name(HOOKS), folder / HOOKS)


async def run(mesh: Mesh, folder: Path, phase: str) -> None:
    """The fuzzer as a process of its own. Fails with its output where anything was found."""
    options, part = PHASES[phase]
    seconds = round(part * SECONDS)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{phase}.json", f"--url={mesh.state.http}"),
        *(f"--checks={CHECKS}", f"--seed={SEED}", f"--request-timeout={CALL_S}", f"--max-time={seconds}"),
        *("--continue-on-failure", "--no-shrink", "--no-color", "--warnings=off", "--suppress-health-check=all"),
        *("--generation-database=none", *options),
        cwd=folder,
        env={**os.environ, "SCHEMATHESIS_HOOKS": HOOKS.removesuffix(".py"), "PYTHONPATH": str(folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), seconds + GRACE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise AssertionError(f"{phase}: the fuzzer still runs {GRACE_S} s after its time") from None
    shown = f"seed {SEED}, {phase}\n{out.decode(errors='replace')}"
    print(shown)
    assert process.returncode == 0, shown[-20_000:]


@pytest.mark.timeout(SECONDS + 600)
async def test_nothing_that_the_document_allows_or_forbids_breaks_it(tmp_path: Path) -> None:
    async with small_mesh(tmp_path) as mesh:
        await documents(mesh, tmp_path)
        for phase in PHASES:
            await run(mesh, tmp_path, phase)
        seen = Counter((tmp_path / "statuses.txt").read_text().splitlines())
        print(seen)
        # It was refused and it was answered: the fuzzer did not talk to a wall.
        for status in ("400", "200", "stream"):
            assert any(seen[f"POST {path} {status}"] for path in GENERATIONS), seen
        await settled(mesh, "decode-0")
        _, finished = await answer(mesh, "all well?", max_tokens=4)
        assert finished.usage.completion_tokens == 4
