"""How far long work is, on standard error: a bar in a terminal, else a line for each tenth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def track(title: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show how far something is; call what it yields with how much of ``total`` is done."""
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    if not console.is_terminal:
        yield _lines(title, total)
        return
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


def _lines(title: str, total: float) -> Callable[[float], None]:
    told = 0

    def tell(done: float) -> None:
        nonlocal told
        tenths = int(10 * done / total)
        if tenths > told:
            told = tenths
            sys.stderr.write(f"{title}: {10 * tenths} %\n")

    return tell
