"""Tokens of an identity provider: what is accepted, every known forgery, and key sets that change or are away."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import http.server
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from identity_kit import Authority
from kvmesh import errors
from kvmesh.config import JwtSettings
from kvmesh.identity import jwks
from kvmesh.identity.jwks import FileKeys, UrlKeys, parse_jwks
from kvmesh.identity.tokens import MAX_CACHED, JwtTokens
from kvmesh.rpc import Credentials

ISSUER, AUDIENCE = "https://login.example", "kvmesh"
LIMIT_S = 60.0
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
P256, P384 = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP384R1())
ED = ed25519.Ed25519PrivateKey.generate()


def public(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    kind = {rsa.RSAPrivateKey: RSAAlgorithm, ec.EllipticCurvePrivateKey: ECAlgorithm}
    algorithm = next((made for base, made in kind.items() if isinstance(key, base)), OKPAlgorithm)
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid, **more}


KEYS = [public(RSA, "rsa"), public(P256, "p256"), public(P384, "p384"), public(ED, "ed", alg="EdDSA")]


def claims(**more: Any) -> dict[str, Any]:
    now = time.time()
    base = {"iss": ISSUER, "aud": AUDIENCE, "exp": now + 600, "tenant": "acme", "sub": "ci@acme"}
    return {name: value for name, value in {**base, **more}.items() if value is not None}


def token(key: Any = RSA, algorithm: str = "RS256", kid: str | None = "rsa", headers: Any = None, **more: Any) -> str:
    named = {} if kid is None else {"kid": kid}
    return jwt.encode(claims(**more), key, algorithm=algorithm, headers={**named, **(headers or {})})


def b64(raw: bytes | dict[str, Any]) -> str:
    data = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed_by_hand(header: dict[str, Any], secret: bytes, body: bytes | None = None) -> str:
    """With HMAC, which no careful library does with a public key."""
    text = f"{b64(header)}.{b64(body if body is not None else json.dumps(claims()).encode())}"
    return f"{text}.{b64(hmac.new(secret, text.encode(), hashlib.sha256).digest())}"


def settings(**more: Any) -> JwtSettings:
    return JwtSettings(**({"jwks": "unused", "issuer": ISSUER, "audience": AUDIENCE, "leeway_s": 30} | more))


def key_file(path: Path, keys: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"keys": keys}))
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> JwtTokens:
    return JwtTokens(settings(), FileKeys(key_file(tmp_path / "jwks.json", KEYS), interval_s=0.0))


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"),
    [
        (RSA, "RS256", "rsa"),
        (RSA, "RS512", "rsa"),
        (RSA, "PS256", "rsa"),
        (P256, "ES256", "p256"),
        (P384, "ES384", "p384"),
        (ED, "EdDSA", "ed"),
        (ED, "EdDSA", None),
    ],
)
async def test_a_good_token_is_its_claims_tenant(tokens: JwtTokens, key: Any, algorithm: str, kid: str | None) -> None:
    found = await tokens.check(token(key, algorithm, kid))
    assert found is not None
    assert (found.tenant, found.name) == ("acme", "ci@acme")
    found = await tokens.check(token(key, algorithm, kid, tenant="other", aud=["x", AUDIENCE], sub=None))
    assert found is not None
    assert (found.tenant, found.name) == ("other", "")


PEM = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
FORGED: dict[str, Callable[[], str]] = {
    "none": lambda: f"{b64({'alg': 'none', 'typ': 'JWT'})}.{b64(claims())}.",
    "None, with the key's id": lambda: f"{b64({'alg': 'None', 'kid': 'rsa'})}.{b64(claims())}.",
    "public key as a secret": lambda: signed_by_hand({"alg": "HS256", "kid": "rsa"}, PEM),
    "public key as a secret, without an id": lambda: signed_by_hand({"alg": "HS256"}, PEM),
    "secret of nothing": lambda: signed_by_hand({"alg": "HS256", "kid": "rsa"}, b""),
    "another's key": lambda: token(OTHER_RSA),
    "a key of its own": lambda: token(OTHER_RSA, headers={"jwk": public(OTHER_RSA, "rsa")}),
    "a key elsewhere": lambda: token(OTHER_RSA, headers={"jku": "https://evil.example/jwks"}),
    "unknown key id": lambda: token(kid="nobody's"),
    "key id of another kind": lambda: token(kid="p256"),
    "key id that is no text": lambda: f"{b64({'alg': 'RS256', 'kid': ['rsa']})}.{b64(claims())}.{b64(b'x' * 256)}",
    "long key id": lambda: token(kid="k" * 1000),
    "algorithm of another curve": lambda: token(P256, "ES256", "p384"),
    "algorithm of another kind": lambda: f"{b64({'alg': 'RS256', 'kid': 'ed'})}.{b64(claims())}.{b64(b'x' * 64)}",
    "algorithm that is no text": lambda: f"{b64({'alg': ['RS256'], 'kid': 'rsa'})}.{b64(claims())}.{b64(b'x' * 256)}",
    "signature of zeros": lambda: f"{b64({'alg': 'ES256', 'kid': 'p256'})}.{b64(claims())}.{b64(bytes(64))}",
    "no signature": lambda: token().rpartition(".")[0] + ".",
    "other claims": lambda: ".".join([(t := token().split("."))[0], b64(claims(tenant="other")), t[2]]),
    "critical header": lambda: token(headers={"crit": ["exp"]}),
    "detached body": lambda: token(headers={"b64": False}),
    "expired": lambda: token(exp=time.time() - 31),
    "not yet": lambda: token(nbf=time.time() + 300),
    "made in the future": lambda: token(iat=time.time() + 300),
    "never expires": lambda: token(exp=None),
    "expires at no number": lambda: token(exp="soon"),
    "infinite": lambda: token(exp=float("inf")),
    "another issuer": lambda: token(iss=ISSUER + "/"),
    "no issuer": lambda: token(iss=None),
    "another audience": lambda: token(aud="kvmesh2"),
    "no audience": lambda: token(aud=None),
    "no tenant": lambda: token(tenant=None),
    "tenant that is no name": lambda: token(tenant="../acme"),
    "tenant with a line after it": lambda: token(tenant="acme\n"),
    "empty tenant": lambda: token(tenant=""),
    "list of tenants": lambda: token(tenant=["acme"]),
    "claims that are no object": lambda: signed_by_hand({"alg": "RS256", "kid": "rsa"}, PEM, b"[]"),
    "deep header": lambda: f"{b64(b'[' * 4000)}.e30.e30",
    "deep claims": lambda: jwt.api_jws.encode(b"[" * 4000, RSA, algorithm="RS256", headers={"kid": "rsa"}),
    "too long": lambda: token(filler="x" * 9000),
    "three dots": lambda: "..",
    "not base64": lambda: "a.b.c",
    "not ASCII": lambda: token() + "ü",
    "lone surrogate": lambda: "\ud800.\ud800.\ud800",
}  # fmt: skip


@pytest.mark.parametrize("make", FORGED.values(), ids=FORGED.keys())
async def test_a_forged_token_is_nobodys(tokens: JwtTokens, make: Callable[[], str]) -> None:
    made = make()
    assert await tokens.check(made) is None
    # And says no more to the caller than any other wrong key.
    with pytest.raises(errors.Unauthenticated, match=r"^a valid API key is needed"):
        await Credentials(None, tokens=tokens).identify(f"Bearer {made}")


async def test_without_a_key_id_the_key_must_be_beyond_doubt(tmp_path: Path) -> None:
    keys = [public(RSA, "rsa"), public(OTHER_RSA, "other")]
    tokens = JwtTokens(settings(), FileKeys(key_file(tmp_path / "jwks.json", keys)))
    assert await tokens.check(token(kid="rsa")) is not None
    assert await tokens.check(token(kid=None)) is None


async def test_clocks_may_differ_by_the_leeway(tokens: JwtTokens) -> None:
    assert await tokens.check(token(exp=time.time() - 5)) is not None
    assert await tokens.check(token(nbf=time.time() + 5)) is not None


async def test_the_claim_of_the_tenant_is_a_setting(tmp_path: Path) -> None:
    keys = FileKeys(key_file(tmp_path / "jwks.json", KEYS))
    tokens = JwtTokens(settings(tenant_claim="https://example.com/org"), keys)
    made = token(tenant=None, **{"https://example.com/org": "acme"})
    assert (found := await tokens.check(made)) is not None
    assert found.tenant == "acme"
    assert await tokens.check(token()) is None


async def test_policies_of_tokens_are_the_key_files(tmp_path: Path, tokens: JwtTokens) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.acme]\nmax_tokens = 7\n")
    store = Credentials(path, tokens=tokens)
    assert (await store.identify(f"bearer {token()}")).policy.max_tokens == 7
    assert (await store.identify(f"bearer {token(tenant='other')}")).policy.max_tokens == 0


async def test_a_new_key_file_counts_at_once_for_known_tokens_too(tmp_path: Path, tokens: JwtTokens) -> None:
    made, newer = token(), token(OTHER_RSA, kid="new")
    assert await tokens.check(made) is not None
    assert await tokens.check(newer) is None
    key_file(tmp_path / "jwks.json", [public(OTHER_RSA, "new")])
    assert await tokens.check(made) is None
    assert await tokens.check(newer) is not None
    (tmp_path / "jwks.json").write_text("{}")
    assert await tokens.check(newer) is not None


async def test_a_known_token_ends_with_its_time_and_the_memory_is_bounded(tokens: JwtTokens, monkeypatch) -> None:
    made = token(exp=time.time() + 2)
    assert await tokens.check(made) is not None
    now = time.time()
    monkeypatch.setattr("kvmesh.identity.tokens.time.time", lambda: now + 40)
    assert await tokens.check(made) is not None, "checked anew, by the library's own clock"
    monkeypatch.undo()
    monkeypatch.setattr("kvmesh.identity.tokens.MAX_CACHED", 3)
    for number in range(8):
        assert await tokens.check(token(jti=str(number))) is not None
    assert len(tokens._good) <= 3 < MAX_CACHED


UNFIT = {
    "secret": {"kty": "oct", "k": b64(b"x" * 32), "kid": "oct"},
    "private": {**json.loads(RSAAlgorithm.to_jwk(RSA)), "kid": "private"},
    "for encryption": public(RSA, "enc", use="enc"),
    "for signing alone": public(RSA, "sign", key_ops=["sign"]),
    "short": public(rsa.generate_private_key(public_exponent=65537, key_size=1024), "short"),
    "of a secret's algorithm": public(RSA, "hs", alg="HS256"),
    "of an unknown curve": public(ec.generate_private_key(ec.SECP256K1()), "k1"),
    "long id": public(RSA, "k" * 1000),
    "broken": {"kty": "RSA", "n": "!", "e": "AQAB", "kid": "broken"},
    "number": 7,
}  # fmt: skip


def test_only_fit_keys_are_taken_from_a_set() -> None:
    found = parse_jwks(json.dumps({"keys": [*UNFIT.values(), *KEYS]}).encode())
    assert [key.kid for key in found] == ["rsa", "p256", "p384", "ed"]
    assert all("HS256" not in key.algorithms for key in found)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"keys": 3}', b'{"keys": []}', *(
    json.dumps({"keys": keys}).encode() for keys in (list(UNFIT.values()), [KEYS[0]] * 300)
)])  # fmt: skip
def test_a_set_without_a_fit_key_is_none(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_jwks(raw)
    (tmp_path / "jwks.json").write_bytes(raw)
    with pytest.raises(ValueError):  # noqa: PT011
        JwtTokens(settings(jwks=str(tmp_path / "jwks.json")))


class Provider:
    """An https server with a key set, which can be away; it counts what it is asked."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder, "provider")
        self.context = ssl.create_default_context(cafile=authority.file)
        self.pages: dict[str, bytes | tuple[int, str]] = {}
        self.asked: list[str] = []
        provider = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked.append(self.path)
                page = provider.pages.get(self.path)
                self.send_response(404 if page is None else 200 if isinstance(page, bytes) else page[0])
                if isinstance(page, tuple):
                    self.send_header("Location", page[1])
                self.end_headers()
                self.wfile.write(page if isinstance(page, bytes) else b"")

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        own.load_cert_chain(*authority.issue("provider", "127.0.0.1"))
        self.server.socket = own.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(LIMIT_S)


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    # Nothing here is about how fast this machine is.
    monkeypatch.setattr(jwks, "FETCH_S", LIMIT_S)
    made = Provider(tmp_path)
    yield made
    made.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key_page(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


async def test_a_set_behind_a_url_is_read_once_and_for_keys_it_lacks(provider: Provider) -> None:
    clock = Clock()
    provider.pages["/jwks"] = key_page(public(RSA, "rsa"))
    tokens = JwtTokens(settings(), UrlKeys(f"{provider.url}/jwks", ISSUER, context=provider.context, clock=clock))
    # Many at once share one read.
    assert all(await asyncio.gather(*(tokens.check(token(jti=str(i))) for i in range(20))))
    assert provider.asked == ["/jwks"]
    # A key that the set lacks is looked for once in ten seconds, however many ask.
    provider.pages["/jwks"] = key_page(public(RSA, "rsa"), public(OTHER_RSA, "new"))
    newer = token(OTHER_RSA, kid="new")
    assert await tokens.check(newer) is None
    clock.now += jwks.RETRY_S
    assert await tokens.check(newer) is not None
    for _ in range(20):
        assert await tokens.check(token(kid="nobody's")) is None
    assert len(provider.asked) == 2


async def test_an_old_set_is_read_anew_and_kept_while_the_provider_is_away(provider: Provider) -> None:
    clock = Clock()
    provider.pages["/jwks"] = key_page(public(RSA, "rsa"))
    keys = UrlKeys(f"{provider.url}/jwks", ISSUER, context=provider.context, clock=clock)
    tokens = JwtTokens(settings(), keys)
    made = token()
    assert await tokens.check(made) is not None
    for page in (None, b"<html>", key_page(*[]), b" " * (jwks.MAX_BYTES + 1), (302, f"{provider.url}/elsewhere")):
        provider.pages["/jwks"] = page
        clock.now += jwks.REFRESH_S + 1
        assert await tokens.check(made) is not None
        assert keys._reading is not None
        await asyncio.wait_for(keys._reading, LIMIT_S)
        assert await tokens.check(made) is not None
    assert "/elsewhere" not in provider.asked
    # The key is gone from the set: so are the tokens that it signed, once the set was read.
    provider.pages["/jwks"] = key_page(public(OTHER_RSA, "new"))
    clock.now += jwks.REFRESH_S + 1
    assert await tokens.check(made) is not None
    assert keys._reading is not None
    await asyncio.wait_for(keys._reading, LIMIT_S)
    assert await tokens.check(made) is None


async def test_without_a_first_set_nobody_can_tell(provider: Provider) -> None:
    clock = Clock()
    tokens = JwtTokens(settings(), UrlKeys(f"{provider.url}/jwks", ISSUER, context=provider.context, clock=clock))
    for _ in range(5):
        with pytest.raises(errors.Unavailable):
            await Credentials(None, tokens=tokens).identify(f"Bearer {token()}")
    assert len(provider.asked) == 1
    provider.pages["/jwks"] = key_page(*KEYS)
    clock.now += jwks.FIRST_RETRY_S
    assert await tokens.check(token()) is not None
    # A stranger's certificate is no provider.
    stranger = UrlKeys(f"{provider.url}/jwks", ISSUER, context=ssl.create_default_context())
    with pytest.raises(errors.Unavailable):
        await stranger.find("rsa")


async def test_a_provider_that_does_not_come_to_an_end_holds_up_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one more at each try: other work of the gateway needs threads, too."""
    monkeypatch.setattr(jwks, "FETCH_S", 0.01)
    monkeypatch.setattr(jwks, "SLACK_S", 0.01)
    clock, over, begun = Clock(), threading.Event(), []

    def fetch() -> jwks.KeySet:
        begun.append(threading.current_thread().name)
        over.wait(LIMIT_S)
        return parse_jwks(key_page(*KEYS))

    keys = UrlKeys("https://login.example/jwks", ISSUER, clock=clock)
    monkeypatch.setattr(keys, "_fetch", fetch)
    try:
        for _ in range(5):
            with pytest.raises(errors.Unavailable):
                await keys.find("rsa")
            clock.now += jwks.FIRST_RETRY_S
        assert len(begun) <= 1
    finally:
        over.set()
    monkeypatch.setattr(jwks, "FETCH_S", LIMIT_S)
    assert await keys.find("rsa")


async def test_discovery_names_the_set_and_must_be_the_issuers(provider: Provider) -> None:
    page = {"issuer": ISSUER, "jwks_uri": f"{provider.url}/keys"}
    provider.pages |= {"/keys": key_page(*KEYS), jwks.DISCOVERY: json.dumps(page).encode()}
    url = provider.url + jwks.DISCOVERY
    assert await UrlKeys(url, ISSUER, context=provider.context).find("rsa")
    for wrong in ({"issuer": "https://other.example"}, {"jwks_uri": "http://127.0.0.1/keys"}, {"jwks_uri": None}):
        provider.pages[jwks.DISCOVERY] = json.dumps(page | wrong).encode()
        with pytest.raises(errors.Unavailable):
            await UrlKeys(url, ISSUER, context=provider.context).find("rsa")


@pytest.mark.parametrize("url", ["http://127.0.0.1/jwks", "file:///etc/jwks", "ftp://x/y"])
def test_a_url_is_https(url: str) -> None:
    with pytest.raises(ValueError, match="https"):
        JwtTokens(settings(jwks=url))
