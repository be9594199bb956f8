"""Settings of the parts: flag over environment over TOML file over default, and where each value
came from.

A part's settings are a frozen ``Settings`` class with a ``section``: its variables begin with
``HETERTRAIN_VEHICLE_``, its TOML table is ``[vehicle]``. What several parts share may be given
once, as ``HETERTRAIN_BROKER_HOST`` or in ``[common]``; the part's own wins.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from hetertrain.errors import SettingsError

PREFIX = "HETERTRAIN_"
DEFAULT_FILE = "hetertrain.toml"
SECRET_WORDS = ("password", "passphrase", "secret", "token", "database_url")
"""Settings that end so are secrets, of whichever part."""


class Settings(BaseModel):
    """Base of all settings: frozen, and unknown keys are errors. ``load`` collects them."""

    # A failed validation must not print a password among its inputs.
    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True
    )
    section: ClassVar[str] = "common"


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """Settings, and for each field where its value came from."""

    settings: S
    origins: dict[str, str]


@dataclass(frozen=True, slots=True)
class Given:
    """The values that were given before validation, and their origins."""

    values: dict[str, Any]
    origins: dict[str, str]


def load(settings_class: type[S], flags: Mapping[str, object], file: Path | None) -> Loaded[S]:
    """Collect and validate a part's settings.

    Raises:
        SettingsError: the file cannot be read, or a value is missing or wrong; the message names
            flag, variable and key.
    """
    found = given(settings_class, flags, file)
    try:
        settings = settings_class(**found.values)
    except ValidationError as error:
        raise SettingsError(_explain(settings_class, found.origins, error)) from error
    return Loaded(
        settings, {n: found.origins.get(n, "default") for n in settings_class.model_fields}
    )


def given(settings_class: type[Settings], flags: Mapping[str, object], file: Path | None) -> Given:
    """Collect what was given, by rising precedence, without validating it."""
    section = settings_class.section
    path = _file(file)
    tables = _read(path)
    stray = sorted(key for key, table in tables.items() if not isinstance(table, dict))
    if stray:
        raise SettingsError(f"{', '.join(stray)} in {path} must be in a table, as [{section}]")
    _check_keys(settings_class, tables.get(section, {}), path)
    known = settings_class.model_fields
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for table in ("common", section):
        for name, value in tables.get(table, {}).items():
            if name in known:
                values[name] = value
                origins[name] = f"file {path} [{table}]"
    for prefix in (PREFIX, f"{PREFIX}{section.upper()}_"):
        for name, info in known.items():
            variable = f"{prefix}{name.upper()}"
            text = os.environ.get(variable)
            if text:
                values[name] = _parts(name, text, get_origin(info.annotation))
                origins[name] = f"environment {variable}"
    for name, value in flags.items():
        values[name] = value
        origins[name] = f"flag {flag_name(name)}"
    return Given(values, origins)


def read_text(path: Path, what: str) -> str:
    """Return the text of a file that somebody named.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {what} {path}: {error}") from error


def flag_name(field: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + field.replace("_", "-")


def variable_name(settings_class: type[Settings], field: str) -> str:
    """Return the environment variable of a field."""
    return f"{PREFIX}{settings_class.section}_{field}".upper()


def is_secret(info: FieldInfo) -> bool:
    """Tell whether a field holds a secret: it is shown masked, and has no flag, since others can
    read argv.
    """
    return SecretStr in (info.annotation, *get_args(info.annotation))


def forget_secrets(settings_class: type[Settings]) -> None:
    """Remove secrets from the environment, so that no process that is started from now on has them.
    Settings that are loaded keep theirs.
    """
    secrets = {name for name, info in settings_class.model_fields.items() if is_secret(info)}
    endings = tuple(f"_{word.upper()}" for word in (*secrets, *SECRET_WORDS))
    for variable in list(os.environ):
        if variable.startswith(PREFIX) and variable.endswith(endings):
            del os.environ[variable]


def add_flags(parser: argparse.ArgumentParser, settings_class: type[Settings]) -> None:
    """Add one flag per field; a flag that is not used is absent from the namespace."""
    for name, info in settings_class.model_fields.items():
        if is_secret(info):
            continue
        help_text = info.description or ""
        if not info.is_required() and info.default not in (None, {}, ()):
            help_text += f" (default: {info.default})"
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text}
        if info.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(info.annotation) is dict:
            options |= {"action": "append", "metavar": "KEY=VALUE"}
        elif get_origin(info.annotation) is tuple:
            options |= {"action": "append", "metavar": "TEXT"}
        else:
            options["metavar"] = name.rsplit("_", 1)[-1].upper()
        parser.add_argument(flag_name(name), **options)


def flags_of(namespace: argparse.Namespace, settings_class: type[Settings]) -> dict[str, object]:
    """Return the flags that were used.

    Raises:
        SettingsError: a ``key=value`` flag has no ``=``.
    """
    flags: dict[str, object] = {}
    for name, info in settings_class.model_fields.items():
        if not hasattr(namespace, name):
            continue
        value = getattr(namespace, name)
        flags[name] = _pairs(name, value) if get_origin(info.annotation) is dict else value
    return flags


def _parts(name: str, text: str, kind: object) -> Any:
    """Return what a variable says of a field whose annotation is of this kind."""
    if kind is dict:
        return _pairs(name, text.split(","))
    return tuple(text.split(";")) if kind is tuple else text


def _pairs(name: str, texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if not all(separator for _, separator, _ in pairs):
        raise SettingsError(f"{name} takes KEY=VALUE, got {' '.join(texts)}")
    return {key: value for key, _, value in pairs}


def _file(file: Path | None) -> Path | None:
    if file is not None:
        return file
    named = os.environ.get(f"{PREFIX}CONFIG")
    if named:
        return Path(named)
    return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None


def _read(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read the settings file {path}: {error}") from error


def _check_keys(
    settings_class: type[Settings], table: Mapping[str, Any], path: Path | None
) -> None:
    for name in table.keys() - settings_class.model_fields.keys():
        close = difflib.get_close_matches(name, settings_class.model_fields, 1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise SettingsError(f"unknown key {name} in [{settings_class.section}] of {path}{hint}")


def _explain(
    settings_class: type[Settings], origins: Mapping[str, str], error: ValidationError
) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    if not first["loc"]:
        return f"{settings_class.section}: {first['msg']}"
    field = str(first["loc"][0])
    if first["type"] == "missing":
        is_flag = not is_secret(settings_class.model_fields[field])
        flag = f"{flag_name(field)}, " if is_flag else ""
        return (
            f"{settings_class.section} needs {field}: give {flag}"
            f"{variable_name(settings_class, field)}, or {field} in [{settings_class.section}] "
            f"of {DEFAULT_FILE}"
        )
    return f"{field} (from {origins.get(field, 'default')}): {first['msg']}"
