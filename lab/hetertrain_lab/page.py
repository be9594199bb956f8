"""What the lab's pages are made of: plots, tables, and one HTML file without external parts."""

from __future__ import annotations

import base64
from collections.abc import Callable
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from rich.table import Table
from rich.text import Text

BLUE, ORANGE, GREEN, GREY = "#0b6bcb", "#d9730d", "#2f8f5b", "#7a828c"
STYLE = {
    "figure.dpi": 150,
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b8bec6",
    "axes.labelcolor": "#39424e",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "xtick.color": "#39424e",
    "ytick.color": "#39424e",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8ebef",
}

Rows = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""A table: its title, its header, its rows."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ --ink: #1d252e; --soft: #5b6672; --line: #dfe3e8; --page: #f6f7f9; --card: #fff; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8ebee; --soft: #9aa5b1; --line: #333c46; --page: #14181d; --card: #1d2329; }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  margin: 0; }}
main {{ max-width: 1000px; margin: 0 auto; padding: 24px 16px 64px; }}
h1 {{ font-size: 24px; margin: 8px 0 2px; }}
h2 {{ font-size: 17px; margin: 0 0 10px; }}
p {{ color: var(--soft); margin: 4px 0; }}
section {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 20px; margin-top: 18px; overflow-x: auto; }}
.figures {{ display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }}
.figures div {{ color: var(--soft); }}
.figures b {{ display: block; font-size: 26px; color: var(--ink); }}
.pair {{ display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); }}
img {{ width: 100%; height: auto; border-radius: 6px; background: #fff; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; }}
th, td {{ text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ color: var(--soft); font-weight: 600; }}
</style></head><body><main>{body}</main></body></html>
"""


def draw(paint: Callable[[Any], None], size: tuple[float, float]) -> bytes:
    """Draw on axes of ``size`` inches; return a PNG."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]  # its keys are a long union of literals
        figure, axes = plt.subplots(figsize=size)
        paint(axes)
        figure.tight_layout()
        buffer = BytesIO()
        figure.savefig(buffer, format="png")
        plt.close(figure)
    return buffer.getvalue()


def write_page(path: Path, title: str, parts: list[str]) -> None:
    """Write a page of parts that are HTML already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(parts)
    path.write_text(_PAGE.format(title=escape(title), body=body), encoding="utf-8")


def image(png: bytes, text: str) -> str:
    """Return a PNG as HTML; ``text`` is for those who do not see it."""
    encoded = base64.b64encode(png).decode()
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{encoded}">'


def section(rows: Rows) -> str:
    """Return a table as HTML."""
    title, header, lines = rows
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines)
    body = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<section><h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table></section>"


def markdown(rows: Rows) -> str:
    """Return a table for documents."""
    title, header, lines = rows
    rule = ["---", *("---:" for _ in header[1:])]
    cells = (header, rule, *lines)
    return "\n".join((f"### {title}", "", *(f"| {' | '.join(line)} |" for line in cells), ""))


def terminal_table(rows: Rows) -> Table:
    """Return a table for a terminal; what it says is text, never markup."""
    title, header, lines = rows
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(Text(name), justify="left" if index == 0 else "right")
    for line in lines:
        table.add_row(*map(Text, line))
    return table
