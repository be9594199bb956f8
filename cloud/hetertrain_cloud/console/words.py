"""How the console says things: sizes, rates and durations with their units, states with a tone."""

from __future__ import annotations

import re

from hetertrain_cloud.console.elements import Tone

_SIZES = ("bytes", "kB", "MB", "GB", "TB", "PB")
NODE_TONES: dict[str, Tone] = {
    "active": "good",
    "pending": "warning",
    "revoked": "bad",
    "decommissioned": "quiet",
}
JOB_TONES: dict[str, Tone] = {
    "running": "good",
    "starting": "busy",
    "paused": "warning",
    "stopped": "quiet",
    "completed": "good",
    "failed": "bad",
}

ALERT_TONES: dict[str, Tone] = {"critical": "bad", "warning": "warning", "info": "busy"}
ALERT_PICTURES = {"critical": "error", "warning": "warning", "info": "info"}
_DOING_TONES: dict[str, Tone] = {
    "training": "good",
    "collecting": "good",
    "flushing": "good",
    "holding": "busy",
    "joining": "busy",
    "not_eligible": "warning",
    "resting": "warning",
    "link_closed": "warning",
    "train_failed": "bad",
    "offline": "quiet",
}

_REFUSALS = (
    (r"Value error, (.+)", r"\1"),
    (r"Field required", "this is needed"),
    (r"String should match pattern .*", "characters that are not allowed here, or too many"),
    (r"String should have at (least|most) (\d+) characters?", r"at \1 \2 characters"),
    (
        r"(?:List|Dictionary|Tuple) should have at (least|most) (\d+) items?\b.*",
        r"at \1 \2 lines",
    ),
    (r"Input should be greater than or equal to (.+)", r"at least \1"),
    (r"Input should be less than or equal to (.+)", r"at most \1"),
    (r"Input should be greater than (.+)", r"more than \1"),
    (r"Input should be less than (.+)", r"less than \1"),
    (r"Input should be a valid (?:number|integer)\b.*", "write a number"),
    (r"Input should be (.+)", r"it should be \1"),
)
"""What a malformed request is refused for, and how forms say it."""


def doing_tone(doing: str) -> Tone:
    """Return how good it is what a node does."""
    return _DOING_TONES.get(doing, "busy")


def size(num_bytes: float | None) -> str:
    """Write a number of bytes, in powers of 1000."""
    if num_bytes is None:
        return "–"
    unit = 0
    while abs(num_bytes) >= 1000 and unit < len(_SIZES) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.3g} {_SIZES[unit]}" if unit else f"{num_bytes:.0f} bytes"


def rate(bits_per_second: float | None) -> str:
    """Write a link's rate."""
    if not bits_per_second:
        return "not measured yet"
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.3g} {unit}"
    return f"{bits_per_second:.0f} bit/s"


def duration(seconds: float | None) -> str:
    """Write how long something takes."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 172_800:
        return f"{seconds / 3600:.0f} hours"
    return f"{seconds / 86_400:.0f} days"


def many(count: int, noun: str, plural: str = "") -> str:
    """Write a count and what is counted."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"


def seen(page: int, page_rows: int, num: int) -> str:
    """Write which rows of a list are seen; page 0 is the first."""
    first = page * page_rows
    return f"{first + 1:,} to {first + num:,}" if num else "none"


def plain(code: str) -> str:
    """Write a code for people."""
    return code.replace("_", " ")


def refusal(message: str) -> str:
    """Say why an entry was refused; the API says it of a value, as programs see it."""
    for pattern, text in _REFUSALS:
        found = re.fullmatch(pattern, message, re.DOTALL)
        if found:
            return found.expand(text)
    return message


def sentence(text: str) -> str:
    """Write a text as a sentence of its own."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def labels_text(labels: dict[str, str]) -> str:
    """Write labels as they are edited: one a line."""
    return "\n".join(f"{key}={value}" for key, value in labels.items())


def read_labels(text: str) -> dict[str, str]:
    """Read labels, one a line.

    Raises:
        ValueError: a line is not KEY=VALUE.
    """
    labels = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        key, sign, value = line.partition("=")
        if not sign or not key.strip():
            raise ValueError(f"write KEY=VALUE, not {line!r}")
        labels[key.strip()] = value.strip()
    return labels
