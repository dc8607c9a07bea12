"""`load_settings`: flags, environment and file into one validated settings object, or exit code 2 with the reason."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import CliSettingsSource, SettingsError

from kvmesh.config.base import ServiceSettings, _file_values

S = TypeVar("S", bound=ServiceSettings)

MAX_CONFIG_BYTES = 1 << 20


class ConfigError(ValueError):
    """A setting is wrong; the text names the setting, never a secret's value."""


def load_settings(cls: type[S], argv: Sequence[str] | None = None) -> S:
    """Build `cls` from `argv` (default `sys.argv[1:]`), the environment and the `--config` file.

    Prints what is wrong and exits with status 2 on any invalid value; `--help` prints every setting and exits 0.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    prog = f"kvmesh-{cls.service}" if cls.service else "kvmesh"
    try:
        return build_settings(cls, args, prog=prog)
    except ConfigError as exc:
        print(f"{prog}: {exc}", file=sys.stderr)
        raise SystemExit(2) from None


def build_settings(cls: type[S], args: Sequence[str], *, prog: str = "kvmesh") -> S:
    """Like `load_settings`, but raises ConfigError (argparse itself still exits on `--help` and unknown flags)."""
    token = _file_values.set(_read_file(cls, _config_path(cls, args)))
    try:
        cli: CliSettingsSource[Any] = CliSettingsSource(cls, cli_prog_name=prog, cli_parse_args=list(args))
        return cls(_cli_settings_source=cli)  # type: ignore[call-arg]
    except ValidationError as exc:
        raise ConfigError(_explain(exc)) from None
    except SettingsError as exc:
        raise ConfigError(str(exc)) from None
    finally:
        _file_values.reset(token)


def _config_path(cls: type[ServiceSettings], args: Sequence[str]) -> Path | None:
    """The file must be known before the other sources are read, so `--config` is looked up by hand."""
    for index, arg in enumerate(args):
        if arg == "--config" and index + 1 < len(args):
            return Path(args[index + 1])
        if arg.startswith("--config="):
            return Path(arg.removeprefix("--config="))
    for name in (f"KVMESH_{cls.service.upper()}_CONFIG", "KVMESH_CONFIG"):
        if os.environ.get(name):
            return Path(os.environ[name])
    return None


def _read_file(cls: type[ServiceSettings], path: Path | None) -> dict[str, Any]:
    """Top-level keys are shared by the services of the file; a table named after a service goes first for it."""
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"cannot read --config {path}: {exc.strerror}") from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"--config {path}: larger than {MAX_CONFIG_BYTES} bytes")
    try:
        document = tomllib.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"--config {path}: {exc}") from None

    services = _all_settings(ServiceSettings)
    tables = {sub.service for sub in services if sub.service}
    known_somewhere = {name for sub in services for name in sub.model_fields}
    shared: dict[str, Any] = {}
    for key, value in document.items():
        if key in tables:
            continue
        if key in cls.model_fields:
            shared[key] = value
        elif key not in known_somewhere:
            raise ConfigError(f'--config {path}: "{key}" is no setting of any service')
    own = document.get(cls.service, {})
    if not isinstance(own, dict):
        raise ConfigError(f'--config {path}: "{cls.service}" must be a table')
    for key in own:
        if key not in cls.model_fields:
            raise ConfigError(f'--config {path}: "{key}" is no setting of {cls.service}')
    merged = _merge(shared, own)
    merged.pop("config", None)
    return merged


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _all_settings(root: type[ServiceSettings]) -> list[type[ServiceSettings]]:
    import kvmesh.config.services  # noqa: F401  (its classes must exist before they are listed)

    found = [root]
    for sub in root.__subclasses__():
        found.extend(_all_settings(sub))
    return found


def _explain(exc: ValidationError) -> str:
    """One line a setting, by the name of its flag; inputs are left out since one may be a secret typed by mistake."""
    lines = []
    for error in exc.errors(include_input=False, include_url=False, include_context=False):
        flag = ".".join(str(part).replace("_", "-") for part in error["loc"])
        message = error["msg"].removeprefix("Value error, ")
        lines.append(f"--{flag}: {message}" if flag else message)
    return "invalid settings\n  " + "\n  ".join(lines)
