"""`kvmesh keys`: API keys of a gateway, in its key file or in Redis. A key is shown once, when it is made."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvmesh.cli.options import fail, plain, run, wide_console
from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.identity import keyring
from kvmesh.identity.filering import FileRing
from kvmesh.identity.keyring import ID_CHARS, KeyRing, span
from kvmesh.rpc.keyfile import KeyInfo

CONNECT_S = 10.0

app = typer.Typer(name="keys", help="API keys: create, rotate, revoke, list.", no_args_is_help=True)

File = Annotated[str, typer.Option("--file", help="Key file of the gateway (TOML or JSON); made if it is not there.")]
RedisUrl = Annotated[str, typer.Option("--redis-url", help="Redis of the gateways, which set keys_in_redis.")]
PasswordFile = Annotated[str, typer.Option("--redis-password-file", help="File that holds the Redis password.")]
CaFile = Annotated[str, typer.Option("--redis-ca-file", help="PEM bundle that signs Redis's TLS certificate.")]
Cluster = Annotated[bool, typer.Option("--redis-cluster", help="The URL names a node of a Redis Cluster.")]
TenantOption = Annotated[str, typer.Option("--tenant", help="Only keys of this tenant.")]
Which = Annotated[str, typer.Argument(help="Name of a key, or the first 8 or more characters of its id.")]

Place = Callable[[], "contextlib.AbstractAsyncContextManager[KeyRing]"]


def _place(file: str, redis_url: str, password_file: str, ca_file: str, cluster: bool) -> Place:
    """Where the options say that keys are kept; exits when they say none, or two."""
    if bool(file) == bool(redis_url):
        raise fail("name the place of the keys: --file or --redis-url")

    @contextlib.asynccontextmanager
    async def in_file() -> AsyncIterator[KeyRing]:
        yield FileRing(Path(file))

    @contextlib.asynccontextmanager
    async def in_redis() -> AsyncIterator[KeyRing]:
        try:
            from kvmesh.store.apikeys import RedisRing
            from kvmesh.store.client import RedisStore
        except ImportError:
            raise Unavailable("keys in Redis need its client: pip install 'kvmesh[gateway]'") from None
        try:
            store = RedisStore(
                redis_url,
                timeout_s=CONNECT_S,
                password_file=Path(password_file) if password_file else None,
                ca_file=Path(ca_file) if ca_file else None,
                cluster=cluster,
            )
        except (OSError, ValueError) as error:
            raise Unavailable(f"Redis: {error}") from None
        watch = asyncio.create_task(store.watch())
        try:
            try:
                await asyncio.wait_for(store.up.wait(), CONNECT_S)
            except TimeoutError:
                raise Unavailable("Redis does not answer") from None
            yield RedisRing(store)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await store.close()

    return in_file if file else in_redis


def _show(key: str, info: KeyInfo) -> None:
    """The key alone goes to standard output, so that it can be read by a program."""
    ends = "never expires" if info.expires is None else f"expires {_day(info.expires)}"
    note = f"key {info.name} of tenant {info.tenant}, id {info.digest[:ID_CHARS]}, {ends}; it is shown this once"
    _told(note)
    typer.echo(key)


def _told(text: str) -> None:
    # Not through a console, which breaks lines at its width.
    typer.echo(plain(text).plain, err=True)


def _day(at: dt.datetime | None) -> str:
    return "" if at is None else at.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _span(text: str) -> dt.timedelta:
    try:
        return span(text)
    except KvmeshError as error:
        raise fail(error.message) from None


def _do(place: Place, work: Callable[[KeyRing], Awaitable[None]]) -> typer.Exit:
    async def within() -> int:
        async with place() as ring:
            await work(ring)
        return 0

    return run(within())


@app.command()
def create(
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant that the key stands for.")],
    name: Annotated[str, typer.Option("--name", help="For people; default: made of the key's id.")] = "",
    expires: Annotated[str, typer.Option("--expires", help="Length of its life: 90d, 12h; default: no end.")] = "",
    file: File = "",
    redis_url: RedisUrl = "",
    redis_password_file: PasswordFile = "",
    redis_ca_file: CaFile = "",
    redis_cluster: Cluster = False,
) -> None:
    """Make a key. Gateways know it within about a second."""
    place = _place(file, redis_url, redis_password_file, redis_ca_file, redis_cluster)
    life = _span(expires) if expires else None

    async def work(ring: KeyRing) -> None:
        _show(*await keyring.create(ring, tenant, name, life))

    raise _do(place, work)


@app.command()
def rotate(
    which: Which,
    grace: Annotated[str, typer.Option("--grace", help="How long the old key still works.")] = "1h",
    expires: Annotated[
        str, typer.Option("--expires", help="Length of the new key's life; default: as long as the old one's.")
    ] = "",
    tenant: TenantOption = "",
    file: File = "",
    redis_url: RedisUrl = "",
    redis_password_file: PasswordFile = "",
    redis_ca_file: CaFile = "",
    redis_cluster: Cluster = False,
) -> None:
    """Make a new key of the same name, and let the old one end after a grace."""
    place = _place(file, redis_url, redis_password_file, redis_ca_file, redis_cluster)
    life, rest = _span(expires) if expires else None, _span(grace)

    async def work(ring: KeyRing) -> None:
        key, info, old = await keyring.rotate(ring, which, tenant, life=life)
        # Shown before the old one ends: whatever happens then, nobody is left without a key.
        _show(key, info)
        await keyring.end_all(ring, old, rest)

    raise _do(place, work)


@app.command()
def revoke(
    which: Which,
    tenant: TenantOption = "",
    file: File = "",
    redis_url: RedisUrl = "",
    redis_password_file: PasswordFile = "",
    redis_ca_file: CaFile = "",
    redis_cluster: Cluster = False,
) -> None:
    """End a key. Gateways refuse it within about a second."""
    place = _place(file, redis_url, redis_password_file, redis_ca_file, redis_cluster)

    async def work(ring: KeyRing) -> None:
        for info in await keyring.revoke(ring, which, tenant):
            _told(f"revoked key {info.name} of tenant {info.tenant}, id {info.digest[:ID_CHARS]}")

    raise _do(place, work)


@app.command("list")
def list_keys(
    tenant: TenantOption = "",
    file: File = "",
    redis_url: RedisUrl = "",
    redis_password_file: PasswordFile = "",
    redis_ca_file: CaFile = "",
    redis_cluster: Cluster = False,
) -> None:
    """Show the keys that there are, never the keys themselves."""
    place = _place(file, redis_url, redis_password_file, redis_ca_file, redis_cluster)

    async def work(ring: KeyRing) -> None:
        now = dt.datetime.now(dt.UTC)
        table = Table("id", "tenant", "name", "created", "expires", "state")
        for info in sorted(await ring.listed(), key=lambda each: (each.tenant, each.name, _day(each.created))):
            if tenant in ("", info.tenant):
                state = "works" if info.live(now) else "expired" if info.revoked is None else "revoked"
                cells = (info.digest[:ID_CHARS], info.tenant, info.name, _day(info.created), _day(info.expires), state)
                table.add_row(*map(plain, cells))
        wide_console().print(table)

    raise _do(place, work)
