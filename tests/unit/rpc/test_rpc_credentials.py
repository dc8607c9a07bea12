"""API keys: look-up, policy, reload, and files that are broken."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvmesh import errors
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc import Credentials, hash_key, new_key
from kvmesh.rpc.credentials import Policy


def toml(*keys: tuple[str, str], extra: str = "") -> str:
    lines = [f'[[keys]]\nsha256 = "{hash_key(key)}"\ntenant = "{tenant}"\n' for key, tenant in keys]
    return "\n".join(lines) + extra


def test_keys_are_long_and_differ() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("kvm-") and len(key) > 40 for key in keys)


async def test_without_a_source_everybody_is_local() -> None:
    store = Credentials(None)
    assert store.open
    for header in (None, "", "Bearer whatever"):
        principal = await store.identify(header)
        assert (principal.tenant, principal.policy.cache) == ("local", "semantic")


async def test_lookup_gives_tenant_and_policy(tmp_path: Path) -> None:
    acme, other = new_key(), new_key()
    path = tmp_path / "keys.toml"
    policy = '\n[tenants.acme]\ncache = "exact"\ntau = 0.9\nmodels = ["m"]\nmax_tokens = 5\nmax_concurrent = 2\n'
    path.write_text(toml((acme, "acme"), (other, "other"), extra=policy))
    store = Credentials(path)
    found = await store.identify(f"bearer  {acme} ")
    assert (found.tenant, found.policy.cache, found.policy.tau) == ("acme", "exact", 0.9)
    assert (found.policy.max_tokens, found.policy.max_concurrent) == (5, 2)
    found.policy.check_model("m")
    with pytest.raises(errors.PermissionDenied):
        found.policy.check_model("n")
    plain = await store.identify(f"Bearer {other}")
    assert plain.tenant == "other"
    assert plain.policy.allows("anything")


@pytest.mark.parametrize("make", [
    lambda key: None,
    lambda key: "",
    lambda key: key,
    lambda key: f"Basic {key}",
    lambda key: f"Bearer {key}x",
    lambda key: f"Bearer {key[:-1]}",
    lambda key: f"Bearer {hash_key(key)}",
    lambda key: "Bearer " + "x" * 10_000,
    lambda key: "Bearer \ud800",
])  # fmt: skip
async def test_everything_else_is_unauthenticated_with_one_message(tmp_path: Path, make) -> None:
    key = new_key()
    path = tmp_path / "keys.toml"
    path.write_text(toml((key, "acme")))
    with pytest.raises(errors.Unauthenticated) as got:
        await Credentials(path).identify(make(key))
    assert got.value.message == "a valid API key is needed: authorization: Bearer <key>"


async def test_json_and_expiry(tmp_path: Path) -> None:
    live, dead = new_key(), new_key()
    path = tmp_path / "keys.json"
    keys = [
        {"sha256": hash_key(live), "tenant": "a", "name": "ci", "expires": "2999-01-01T00:00:00Z"},
        {"sha256": hash_key(dead), "tenant": "a", "expires": "2001-01-01T00:00:00"},
    ]
    path.write_text(json.dumps({"keys": keys}))
    store = Credentials(path)
    assert (await store.identify(f"Bearer {live}")).key_name == "ci"
    with pytest.raises(errors.Unauthenticated):
        await store.identify(f"Bearer {dead}")


async def test_a_new_file_is_taken_and_a_broken_one_is_not(tmp_path: Path, caplog) -> None:
    first, second = new_key(), new_key()
    path = tmp_path / "keys.toml"
    path.write_text(toml((first, "one")))
    store = Credentials(path, interval_s=0.0)
    assert (await store.identify(f"Bearer {first}")).tenant == "one"

    path.write_text(toml((second, "two")))
    assert (await store.identify(f"Bearer {second}")).tenant == "two"
    with pytest.raises(errors.Unauthenticated):
        await store.identify(f"Bearer {first}")

    with caplog.at_level(logging.ERROR):
        path.write_text(f'keys = [ "{first}" ')
        for _ in range(3):
            assert (await store.identify(f"Bearer {second}")).tenant == "two"
        path.unlink()
        for _ in range(3):
            assert (await store.identify(f"Bearer {second}")).tenant == "two"
    told = [r for r in caplog.records if r.levelno == logging.ERROR and r.name.startswith("kvmesh.rpc")]
    assert len(told) == 2
    assert first not in caplog.text

    path.write_text(toml((first, "three")))
    assert (await store.identify(f"Bearer {first}")).tenant == "three"


@pytest.mark.parametrize(
    "content",
    [
        "keys = 3",
        '[[keys]]\nsha256 = "abc"\ntenant = "a"\n',
        '[[keys]]\nsha256 = "' + "0" * 64 + '"\ntenant = "../a"\n',
        '[[keys]]\nsha256 = "' + "0" * 64 + '"\ntenant = "a"\ntypo = 1\n',
        toml(("k", "a"), ("k", "b")),
        '[tenants.a]\ncache = "always"\n',
        "[tenants.a]\ntau = 1.5\n",
    ],
)
def test_a_broken_first_file_stops_the_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(content)
    with pytest.raises(ValueError):  # noqa: PT011
        Credentials(path)
    with pytest.raises(OSError):  # noqa: PT011
        Credentials(tmp_path / "nowhere.toml")


CONTROLS: list[tuple[str, dict[str, Any]]] = [
    ("no_cache", {"no_cache": True}),
    ("only_if_cached", {"only_if_cached": True}),
    ("max_age", {"max_age_s": 0}),
    ("tau", {"tau": 0.99}),
]


@pytest.mark.parametrize(("right", "fields"), CONTROLS)
def test_cache_controls_are_rights(right: str, fields: dict[str, Any]) -> None:
    control = pb.CacheControl(**fields)
    Policy().check_controls(control)
    Policy(cache_controls=(right,)).check_controls(control)  # type: ignore[arg-type]
    others = tuple(name for name, _ in CONTROLS if name != right)
    with pytest.raises(errors.PermissionDenied) as refused:
        Policy(cache_controls=others).check_controls(control)  # type: ignore[arg-type]
    assert refused.value.details["field"] == f"cache_control.{next(iter(fields))}"
    # Whoever has no rights can still keep an answer to itself.
    Policy(cache_controls=()).check_controls(pb.CacheControl(no_store=True))
    Policy(cache_controls=()).check_controls(pb.CacheControl())


def test_a_request_may_only_be_stricter_than_its_tenant() -> None:
    policy = Policy(tau=0.95)
    for tau in (0.95, 0.96, 1.0):
        policy.check_controls(pb.CacheControl(tau=tau))
    for tau in (0.0, 0.5, 0.9499, -1.0):
        with pytest.raises(errors.InvalidArgument, match="tau") as refused:
            policy.check_controls(pb.CacheControl(tau=tau))
        assert refused.value.details["field"] == "cache_control.tau"


@pytest.mark.parametrize(
    "line", ['cache_scope = "world"', 'cache_controls = ["everything"]', 'cache_controls = "tau"', "tau = nan"]
)
def test_a_policy_of_the_cache_is_checked(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f"[tenants.a]\n{line}\n")
    with pytest.raises(ValueError):  # noqa: PT011
        Credentials(path)
    path.write_text('[tenants.a]\ncache_scope = "user"\ncache_controls = ["tau"]\n')
    Credentials(path)
