"""Settings: where values come from, what is refused and how, and that help documents everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from kvmesh.config import (
    ConfigError,
    DecodeSettings,
    GatewaySettings,
    KvTransferSettings,
    PrefillSettings,
    RouterSettings,
    ServiceSettings,
    WorkerSettings,
    build_settings,
    load_settings,
    split_host_port,
)

ALL = [GatewaySettings, RouterSettings, WorkerSettings, PrefillSettings, DecodeSettings, KvTransferSettings]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("KVMESH_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_defaults_are_valid_and_every_field_is_described(cls: type[ServiceSettings]) -> None:
    cls()
    for name, info in cls.model_fields.items():
        assert info.description, name


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_help_documents_every_setting(cls: type[ServiceSettings], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        load_settings(cls, ["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, info in cls.model_fields.items():
        group = info.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            assert " ".join((group.__doc__ or "").replace("`", "").split()) in text.replace("`", "")
            nested = {f"{name}.{inner}": found for inner, found in group.model_fields.items()}
        else:
            nested = {name: info}
        for flag, found in nested.items():
            assert f"--{flag.replace('_', '-')}" in text
            assert " ".join(str(found.description).split()) in text
    assert "--tls.require-client-cert" in text


def test_order_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text('drain_timeout_s = 1\nlog_level = "debug"\n[gateway]\ndrain_timeout_s = 2\n')
    args = ["--config", str(file)]

    def drain(cls: type[ServiceSettings], *more: str) -> float:
        return build_settings(cls, [*args, *more]).drain_timeout_s

    assert build_settings(GatewaySettings, []).drain_timeout_s == 30
    assert (drain(GatewaySettings), drain(RouterSettings)) == (2, 1)
    assert build_settings(RouterSettings, args).log_level == "debug"
    monkeypatch.setenv("KVMESH_DRAIN_TIMEOUT_S", "3")
    assert (drain(GatewaySettings), drain(RouterSettings)) == (3, 3)
    monkeypatch.setenv("KVMESH_GATEWAY_DRAIN_TIMEOUT_S", "4")
    assert (drain(GatewaySettings), drain(RouterSettings)) == (4, 3)
    assert drain(GatewaySettings, "--drain-timeout-s", "5") == 5
    assert GatewaySettings(drain_timeout_s=6).drain_timeout_s == 6


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text('[kvtransfer]\nlease_s = 9.0\ntransports = ["fake"]\n[kvtransfer.tls]\nca = "ca.pem"\n')
    monkeypatch.setenv("KVMESH_CONFIG", str(file))
    settings = build_settings(KvTransferSettings, [])
    assert (settings.lease_s, settings.transports, settings.tls.ca) == (9.0, ["fake"], Path("ca.pem"))
    assert build_settings(RouterSettings, []).tls.ca is None


def test_nested_values_and_lists_come_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_TLS__CERT", "shared.pem")
    monkeypatch.setenv("KVMESH_GATEWAY_TLS__KEY", "own.key")
    monkeypatch.setenv("KVMESH_GATEWAY_ROUTERS", "a:1, b:2")
    settings = build_settings(GatewaySettings, ["--tls.ca", "ca.pem"])
    assert (settings.tls.cert, settings.tls.key, settings.tls.ca) == (
        Path("shared.pem"),
        Path("own.key"),
        Path("ca.pem"),
    )
    assert settings.routers == ["a:1", "b:2"]
    assert build_settings(GatewaySettings, ["--routers", "c:3,d:4"]).routers == ["c:3", "d:4"]
    assert build_settings(GatewaySettings, ["--routers", "c:3", "--routers", "d:4"]).routers == ["c:3", "d:4"]


@pytest.mark.parametrize(
    ("cls", "args", "says"),
    [
        (GatewaySettings, ["--listen", "nonsense"], "--listen: expected"),
        (GatewaySettings, ["--listen", "h:70000"], "--listen: the port"),
        (GatewaySettings, ["--routers", "a:0"], "--routers"),
        (GatewaySettings, ["--ttft-limit-s", "-1"], "--ttft-limit-s"),
        (GatewaySettings, ["--ttft-limit-s", "soon"], "--ttft-limit-s"),
        (GatewaySettings, ["--trace-sample-ratio", "nan"], "--trace-sample-ratio"),
        (GatewaySettings, ["--tls.cert", "a"], "set together"),
        (GatewaySettings, ["--no-such-flag", "1"], "no-such-flag"),
        (GatewaySettings, ["--log-level", "loud"], "log-level"),
        (GatewaySettings, ["--config", "/nonexistent.toml"], "cannot read"),
        (RouterSettings, ["--redis-url", "redis://u:hunter2@h/0"], "--redis-url: a password does not belong"),
        (DecodeSettings, ["--device", "tpu"], "--device"),
        (DecodeSettings, ["--chunk-size", "1000", "--token-budget", "10"], "chunk_size"),
        (KvTransferSettings, ["--transports", "carrier-pigeon"], "carrier-pigeon"),
        (KvTransferSettings, ["--lease-s", "0.5"], "lease_s must be longer"),
    ],
)
def test_invalid_values_exit_2_and_say_which(cls, args: list[str], says: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        load_settings(cls, args)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert says in message
    assert "hunter2" not in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("typo_s = 1\n", '"typo_s" is no setting of any service'),
        ("[router]\nroute_timeout_ms = 1\n", "no setting of router"),
        ("router = 1\n", "must be a table"),
        ("listen = \n", "Invalid value"),
        ("x" * (2 << 20), "larger than"),
        ("log_level = 3\n", "--log-level"),
    ],
)
def test_files_are_checked(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=says):
        build_settings(RouterSettings, ["--config", str(file)])


def test_a_file_for_the_whole_mesh_serves_each(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("page_size = 32\nroute_timeout_ms = 50\n[decode]\nmax_batch = 4\n[router]\nalternates = 1\n")
    args = ["--config", str(file)]
    assert build_settings(GatewaySettings, args).route_timeout_ms == 50
    assert (build_settings(DecodeSettings, args).page_size, build_settings(DecodeSettings, args).max_batch) == (32, 4)
    assert build_settings(PrefillSettings, args).max_batch == 32
    assert build_settings(RouterSettings, args).alternates == 1


def test_roles_and_derived_values() -> None:
    assert (PrefillSettings().role, DecodeSettings().role, WorkerSettings().role) == ("prefill", "decode", "unified")
    assert DecodeSettings(page_size=64).local_prefill_tokens == 64
    assert DecodeSettings(local_prefill_threshold=0).local_prefill_tokens == 0
    assert DecodeSettings(instance="d1").instance_name == "d1"
    assert str(os.getpid()) in DecodeSettings().instance_name


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        GatewaySettings().listen = "127.0.0.1:1"  # type: ignore[misc]


def test_split_host_port() -> None:
    assert split_host_port("[::1]:5") == ("[::1]", 5)
    for bad in ("", "x", ":5", "h:", "h:x", "::1:5", "[::1:5", "h:-1", "h:٣"):
        with pytest.raises(ValueError, match=r"."):
            split_host_port(bad)


def test_ground_floor_modules_load_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, kvmesh.config, kvmesh.telemetry, kvmesh.rpc; "
        "print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'opentelemetry.sdk') "
        "or m.startswith(('kvmesh.engine', 'kvmesh.kv', 'opentelemetry.sdk'))])"
    )
    libs = Path(__file__).parents[3] / "libs"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(libs)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
