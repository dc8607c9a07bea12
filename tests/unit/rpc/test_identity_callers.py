"""One way to tell callers: the order of the sources, certificates, and odd values of `authorization`."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from identity_kit import key_block
from kvmesh.errors import KvmeshError, PermissionDenied, Unauthenticated, Unavailable
from kvmesh.rpc import Credentials, hash_key, keyfile, new_key
from kvmesh.rpc.certificates import MAX_NAMES, PeerCertificate
from kvmesh.rpc.credentials import Identity
from kvmesh.rpc.keyfile import parse

KEY, STORED, DOTTED = new_key(), new_key(), "key.of.three"
TOKEN = "header.claims.signature"
FILE = f"""{key_block(KEY, "file", name='"ci"')}
{key_block(DOTTED, "dotted")}
{key_block("expired", "file", expires="2001-01-01T00:00:00Z")}
[[certificates]]
san = "spiffe://example.org/acme"
tenant = "acme"
name = "mesh"
[[certificates]]
san = "Batch.Acme.example"
tenant = "acme"
name = "batch"
[[certificates]]
subject = "other.example"
tenant = "other"
[tenants.acme]
max_tokens = 5
[tenants.stored]
max_tokens = 6
"""


class Keys:
    """A source of keys that counts what it is asked."""

    def __init__(self, error: KvmeshError | None = None) -> None:
        self.asked: list[bytes] = []
        self.error = error

    async def find(self, digest: bytes) -> Identity | None:
        self.asked.append(digest)
        if self.error is not None:
            raise self.error
        return Identity("stored", "of redis") if digest.hex() == hash_key(STORED) else None


class Tokens:
    """A source of tokens that counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def check(self, token: str) -> Identity | None:
        self.asked.append(token)
        return Identity("claimed", "sub") if token == TOKEN else None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    return file


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


async def test_each_source_in_its_turn(path: Path) -> None:
    keys, tokens = Keys(), Tokens()
    callers = Credentials(path, keys=keys, tokens=tokens)
    assert not callers.open
    for given, tenant, name, limit in [
        (KEY, "file", "ci", 0),
        (DOTTED, "dotted", "", 0),
        (STORED, "stored", "of redis", 6),
        (TOKEN, "claimed", "sub", 0),
    ]:
        found = await callers.identify(f"Bearer {given}")
        assert (found.tenant, found.key_name, found.policy.max_tokens) == (tenant, name, limit)
    # A source is only asked for what could be its own.
    assert (len(keys.asked), tokens.asked) == (1, [TOKEN])
    for wrong in ("a.b", "a.b.c.d", "expired", "kvm-short", KEY + "x"):
        with pytest.raises(Unauthenticated):
            await callers.identify(f"Bearer {wrong}")
    assert (len(keys.asked), tokens.asked) == (1, [TOKEN])
    with pytest.raises(Unauthenticated):
        await callers.identify(f"Bearer {new_key()}")
    assert len(keys.asked) == 2


async def test_a_source_that_cannot_tell_says_so_and_the_others_go_on(path: Path) -> None:
    callers = Credentials(path, keys=Keys(Unavailable("not now")), tokens=Tokens())
    assert (await callers.identify(f"Bearer {KEY}")).tenant == "file"
    assert (await callers.identify(f"Bearer {TOKEN}")).tenant == "claimed"
    with pytest.raises(Unavailable):
        await callers.identify(f"Bearer {STORED}")


@pytest.mark.parametrize("sources", [{"keys": Keys()}, {"tokens": Tokens()}])
async def test_any_source_closes_the_door(sources: dict[str, Any]) -> None:
    callers = Credentials(None, **sources)
    for nothing in (None, "", [], "Bearer x"):
        with pytest.raises(Unauthenticated):
            await callers.identify(nothing, PeerCertificate("acme"))


def certificate(*names: str, subject: str = "") -> PeerCertificate:
    return PeerCertificate(subject, frozenset(names))


@pytest.mark.parametrize(
    ("given", "tenant", "name"),
    [
        (certificate("spiffe://example.org/acme"), "acme", "mesh"),
        (certificate("batch.acme.example"), "acme", "batch"),
        (certificate("batch.acme.example", "spiffe://example.org/acme", "more.example"), "acme", "batch"),
        (certificate(subject="other.example"), "other", ""),
        (certificate("unknown.example", subject="other.example"), "other", ""),
    ],
)
async def test_a_certificate_is_its_names_tenant(path: Path, given: PeerCertificate, tenant: str, name: str) -> None:
    callers = Credentials(path)
    found = await callers.identify(None, given)
    assert (found.tenant, found.key_name) == (tenant, name)
    assert found.policy.max_tokens == (5 if tenant == "acme" else 0)
    # A wrong key does not become right by a certificate, and a right one counts.
    with pytest.raises(Unauthenticated):
        await callers.identify("Bearer wrong", given)
    assert (await callers.identify(f"Bearer {KEY}", given)).tenant == "file"


@pytest.mark.parametrize(
    "given",
    [
        None,
        certificate("unknown.example"),
        certificate("spiffe://example.org/acme/"),
        certificate("SPIFFE://example.org/acme"),
        certificate("x.batch.acme.example"),
        certificate("other.example"),
        certificate(subject="batch.acme.example"),
        certificate(subject=""),
        certificate("spiffe://example.org/acme", subject="other.example"),
    ],
)
async def test_other_certificates_are_nobodys(path: Path, given: PeerCertificate | None) -> None:
    with pytest.raises(Unauthenticated):
        await Credentials(path).identify(None, given)


def test_names_of_a_certificate() -> None:
    described = {
        "subject": ((("organizationName", "x"),), (("commonName", "batch"),)),
        "subjectAltName": (("DNS", "A.Example"), ("URI", "spiffe://X/y"), ("IP Address", "1.2.3.4"), ("email", "a@b")),
    }
    assert PeerCertificate.of_socket(described) == certificate("a.example", "spiffe://X/y", subject="batch")
    for nothing in (None, {}, {"subject": ((("organizationName", "x"),),)}):
        assert PeerCertificate.of_socket(nothing) is None
    twice = {"subject": ((("commonName", "a"),), (("commonName", "b"),)), "subjectAltName": (("DNS", "c"),)}
    assert PeerCertificate.of_socket(twice) == certificate("c")
    many = {"subjectAltName": tuple(("DNS", f"n{i}") for i in range(MAX_NAMES + 1))}
    assert PeerCertificate.of_socket(many) is None


ODD: dict[str, Any] = {
    "empty": "",
    "empty list": [""],
    "blank": "   ",
    "scheme alone": "Bearer",
    "scheme and blanks": "Bearer   ",
    "key alone": KEY,
    "another scheme": f"Basic {KEY}",
    "a scheme too many": f"Bearer Bearer {KEY}",
    "scheme run into the key": f"Bearer{KEY}",
    "tab for a blank": f"Bearer\t{KEY}",
    "tab after a blank": f"Bearer \t{KEY}",
    "line after it": f"Bearer {KEY}\n",
    "no-break space": f"Bearer\xa0{KEY}",
    "two keys": f"Bearer {KEY} {KEY}",
    "list in one": f"Bearer {KEY}, Bearer {KEY}",
    "given twice": [f"Bearer {KEY}", f"Bearer {KEY}"],
    "given twice, one of them wrong": ["Bearer wrong", f"Bearer {KEY}"],
    "quoted": f'Bearer "{KEY}"',
    "padded": f"Bearer {KEY}=",
    "zero byte": f"Bearer {KEY}\0",
    "other case": f"Bearer {KEY.swapcase()}",
    "not ASCII": "Bearer kéy",
    "wide letters": "Bearer " + "".join(chr(ord(char) + 0xFEE0) for char in KEY),
    "lone surrogate": "Bearer \ud800",
    "digest for the key": f"Bearer {hash_key(KEY)}",
    "10 kB": "Bearer " + "x" * 10_000,
    "10 kB of blanks": "Bearer" + " " * 10_000 + KEY,
    "10 MB": "Bearer " + "x" * 10_000_000,
    "10 kB of dots": "Bearer " + "." * 10_000,
}


@pytest.mark.parametrize("given", ODD.values(), ids=ODD.keys())
async def test_odd_values_are_nobodys(path: Path, given: Any) -> None:
    keys, tokens = Keys(), Tokens()
    with pytest.raises(Unauthenticated) as refused:
        await Credentials(path, keys=keys, tokens=tokens).identify(given)
    assert refused.value.message == "a valid API key is needed: authorization: Bearer <key>"
    assert not refused.value.details
    assert not keys.asked
    assert not tokens.asked


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer   {}", " Bearer {} "])
async def test_forms_that_mean_the_same(path: Path, form: str) -> None:
    assert (await Credentials(path).identify(form.format(KEY))).tenant == "file"


class Call:
    """A gRPC call as its metadata and what TLS knows."""

    def __init__(self, *metadata: tuple[str, Any], tls: dict[str, list[bytes]] | None = None) -> None:
        self._metadata, self._tls = metadata, tls or {}

    def invocation_metadata(self) -> Any:
        return self._metadata

    def auth_context(self) -> Any:
        return self._tls


async def test_a_call_brings_all_of_it(path: Path) -> None:
    async def tenant(*metadata: tuple[str, Any], **more: Any) -> str:
        call: Any = Call(*metadata, **more)
        return (await callers.authenticate_call(call)).tenant

    callers = Credentials(path)
    bearer = ("authorization", f"Bearer {KEY}")
    assert await tenant(bearer) == "file"
    assert await tenant(bearer, ("x-kvmesh-tenant", "file")) == "file"
    for other in ("acme", "", "local"):
        with pytest.raises(PermissionDenied):
            await tenant(bearer, ("x-kvmesh-tenant", other))
        with pytest.raises(PermissionDenied):
            await tenant(bearer, ("x-kvmesh-tenant", "file"), ("x-kvmesh-tenant", other))
    for wrong in ((bearer, bearer), (), (("authorization-bin", b"Bearer x"),), (("x-api-key", KEY),)):
        with pytest.raises(Unauthenticated):
            await tenant(*wrong)
    tls = {"x509_common_name": [b"nobody"], "peer_uri": [b"spiffe://example.org/acme"]}
    assert await tenant(tls=tls) == "acme"
    assert await tenant(tls={"peer_dns": [b"BATCH.acme.example"]}) == "acme"
    assert await tenant(tls={"x509_common_name": [b"other.example"]}) == "other"
    for wrong in ({"peer_dns": [b"\xff"]}, {"x509_subject_alternative_name": [b"spiffe://example.org/acme"]}):
        with pytest.raises(Unauthenticated):
            await tenant(tls=wrong)
    callers = Credentials(None)
    assert await tenant(bearer) == "local"
    with pytest.raises(PermissionDenied):
        await tenant(("x-kvmesh-tenant", "acme"))


async def test_a_new_file_brings_policies_and_certificates(path: Path) -> None:
    callers = Credentials(path, keys=Keys(), interval_s=0.0)
    assert (await callers.identify(f"Bearer {STORED}")).policy.max_tokens == 6
    rewrite(path, '[[certificates]]\nsubject = "new"\ntenant = "stored"\n[tenants.stored]\nmax_tokens = 7\n')
    assert (await callers.identify(f"Bearer {STORED}")).policy.max_tokens == 7
    assert (await callers.identify(None, certificate(subject="new"))).policy.max_tokens == 7
    with pytest.raises(Unauthenticated):
        await callers.identify(None, certificate("batch.acme.example"))


@pytest.mark.parametrize(
    "record",
    [
        {"tenant": "a"},
        {"tenant": "a", "san": "x", "subject": "y"},
        {"tenant": "../a", "san": "x"},
        {"tenant": "a", "san": "x", "typo": 1},
        {"tenant": "a", "san": "x" * 2000},
    ],
)
def test_a_broken_certificate_stops_the_start(tmp_path: Path, record: dict[str, Any]) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"certificates": [record]}))
    with pytest.raises(ValueError):  # noqa: PT011
        Credentials(path)
    path.write_text(json.dumps({"certificates": [{"tenant": "a", "san": "x"}, {"tenant": "b", "san": "X"}]}))
    with pytest.raises(ValueError, match="twice"):
        Credentials(path)


async def tenant_of(callers: Credentials, key: str) -> str | None:
    try:
        return (await callers.identify(f"Bearer {key}")).tenant
    except Unauthenticated:
        return None


async def test_a_long_file_is_read_beside_the_calls(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is parsed callers are told by the old one."""
    callers = Credentials(path, interval_s=0.0)
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return parse(*args, **kwargs)

    monkeypatch.setattr(keyfile, "parse", slow)
    rewrite(path, key_block("new", "new") + "# a comment\n" * 2000)
    assert (await callers.identify(f"Bearer {KEY}")).tenant == "file"
    assert begun.wait(60)
    with pytest.raises(Unauthenticated):
        await callers.identify("Bearer new")
    go_on.set()
    async with asyncio.timeout(60):
        while await tenant_of(callers, "new") is None:
            await asyncio.sleep(0.01)
    assert await tenant_of(callers, KEY) is None
    # So is one that is broken; the next one counts again.
    rewrite(path, "x" * 20_000)
    assert await tenant_of(callers, "new") == "new"
    rewrite(path, key_block(KEY, "short"))
    async with asyncio.timeout(60):
        while await tenant_of(callers, KEY) != "short":
            await asyncio.sleep(0.01)
