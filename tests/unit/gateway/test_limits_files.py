"""The journal of spend and the export of usage: whole lines, one owner, nothing twice."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvmesh.cli.usage import usage_files
from kvmesh.store.limits import LimitStore
from limits_kit import LIMIT_S, Valkey, a_spend, gateway, lines, until
from services.gateway.limits.journal import Journal
from services.gateway.limits.usage import UsageFile


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "deep" / "folder", "one")
    spends = [a_spend(number, key="käy", code=4) for number in range(1, 6)]
    journal.append(spends[:2])
    journal.append(spends[2:])
    assert journal.read(0, 100) == spends
    assert journal.read(2, 2) == spends[2:4]
    assert journal.path.stat().st_mode & 0o777 == 0o600
    journal.clear()
    assert journal.read(0, 100) == []
    journal.append(spends[:1])
    assert journal.read(0, 100) == spends[:1]
    journal.close(remove=True)
    assert not journal.path.exists()


def test_a_torn_line_and_strange_ones_are_passed_over(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, "one")
    journal.append([a_spend(1)])
    whole = journal.path.read_bytes()
    journal.path.write_bytes(b'\xff{}\n[]\n{"number": 1}\n"x"\n' + b"x" * 20_000 + b"\n" + whole + whole[:-1])
    assert journal.read(0, 100) == [a_spend(1)]
    journal.close(remove=False)


def test_a_journal_has_one_owner(tmp_path: Path) -> None:
    mine = Journal.open(tmp_path, "mine")
    with pytest.raises(BlockingIOError):
        Journal.open(tmp_path, "mine")
    assert list(Journal.abandoned(tmp_path)) == []
    mine.append([a_spend(1)])
    mine.close(remove=False)
    (found,) = Journal.abandoned(tmp_path)
    assert (found.name, found.read(0, 9)) == ("mine", [a_spend(1)])
    found.close(remove=True)
    assert list(Journal.abandoned(tmp_path / "nowhere")) == []


async def test_an_abandoned_journal_that_redis_knows_in_part_counts_once(valkey: Valkey, tmp_path: Path) -> None:
    dead = Journal.open(tmp_path / "journal", "dead")
    spends = [a_spend(number, "heir") for number in range(1, 6)]
    dead.append(spends)
    async with gateway(valkey, start=False, journal=tmp_path / "journal", usage_file=tmp_path / "usage.jsonl") as made:
        assert made.redis is not None
        store = LimitStore(made.redis, hold_ms=1000, take_s=LIMIT_S)
        assert await store.settle("dead", spends[:3]) == []
        dead.close(remove=False)
        made.limits.start()
        await until(lambda: not dead.path.exists())
        figures = await store.figures("heir", "tokens:all")
        assert figures is not None
        assert figures.spent == 15
        ids = [json.loads(line)["id"] for line in lines(tmp_path / "usage.jsonl")]
        assert ids == [f"dead:{number}" for number in range(1, 6)]


async def test_a_disk_that_fails_costs_no_settlement(valkey: Valkey, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with gateway(
        valkey, start=True, journal=tmp_path / "file" / "journal", usage_file=tmp_path / "file" / "usage"
    ) as made:
        made.limits.ledger.add(a_spend(made.limits.ledger.next_number(), "disk"))
        assert made.redis is not None
        store = LimitStore(made.redis, hold_ms=1000, take_s=LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            while (await store.figures("disk", "tokens:all") or (0,))[0] != 3:
                await asyncio.sleep(0.02)


async def test_a_usage_file_that_cannot_be_written_gets_its_lines_later(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a disk that is full, in the middle of a line."""
    exported, full, write = tmp_path / "usage.jsonl", [True], os.write

    def filling(handle: int, data: memoryview) -> int:
        if full and os.readlink(f"/proc/self/fd/{handle}") == str(exported):
            write(handle, data[:10])
            raise OSError(errno.ENOSPC, "no space")
        return write(handle, data)

    monkeypatch.setattr("services.gateway.limits.journal.os.write", filling)
    async with gateway(valkey, journal=tmp_path / "journal", usage_file=exported) as made:
        ledger = made.limits.ledger
        for _ in range(2):
            ledger.add(a_spend(ledger.next_number(), "full"))
            assert not await ledger.flush()
        assert exported.read_bytes() == b""
        # A process that dies now leaves them to the next.
        assert ledger._journal is not None
        assert [spend.number for spend in ledger._journal.read(0, 9)] == [1, 2]
        full.clear()
        assert await ledger.flush()
        assert [json.loads(line)["id"] for line in lines(exported)] == [f"{made.name}:1", f"{made.name}:2"]
        assert [json.loads(line)["period"] for line in lines(exported)] == ["all", "all"]
        assert ledger._journal.read(0, 9) == []


def test_usage_of_several_processes_is_in_whole_lines_however_often_the_file_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"

    def write(process: int) -> None:
        file = UsageFile(path, max_bytes=2000)
        for number in range(0, 40, 2):
            file.write(f"p{process}", [a_spend(number), a_spend(number + 1)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    files = usage_files(path)
    assert len(files) > 4
    ids = [json.loads(line)["id"] for file in files for line in lines(file)]
    assert sorted(ids) == sorted(f"p{process}:{number}" for process in range(4) for number in range(40))
