"""A key file as a tool edits it: whole or not at all, by one tool at a time, and what people wrote in it stays.

TOML is edited as text, block by block, so that comments and order survive; the outcome is then parsed and compared with
what was meant, and a file whose form that does not fit is left alone. JSON is written anew.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvmesh.errors import FailedPrecondition, Unavailable
from kvmesh.rpc.files import read_bounded
from kvmesh.rpc.keyfile import MAX_FILE_BYTES, KeyFile, KeyInfo, KeyRecord, parse, utc

LOCK_TIMEOUT_S = 10.0
_HEADER = re.compile(r"\s*\[")
_KEYS = re.compile(r"\s*\[\[\s*keys\s*\]\]\s*(#.*)?")
_ASIDE = re.compile(r"\s*(#.*)?")
_EXPIRES = re.compile(r"(\s*)expires\s*=")
Change = Callable[[tuple[KeyRecord, ...]], tuple[KeyRecord, ...]]


class FileRing:
    """The keys of one file. A file that is not there is made by the first key."""

    def __init__(self, path: Path) -> None:
        # Behind a link it is the file that is replaced, not the link.
        self._path = Path(os.path.realpath(path))
        self._json = path.suffix == ".json"

    async def listed(self) -> list[KeyInfo]:
        """See KeyRing."""
        return [_info(record) for record in self._read()[1].keys]

    async def add(self, info: KeyInfo) -> None:
        """See KeyRing."""
        record = KeyRecord(
            sha256=info.digest, tenant=info.tenant, name=info.name, created=info.created, expires=info.expires
        )
        self._change(lambda keys: (*keys, record), lambda text: _with_block(text, record))

    async def end(self, info: KeyInfo, at: dt.datetime) -> None:
        """See KeyRing."""
        at = min(at, info.expires or at).replace(microsecond=0)

        def change(keys: tuple[KeyRecord, ...]) -> tuple[KeyRecord, ...]:
            return tuple(k.model_copy(update={"expires": at}) if k.sha256 == info.digest else k for k in keys)

        self._change(change, lambda text: _edited(text, info.digest, lambda block: _expiring(block, at)))

    async def revoke(self, info: KeyInfo) -> None:
        """See KeyRing. Its record goes."""

        def change(keys: tuple[KeyRecord, ...]) -> tuple[KeyRecord, ...]:
            return tuple(each for each in keys if each.sha256 != info.digest)

        self._change(change, lambda text: _edited(text, info.digest, lambda block: []))

    def _read(self) -> tuple[str, KeyFile]:
        try:
            text = read_bounded(self._path, MAX_FILE_BYTES).decode("utf-8")
        except FileNotFoundError:
            return "", KeyFile()
        except OSError as exc:
            raise FailedPrecondition(f"cannot read {self._path}: {exc.strerror}") from None
        except ValueError as exc:
            raise FailedPrecondition(f"{self._path} is no key file: {type(exc).__name__}") from None
        try:
            return text, parse(text, is_json=self._json) if text.strip() else KeyFile()
        except ValueError as exc:
            # The class only: what the parser says may quote the file.
            raise FailedPrecondition(f"{self._path} is no key file: {type(exc).__name__}") from None

    def _change(self, change: Change, edit: Callable[[str], str]) -> None:
        with _locked(self._path.parent):
            text, before = self._read()
            wanted = before.model_copy(update={"keys": change(before.keys)})
            made = _json_with(text, wanted) if self._json else edit(text)
            try:
                fits = parse(made, is_json=self._json) == wanted
            except ValueError:
                fits = False
            if not fits:
                raise FailedPrecondition(
                    f"{self._path} has a form that is not edited here; write each key as a [[keys]] table of its own"
                )
            _replace(self._path, made)


def _info(record: KeyRecord) -> KeyInfo:
    created, expires = (None if at is None else utc(at) for at in (record.created, record.expires))
    return KeyInfo(record.sha256, record.tenant, record.name, created, expires)


# --- text
def _with_block(text: str, record: KeyRecord) -> str:
    fields = {"sha256": record.sha256, "tenant": record.tenant, "name": record.name}
    lines = ["[[keys]]", *(f"{name} = {_quoted(value)}" for name, value in fields.items())]
    if record.created is not None:
        lines.append(f"created = {_moment(record.created)}")
    if record.expires is not None:
        lines.append(f"expires = {_moment(record.expires)}")
    gap = "" if not text.strip() else "\n" if text.endswith("\n") else "\n\n"
    return text + gap + "\n".join(lines) + "\n"


def _edited(text: str, digest: str, edit: Callable[[list[str]], list[str]]) -> str:
    """`edit` gets the lines of the key's block, without what stands before the next one, and gives the new ones."""
    lines = text.splitlines(keepends=True)
    headers = [index for index, line in enumerate(lines) if _HEADER.match(line)]
    for index, following in zip(headers, [*headers[1:], len(lines)], strict=True):
        if not _KEYS.fullmatch(lines[index].rstrip("\n")):
            continue
        end = following
        while _ASIDE.fullmatch(lines[end - 1].rstrip("\n")):
            end -= 1
        if any(digest in line.lower() for line in lines[index:end]):
            return "".join([*lines[:index], *edit(lines[index:end]), *lines[end:]])
    return text


def _expiring(block: list[str], at: dt.datetime) -> list[str]:
    kept = [line for line in block if not _EXPIRES.match(line)]
    last = kept[-1] if kept[-1].endswith("\n") else kept[-1] + "\n"
    return [*kept[:-1], last, f"expires = {_moment(at)}\n"]


def _quoted(text: str) -> str:
    # JSON's strings are TOML's but for DEL, which a name has not, and pairs of surrogates.
    return json.dumps(text, ensure_ascii=False)


def _moment(at: dt.datetime) -> str:
    return utc(at).astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _json_with(text: str, wanted: KeyFile) -> str:
    document: dict[str, Any] = json.loads(text) if text.strip() else {}
    known = {str(each["sha256"]).lower(): each for each in document.get("keys", [])}
    keys = []
    for record in wanted.keys:
        fields = record.model_dump(mode="json", exclude_none=True)
        old = known.get(record.sha256)
        keys.append(fields if old is None else old | ({"expires": fields["expires"]} if record.expires else {}))
    document["keys"] = keys
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


# --- files
@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One editor in a folder at a time. The folder is what is locked: the file itself is another one afterwards."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        raise FailedPrecondition(f"cannot open {folder}: {exc.strerror}") from None
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Unavailable(f"another process edits files in {folder}") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, text: str) -> None:
    """A new file is its owner's alone; one that was there keeps its mode and, where that is allowed, its owner."""
    try:
        old = path.stat()
    except FileNotFoundError:
        old = None
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            if old is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(handle, old.st_uid, old.st_gid)
                os.fchmod(handle, old.st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise FailedPrecondition(f"cannot write {path}: {exc.strerror}") from None
