"""How the operator's commands answer: tables for people, JSON for machines."""

from __future__ import annotations

import json
import sys
from typing import Any

Row = dict[str, Any]
PIPED_COLUMNS = 200
"""The width of tables that go to a file."""


def print_json(value: object) -> None:
    """Print for machines."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_table(
    rows: list[Row], columns: tuple[str, ...], empty: str = "nothing there yet"
) -> None:
    """Print a list, or what an empty one means; a column is the path of a field, with dots."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column.rpartition(".")[2].replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(escape(_text(_field(row, column))) for column in columns))
    console = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
    console.print(table if rows else empty)


def print_fields(row: Row) -> None:
    """Print one thing, a field a line."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in row.items():
        table.add_row(name.replace("_", " "), escape(_text(value)))
    Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS).print(table)


def _field(row: Row, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = None if value is None else value.get(name)
    return value


def _text(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case dict():
            given = {key: each for key, each in value.items() if each is not None}
            return ", ".join(f"{key}={_text(each)}" for key, each in given.items()) or "-"
        case list():
            return ", ".join(_text(each) for each in value[:20])
        case _:
            return str(value)
