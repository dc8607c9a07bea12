"""Options that several commands take, and how a command gives up."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar

import grpc
import typer
from rich.console import Console
from rich.text import Text

from kvmesh.cli import tls
from kvmesh.cli.state import read_state
from kvmesh.cli.tls import Secure
from kvmesh.errors import KvmeshError, NotFound, Unavailable
from kvmesh.rpc.auth import MESH_TOKEN_KEY, MeshToken

T = TypeVar("T")

TlsCa = Annotated[str, typer.Option("--tls-ca", help=tls.CA_HELP, envvar=tls.CA_VARIABLE)]
TlsCert = Annotated[str, typer.Option("--tls-cert", help=tls.CERT_HELP, envvar=tls.CERT_VARIABLE)]
TlsKey = Annotated[str, typer.Option("--tls-key", help=tls.KEY_HELP, envvar=tls.KEY_VARIABLE)]
TlsName = Annotated[str, typer.Option("--tls-server-name", help=tls.NAME_HELP, envvar=tls.NAME_VARIABLE)]
RouterOption = Annotated[
    str,
    typer.Option(
        "--router", help="Router replicas, comma separated; default: the mesh that runs here.", envvar="KVMESH_ROUTER"
    ),
]
TokenFile = Annotated[
    str, typer.Option("--token-file", help="File of the mesh token.", envvar="KVMESH_MESH_TOKEN_FILE")
]


def fail(message: str) -> typer.Exit:
    """Print what is wrong with the command line; the exit to raise (status 2)."""
    Console(stderr=True).print(message, style="red", markup=False)
    return typer.Exit(2)


def secure_of(ca: str, cert: str, key: str, server_name: str) -> Secure:
    """Certificates of the options; exits where they cannot be used."""
    try:
        return Secure.of(ca, cert, key, server_name)
    except KvmeshError as error:
        raise fail(error.message) from None


Troubles = list[tuple[str, grpc.aio.AioRpcError]]
"""Address of a replica, and what its call ended with."""


@dataclass(frozen=True)
class Mesh:
    """How to reach the inner services: `routers` are addresses, `metadata` proves membership of the mesh."""

    routers: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...]
    secure: Secure

    async def call(self, address: str, work: Callable[[grpc.aio.Channel], Awaitable[T]]) -> T:
        """`work` on a channel of its own to `address`."""
        async with self.secure.channel(address) as channel:
            return await work(channel)

    async def ask_all(self, work: Callable[[grpc.aio.Channel], Awaitable[T]]) -> tuple[list[T], Troubles]:
        """`work` on every replica, beside each other: what they replied, and why the others did not."""
        calls = (self.call(address, work) for address in self.routers)
        replies: list[T] = []
        troubles: Troubles = []
        for address, reply in zip(self.routers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(reply, grpc.aio.AioRpcError):
                troubles.append((address, reply))
            elif isinstance(reply, BaseException):
                raise reply
            else:
                replies.append(reply)
        return replies, troubles


def mesh_of(router: str, token_file: str, secure: Secure) -> Mesh:
    """The mesh of the options, by default the one that runs here; exits when there is none."""
    state = read_state()
    if not router and state is None:
        raise fail("no mesh runs here (kvmesh up starts one); name a router with --router")
    if router or state is None:
        routers = tuple(part.strip() for part in router.split(",") if part.strip())
        if not routers:
            raise fail("--router names no address")
    else:
        routers = tuple(state.routers) or (state.router,)
    token = token_file or (state.token_file if state and not router else "")
    try:
        metadata = ((MESH_TOKEN_KEY, MeshToken(Path(token)).current()),) if token else ()
    except (OSError, ValueError) as error:
        raise fail(f"mesh token: {error}") from None
    return Mesh(routers, metadata, secure)


def run(work: Coroutine[Any, Any, int]) -> typer.Exit:
    """Run a command to its exit status; a refused or failed call is one line and status 1."""
    try:
        return typer.Exit(asyncio.run(work))
    except grpc.aio.AioRpcError as error:
        Console(stderr=True).print(f"{error.code().name}: {error.details()}", style="red", markup=False)
        return typer.Exit(1)
    except KvmeshError as error:
        Console(stderr=True).print(error.message, style="red", markup=False)
        return typer.Exit(1)


def told(address: str, error: grpc.aio.AioRpcError) -> str:
    """What is wrong with a replica, in a line."""
    return f"router at {address}: {error.code().name}: {error.details()}"


def nobody(troubles: Troubles) -> KvmeshError:
    """The error to raise where no replica gave a reply: NotFound where every one of them looked."""
    lines = "; ".join(told(*each) for each in troubles)
    looked = all(error.code() is grpc.StatusCode.NOT_FOUND for _, error in troubles)
    return NotFound(lines) if looked else Unavailable(lines)


def plain(text: str) -> Text:
    """Words of others for a cell: no markup, and nothing that a terminal would obey."""
    return Text("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))


def shown(text: str) -> Text:
    """What a model or a server says, without anything that a terminal would obey."""
    # The joiners are part of words and of pictures.
    keep = "\n\t\u200c\u200d"
    return Text("".join(char if char.isprintable() or char in keep else "\N{REPLACEMENT CHARACTER}" for char in text))


def write(out: TextIO, text: str) -> None:
    """A piece of an answer, at once: a program gets what was said, unchanged; a terminal as `shown`."""
    out.write(str(shown(text)) if out.isatty() else text)
    out.flush()


def lenient(*streams: TextIO) -> None:
    """A character that their encodings do not have is replaced, and ends nothing."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def wide_console() -> Console:
    """For tables: into a file or a pipe there is no edge of a screen to fold at."""
    console = Console()
    return console if console.is_terminal else Console(width=200)
