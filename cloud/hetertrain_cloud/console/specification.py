"""A job's specification as a form and as TOML: what can be set stands in the API's JSON schema.

Three forms of the same: ``Specification``, what the API takes; ``Entries``, what stands in the
fields; and a TOML text. What is left empty is not in it, and has its default.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hetertrain_cloud.console import words
from hetertrain_cloud.console.client import ApiClient

TEXT_CHARACTERS_MAX = 60_000
"""The API takes no more than 64 KiB."""
SHOWN_BOUND_MAX = 1_000_000
"""A bound beyond is one of machines, and tells people nothing."""
SECTIONS = (
    (
        "What is trained",
        "The task is code that each node has installed; it says what the model is.",
        ("task", "eligible_labels"),
    ),
    (
        "When vehicles train and send",
        "One rule a line, and all must hold: SIGNAL SIGN VALUE, joined by 'or' where one of "
        "several suffices. Signals are named as in the Vehicle Signal Specification; beside them "
        "there are network and time.",
        ("train_when", "send_when"),
    ),
    (
        "When it ends",
        "Where nothing is set it goes on until it is stopped.",
        ("max_versions", "stop_when"),
    ),
    (
        "How it merges",
        "A scheme sets everything at once; sap is Heter-Train's own. What is left empty is as the "
        "scheme has it, which stands there in grey.",
        ("policy",),
    ),
)
"""Title, explanation and options of each part; options that stand in none come under more."""

Specification = dict[str, Any]
Entries = Mapping[str, str | bool]
Kind = Literal["text", "whole", "number", "choice", "switch", "lines", "pairs"]


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be set."""

    name: str
    kind: Kind
    description: str
    bounds: str
    example: str
    default: str | bool
    choices: tuple[str, ...] = ()
    is_required: bool = False

    @property
    def label(self) -> str:
        """Its name, for people."""
        return words.plain(self.name).capitalize()


@dataclass(frozen=True, slots=True)
class Form:
    """What can be set, by name."""

    options: dict[str, Option]
    presets: dict[str, dict[str, float | None]]
    """What each scheme has where nothing is set; None: never."""

    def unset(self, name: str, scheme: str) -> str:
        """Say what an option is under a scheme where it is not set; empty: that is not known."""
        preset = self.presets.get(scheme, {})
        if name not in preset:
            return ""
        value = preset[name]
        return "never" if value is None else f"{value:.6g}"


async def form_of(api: ApiClient) -> Form:
    """Ask what can be set.

    Raises:
        ProblemAnswer: the API refused.
    """
    found = await api.get("/job-schema")
    return Form(options_of(found["specification"]), found["presets"])


def options_of(schema: Mapping[str, Any]) -> dict[str, Option]:
    """Return what a JSON schema lets set, by name."""
    required = schema.get("required", ())
    return {
        name: _option(name, field, is_required=name in required)
        for name, field in schema["properties"].items()
    }


def entries_of(specification: Specification, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return what stands in the fields for a specification."""
    return {
        name: _entry(option.kind, specification.get(name), option.default)
        for name, option in options.items()
    }


def read_entries(
    entries: Entries, options: Mapping[str, Option]
) -> tuple[Specification, dict[str, str]]:
    """Return the specification that stands in the fields, and what is wrong with which."""
    specification: Specification = {}
    errors: dict[str, str] = {}
    for name, option in options.items():
        entry = entries.get(name, "")
        try:
            value = _value(option.kind, entry)
        except ValueError as error:
            errors[name] = str(error)
            continue
        if option.is_required and value is None:
            errors[name] = "this is needed"
        elif value is not None and entry != option.default:
            specification[name] = value
    return specification, errors


def write_toml(specification: Specification) -> str:
    """Write a specification as TOML, an option a line."""
    return "".join(
        f"{name} = {_toml(specification[name])}\n"
        for name in in_order(specification)
        if specification[name] is not None
    )


def read_toml(text: str) -> Specification:
    """Read a specification written as TOML.

    Raises:
        ValueError: it is no TOML, or holds what no option takes; the message names the line where
            it can.
    """
    if len(text) > TEXT_CHARACTERS_MAX:
        raise ValueError(f"at most {TEXT_CHARACTERS_MAX:,} characters")
    try:
        found = tomllib.loads(text)
        json.dumps(found, allow_nan=False)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except tomllib.TOMLDecodeError:
        raise
    except (TypeError, ValueError):
        raise ValueError("no option takes a date, a time, nan or inf") from None
    return found


def line_of(text: str, name: str) -> int | None:
    """Return the line of a TOML text that sets an option; None: no line does."""
    pattern = re.compile(rf"""\s*(\[\s*)?["']?{re.escape(name)}["']?\s*[=.\]]""")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return number
    return None


def refusals(errors: Sequence[tuple[str, str]], first: str = "") -> dict[str, str]:
    """Return what the API found wrong, by option; ``first``: what has no option of its own."""
    found: dict[str, str] = {}
    for where, message in errors:
        parts = [part for part in where.split(".") if part not in ("body", "specification")]
        name = parts[0] if parts else first
        text = words.refusal(message)
        found[name] = f"{found[name]}; {text}" if name in found else text
    return found


def without_defaults(specification: Specification, options: Mapping[str, Option]) -> Specification:
    """Return only what is set otherwise than by default."""
    return {
        name: specification[name]
        for name in in_order(specification)
        if name not in options
        or _entry(options[name].kind, specification[name], options[name].default)
        != options[name].default
    }


def in_order(names: Iterable[str]) -> list[str]:
    """Put options in the order of the form."""
    placed = [name for _, _, of_section in SECTIONS for name in of_section]
    return sorted(names, key=lambda name: placed.index(name) if name in placed else len(placed))


def written(value: object) -> list[str]:
    """Write an option's value for people, a line each."""
    match value:
        case bool():
            return ["yes" if value else "no"]
        case dict():
            return [f"{key}={text}" for key, text in value.items()]
        case list():
            return [str(item) for item in value]
        case float():
            return [f"{value:.12g}"]
        case _:
            return [str(value)]


def _option(name: str, field: Mapping[str, Any], *, is_required: bool) -> Option:
    types = [part for part in field.get("anyOf", [field]) if part.get("type") != "null"]
    kind = _kind(types[0])
    example = next(iter(field.get("examples", ())), None)
    return Option(
        name=name,
        kind=kind,
        description=words.sentence(field.get("description", "")),
        bounds=_bounds(types[0]),
        example="" if example is None else str(_entry(kind, example, "")),
        default=_entry(kind, field.get("default"), False if kind == "switch" else ""),
        choices=tuple(map(str, types[0].get("enum", ()))),
        is_required=is_required,
    )


def _kind(field: Mapping[str, Any]) -> Kind:
    if "enum" in field:
        return "choice"
    kinds: dict[str, Kind] = {
        "boolean": "switch",
        "integer": "whole",
        "number": "number",
        "array": "lines",
        "object": "pairs",
    }
    return kinds.get(field.get("type", ""), "text")


def _bounds(field: Mapping[str, Any]) -> str:
    texts = {
        "exclusiveMinimum": "more than {:,g}",
        "minimum": "at least {:,g}",
        "exclusiveMaximum": "less than {:,g}",
        "maximum": "at most {:,g}",
        "maxItems": "at most {:,g} lines",
        "maxProperties": "at most {:,g} lines",
    }
    found = [text.format(field[key]) for key, text in texts.items() if _tells(field.get(key))]
    return words.sentence(", ".join(found)) if found else ""


def _tells(bound: float | None) -> bool:
    return bound is not None and abs(bound) < SHOWN_BOUND_MAX


def _entry(kind: Kind, value: Any, default: str | bool) -> str | bool:
    """Write a value as it stands in its field."""
    if value is None:
        return default
    if kind == "switch":
        return value is True
    if kind == "pairs" and isinstance(value, dict):
        return words.labels_text(value)
    if kind == "lines" and isinstance(value, (list, tuple)):
        return "\n".join(map(str, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _value(kind: Kind, entry: str | bool) -> Any:
    """Read what stands in a field; None: nothing.

    Raises:
        ValueError: it cannot be what the field is for.
    """
    if isinstance(entry, bool):
        return entry
    text = entry.strip()
    if not text:
        return None
    match kind:
        case "whole":
            return _number(int, text, "write a whole number")
        case "number":
            return _number(float, text, "write a number")
        case "lines":
            return [line.strip() for line in text.splitlines() if line.strip()]
        case "pairs":
            return words.read_labels(text)
        case _:
            return text


def _number(read: type[int] | type[float], text: str, help_text: str) -> float:
    try:
        number = read(text)
    except ValueError:
        raise ValueError(help_text) from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(help_text)
    return number


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case dict():
            pairs = ", ".join(f"{_key(str(key))} = {_toml(item)}" for key, item in value.items())
            return f"{{ {pairs} }}" if pairs else "{}"
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            # TOML's basic strings are JSON's, but for DEL, which stands escaped.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _toml(text)
