"""`kvmesh usage`: what tenants have used, by day and model, from Redis or from the export of the gateways."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from kvmesh.cli.options import fail, plain, run, wide_console
from kvmesh.errors import Unavailable

CONNECT_S = 10.0
MAX_DAYS = 400
"""As long as Redis remembers."""

WHATS = ("requests", "prompt", "cached", "completion", "tokens", "money")
TITLES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "charged_tokens", "charged_micros")


class Row(NamedTuple):
    """Sums of a tenant, a day and a model; by WHATS. `tokens` and `money`: what budgets were charged."""

    tenant: str
    day: str
    model: str
    sums: Counter[str]


def usage_files(path: Path) -> list[Path]:
    """An export and what was put aside of it, oldest first."""
    aside = sorted(path.parent.glob(f"{path.name}.*"), key=lambda each: each.name)
    return [each for each in (*aside, path) if each.is_file()]


def from_file(path: Path, since: str, tenant: str) -> list[Row]:
    """Sums of an export. A line that came twice counts once; one that cannot be read is passed over.

    Raises OSError when there is no such file.
    """
    files = usage_files(path)
    if not files:
        raise FileNotFoundError(f"{path}: no such file")
    sums: dict[tuple[str, str, str], Counter[str]] = {}
    seen: set[str] = set()
    for line in _lines(files):
        try:
            key = (str(line["tenant"]), str(line["at"])[:10], str(line["model"]))
            counts = Counter(
                {
                    "requests": 1,
                    "prompt": int(line["prompt_tokens"]),
                    "cached": int(line["cached_tokens"]),
                    "completion": int(line["completion_tokens"]),
                    str(line["unit"]): int(line["cost"]),
                }
            )
            name = str(line["id"])
        except (KeyError, TypeError, ValueError):
            continue
        if name not in seen and key[1] >= since and tenant in ("", key[0]):
            sums.setdefault(key, Counter()).update(counts)
        seen.add(name)
    return [Row(*key, total) for key, total in sorted(sums.items())]


def _lines(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for each in files:
        with each.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    yield line


async def from_redis(
    url: str, since: str, tenant: str, *, password_file: str = "", ca_file: str = "", cluster: bool = False
) -> list[Row]:
    """Sums that Redis keeps. Raises Unavailable."""
    try:
        from kvmesh.store.client import RedisStore
        from kvmesh.store.limits import LimitStore
    except ImportError:
        raise Unavailable("usage in Redis needs its client: pip install 'kvmesh[gateway]'") from None
    try:
        redis = RedisStore(
            url,
            timeout_s=CONNECT_S,
            password_file=Path(password_file) if password_file else None,
            ca_file=Path(ca_file) if ca_file else None,
            cluster=cluster,
        )
    except (OSError, ValueError) as error:
        raise Unavailable(f"Redis: {error}") from None
    watch = asyncio.create_task(redis.watch())
    try:
        try:
            await asyncio.wait_for(redis.up.wait(), CONNECT_S)
        except TimeoutError:
            raise Unavailable("Redis does not answer") from None
        store = LimitStore(redis, hold_ms=1000, take_s=CONNECT_S)
        days = _days(since)
        names = {tenant} if tenant else await store.tenants(days)
        rows: list[Row] = []
        for name in sorted(names or ()):
            usages = await store.usage(name, days)
            if usages is None:
                names = None
                break
            rows += [
                Row(name, usage.day, model, Counter(sums))
                for usage in usages
                for model, sums in sorted(usage.models.items())
            ]
        if names is None:
            raise Unavailable("Redis does not answer")
        return rows
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await redis.close()


def _days(since: str) -> list[str]:
    first, today = dt.date.fromisoformat(since), dt.datetime.now(dt.UTC).date()
    return [(first + dt.timedelta(days=number)).isoformat() for number in range(max(0, (today - first).days) + 1)]


def first_day(since: str) -> str:
    """The day (UTC) that `--since` means: a date, or a number of days back. Exits for anything else."""
    today = dt.datetime.now(dt.UTC).date()
    back = re.fullmatch(r"(\d{1,4})d", since)
    try:
        day = today - dt.timedelta(days=int(back[1])) if back else dt.date.fromisoformat(since)
    except ValueError:
        raise fail(f"--since {since}: neither a date (2026-11-30) nor a number of days (7d)") from None
    return max(day, today - dt.timedelta(days=MAX_DAYS)).isoformat()


def usage_view(rows: Iterable[Row]) -> Table:
    """A line a tenant, day and model."""
    table = Table("tenant", "day", "model", *(title.replace("_", " ") for title in TITLES))
    for row in rows:
        table.add_row(plain(row.tenant), row.day, plain(row.model), *(f"{row.sums[what]:,}" for what in WHATS))
    return table


def as_json(row: Row) -> str:
    """A row for programs."""
    sums = {title: row.sums[what] for title, what in zip(TITLES, WHATS, strict=True)}
    return json.dumps({"tenant": row.tenant, "day": row.day, "model": row.model, **sums})


def usage(
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    since: Annotated[str, typer.Option(help="First day (UTC): a date, or days back, as 7d.")] = "30d",
    json_lines: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
    file: Annotated[str, typer.Option(help="Export of the gateways (limits.usage_file) instead of Redis.")] = "",
    redis_url: Annotated[
        str, typer.Option(help="Redis of the gateways.", envvar="KVMESH_GATEWAY_REDIS_URL", show_default=False)
    ] = "",
    redis_password_file: Annotated[
        str, typer.Option(help="File that holds the Redis password.", envvar="KVMESH_GATEWAY_REDIS_PASSWORD_FILE")
    ] = "",
    redis_ca_file: Annotated[
        str, typer.Option(help="PEM bundle that signs Redis's certificate.", envvar="KVMESH_GATEWAY_REDIS_CA_FILE")
    ] = "",
    redis_cluster: Annotated[
        bool, typer.Option(help="The URL names a node of a Redis Cluster.", envvar="KVMESH_GATEWAY_REDIS_CLUSTER")
    ] = False,
) -> None:
    """What tenants have used, by day and model; charged are tokens, or millionths of money, as their budget has it."""
    if not file and not redis_url:
        raise fail("name where usage is kept: --redis-url, or --file for an export")
    day = first_day(since)

    async def show() -> int:
        if file:
            try:
                rows = from_file(Path(file), day, tenant)
            except OSError as error:
                raise Unavailable(str(error)) from None
        else:
            rows = await from_redis(
                redis_url,
                day,
                tenant,
                password_file=redis_password_file,
                ca_file=redis_ca_file,
                cluster=redis_cluster,
            )
        if json_lines:
            for row in rows:
                typer.echo(as_json(row))
        else:
            wide_console().print(usage_view(rows))
        return 0

    raise run(show())
