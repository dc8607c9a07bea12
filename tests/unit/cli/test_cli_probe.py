"""The container probe against grpc's own health service, over plaintext, TLS and mTLS, and against anything else."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from kvmesh.cli import probe

PROGRAM = Path(probe.__file__)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
WAIT_S = 30.0
IPV6 = socket.has_ipv6 and Path("/proc/net/if_inet6").exists()


@asynccontextmanager
async def server(listen: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[str]:
    """grpc's health service: "" and `up` are SERVING, `down` is not."""
    made = grpc.aio.server()
    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, made)
    for name, value in (("", SERVING), ("up", SERVING), ("down", NOT_SERVING)):
        await servicer.set(name, value)
    port = made.add_secure_port(listen, credentials) if credentials else made.add_insecure_port(listen)
    await made.start()
    try:
        yield f"{listen.rpartition(':')[0]}:{port}" if not listen.startswith("unix:") else listen
    finally:
        await made.stop(None)


async def run(*arguments: str, **variables: str) -> tuple[int, str]:
    """The program as a container runs it; exit status, and what it said."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVMESH_")} | variables
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-IS", str(PROGRAM), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=env,
    )
    out, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode is not None
    return process.returncode, out.decode().strip()


async def test_status_and_exit() -> None:
    async with server() as address:
        assert await run(address, "--timeout-s", "20") == (0, "SERVING")
        assert await run(address, "up", "--timeout-s=20") == (0, "SERVING")
        assert await run(address, "down", "--timeout-s=20") == (1, "NOT_SERVING")
        code, said = await run(address, "nobody", "--timeout-s=20")
        assert code == 1
        assert "no such service" in said
    code, said = await run(address)
    assert code == 1
    assert "refused" in said


async def test_over_a_unix_socket_and_ipv6(tmp_path: Path) -> None:
    async with server(f"unix:{tmp_path}/s") as address:
        assert await asyncio.to_thread(probe.probe, address, "up", WAIT_S) == "SERVING"
    if IPV6:
        async with server("[::1]:0") as address:
            assert await asyncio.to_thread(probe.probe, address, "down", WAIT_S) == "NOT_SERVING"


@pytest.mark.parametrize("prefix", ["KVMESH_", "KVMESH_GATEWAY_"])
async def test_tls_and_a_demanded_certificate(tmp_path: Path, prefix: str) -> None:
    ca, other = trustme.CA(), trustme.CA()
    issued = ca.issue_cert("kvmesh.test")
    files = {name: tmp_path / name for name in ("ca", "cert", "key", "other")}
    ca.cert_pem.write_to_path(str(files["ca"]))
    other.cert_pem.write_to_path(str(files["other"]))
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    files["cert"].write_bytes(chain)
    files["key"].write_bytes(issued.private_key_pem.bytes())
    own = {f"{prefix}TLS__CERT": str(files["cert"]), f"{prefix}TLS__KEY": str(files["key"])}
    trusted = {**own, f"{prefix}TLS__CA": str(files["ca"]), "KVMESH_TLS_SERVER_NAME": "kvmesh.test"}
    pair = [(issued.private_key_pem.bytes(), chain)]
    credentials = grpc.ssl_server_credentials(pair, ca.cert_pem.bytes(), require_client_auth=True)
    async with server(credentials=credentials) as address:
        # On loopback nobody's name is checked, unless one is given.
        assert await run(address, "up", "--timeout-s=20", **own) == (0, "SERVING")
        assert await run(address, "up", "--timeout-s=20", **trusted) == (0, "SERVING")
        wrong = {**trusted, f"{prefix}TLS__CA": str(files["other"])}
        assert (await run(address, "up", "--timeout-s=20", **wrong))[0] == 1
        wrong = {**trusted, "KVMESH_TLS_SERVER_NAME": "somebody.test"}
        assert (await run(address, "up", "--timeout-s=20", **wrong))[0] == 1
        assert (await run(address, "up", "--timeout-s=20"))[0] == 1
        nobody = {f"{prefix}TLS__CA": str(files["ca"])}
        assert (await run(address, "up", "--timeout-s=20", **nobody))[0] == 1


async def test_wrong_command_lines() -> None:
    assert (await run("--help"))[0] == 0
    for wrong in ([], ["a:1", "b", "c"], ["a:1", "--timeout-s"], ["a:1", "--timeout-s=x"], ["a:1", "--what"]):
        code, said = await run(*wrong)
        assert (code, said[:6]) == (2, "usage:"), said
    for address in ("x", "127.0.0.1", "127.0.0.1:x", ":", "127.0.0.1:99999"):
        assert (await run(address))[0] == 1
    assert (await run("127.0.0.1:1", "n" * 200))[0] == 1


@contextmanager
def talker(say: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that says anything to one caller."""
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            try:
                say(connection)
                done.wait(WAIT_S)
            except OSError:
                pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        done.set()
        listener.close()
        thread.join(WAIT_S)


SERVING_DATA = probe.frame(probe.DATA, 0, 1, b"\0\0\0\0\2\x08\1")
END = probe.frame(probe.HEADERS, probe.END_HEADERS | probe.END_STREAM, 1, b"\x88")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not HTTP/2"),
        (b"\xff" * 64, "too long"),
        (probe.frame(probe.GOAWAY, 0, 0, bytes(8)), "going away"),
        (probe.frame(probe.RST_STREAM, 0, 1, bytes(4)), "reset"),
        (END, "call failed"),
        (probe.frame(probe.DATA, 1, 1, b"\1\0\0\0\2\x08\1"), "no plain message"),
        (probe.frame(probe.DATA, 1, 1, b"\0\0\0\0\2\x10\1"), "no health status"),
        (probe.frame(probe.DATA, 1, 1, b"\0\0\0\0\2\x08\x7f"), "no health status"),
        (probe.frame(probe.DATA, 0, 3, bytes(16000)) * 5, "too long"),
    ],
)
def test_whatever_answers_is_told_apart(answer: bytes, message: str) -> None:
    with talker(lambda connection: connection.sendall(answer)) as address:
        with pytest.raises(probe.ProbeError, match=message):
            probe.probe(address, "", WAIT_S)


def test_a_server_that_says_nothing_or_leaves_ends_it_in_time() -> None:
    with talker(lambda connection: None) as address:
        begun = time.monotonic()
        with pytest.raises((probe.ProbeError, TimeoutError)):
            probe.probe(address, "", 0.2)
        assert time.monotonic() - begun < WAIT_S
    with talker(lambda connection: connection.shutdown(socket.SHUT_RDWR)) as address:
        with pytest.raises((probe.ProbeError, OSError)):
            probe.probe(address, "", WAIT_S)


def test_frames_in_pieces_settings_and_pings_are_taken() -> None:
    said = probe.frame(probe.SETTINGS, 0, 0) + probe.frame(probe.PING, 0, 0, b"12345678")
    said += probe.frame(probe.HEADERS, probe.END_HEADERS, 1, b"\x88") + SERVING_DATA + END

    def slowly(connection: socket.socket) -> None:
        for byte in said:
            connection.send(bytes([byte]))

    with talker(slowly) as address:
        assert probe.probe(address, "", WAIT_S) == "SERVING"


async def test_it_needs_nothing_but_the_standard_library() -> None:
    code = (
        f"import runpy, sys; sys.argv = ['p', '--help']\ntry: runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    )
    code += "except SystemExit: pass\nprint(sorted(m for m in sys.modules if m in ('ssl', 'asyncio', 'grpc', 'site')))"
    process = await asyncio.create_subprocess_exec(*(sys.executable, "-IS", "-c", code), stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert out.decode().splitlines()[-1] == "[]"
