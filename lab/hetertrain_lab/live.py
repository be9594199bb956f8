"""The live view of a running fleet in a terminal: what it does, and what it waits for.

Pure: it keeps the newest messages and renders them. Names and labels come from nodes, so they are
shown as text, never as markup or as a control sequence of the terminal.
"""

from __future__ import annotations

from collections import defaultdict, deque
from math import isfinite

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hetertrain.wire import topics
from hetertrain.wire.messages import AggregatorStatus, NodeState

_LEVELS = "▁▂▃▄▅▆▇█"
SPARK_POINTS = 32
LAGS_SHOWN = 8


class FleetView:
    """The newest state of a fleet."""

    def __init__(self, title: str, total_seconds: float) -> None:
        self._title = title
        self._total_seconds = total_seconds
        self._nodes: dict[str, NodeState] = {}
        self._cloud: AggregatorStatus | None = None
        self._history: deque[float] = deque(maxlen=SPARK_POINTS)

    def node(self, state: NodeState) -> None:
        """Take a node's state."""
        self._nodes[state.node] = state

    def aggregator(self, status: AggregatorStatus) -> None:
        """Take an aggregator's status; the cloud's is the job's."""
        if status.cell != topics.CLOUD_CELL:
            return
        before = self._cloud
        self._cloud = status
        if status.metrics and (before is None or before.metrics != status.metrics):
            self._history.append(next(iter(status.metrics.values())))

    def render(self, elapsed_seconds: float) -> RenderableType:
        """Draw everything."""
        progress = Table.grid(padding=(0, 1), expand=True)
        progress.add_column(ratio=1)
        progress.add_column(justify="right", no_wrap=True)
        share = min(elapsed_seconds, self._total_seconds)
        clock = f"{elapsed_seconds:4.0f} of {self._total_seconds:.0f} s"
        progress.add_row(ProgressBar(self._total_seconds, share), clock)
        top = Columns([self._job(), self._lags(), self._bytes()], expand=True, equal=False)
        return Panel(Group(progress, top, self._table()), title=plain(self._title), box=box.ROUNDED)

    def _job(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        status = self._cloud
        if status is None:
            grid.add_row("starting", "processes load the task and connect")
            return grid
        name, value = next(iter(status.metrics.items()), ("metric", float("nan")))
        grid.add_row("version", Text(str(status.version), style="bold"))
        grid.add_row(
            plain(name), Text(f"{value:.3f}  {sparkline(list(self._history))}", style="green")
        )
        grid.add_row("next sync", Text(self._countdown(status)))
        grid.add_row("waits for", plain(status.waiting_for))
        refused = ", ".join(f"{reason} {count}" for reason, count in sorted(status.refused.items()))
        if refused:
            grid.add_row("refused", plain(refused, style="red"))
        return grid

    @staticmethod
    def _countdown(status: AggregatorStatus) -> str:
        if status.sync_in_seconds is None:
            return "never (synchronous rounds)" if status.version else "–"
        if status.is_syncing:
            return f"sync {status.sync} runs, at most {status.sync_in_seconds:.1f} s more"
        return f"in {status.sync_in_seconds:.0f} s"

    def _lags(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        lags = {} if self._cloud is None else self._cloud.updates_by_lag
        binned: dict[int, int] = defaultdict(int)
        for lag, count in lags.items():
            binned[min(lag, LAGS_SHOWN - 1)] += count
        most = max(binned.values(), default=1)
        grid.add_row("lag", "updates")
        for lag in range(min(LAGS_SHOWN, max(binned, default=0) + 1)):
            name = f"{lag}+" if lag == LAGS_SHOWN - 1 else str(lag)
            bar = "█" * round(12 * binned[lag] / most)
            grid.add_row(name, Text(f"{bar or '▏'} {binned[lag]}", style="cyan"))
        return grid

    def _bytes(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        up: dict[str, int] = defaultdict(int)
        down: dict[str, int] = defaultdict(int)
        for state in self._nodes.values():
            if state.role == "vehicle":
                up[state.tier] += state.bytes_up
                down[state.tier] += state.bytes_down
        grid.add_row("tier", "up", "down")
        for tier in sorted(up):
            grid.add_row(plain(tier), human_bytes(up[tier]), human_bytes(down[tier]))
        return grid

    def _table(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=True, padding=0, pad_edge=False)
        for name, width in (("node", 12), ("data", 9), ("tier", 6), ("cell", 9)):
            table.add_column(name, no_wrap=True, max_width=width)
        for name in ("ms/step", "version", "updates", "up / down"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("waiting for", overflow="ellipsis", no_wrap=True, ratio=1)
        for state in sorted(self._nodes.values(), key=lambda s: (s.role != "edge", s.node)):
            table.add_row(*map(plain, self._row(state)), style="" if state.is_online else "dim red")
        return table

    @staticmethod
    def _row(state: NodeState) -> tuple[str, ...]:
        step = f"{state.step_seconds * 1000:.0f}" if state.step_seconds else ""
        return (
            state.node,
            state.label,
            state.tier,
            state.cell,
            step,
            str(state.version) if state.version >= 0 else "–",
            str(state.updates),
            f"{human_bytes(state.bytes_up)} / {human_bytes(state.bytes_down)}",
            state.waiting_for if state.is_online else "offline",
        )


def plain(text: str, style: str = "") -> Text:
    """Return a stranger's text as text: neither markup nor anything that steers a terminal."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text), style)


def sparkline(values: list[float]) -> str:
    """Draw the newest values in one line, scaled from the lowest shown to the highest.

    A value that is not finite (a model that diverged) is a gap.
    """
    shown = values[-SPARK_POINTS:]
    finite = [value for value in shown if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    span = (high - low) or 1.0
    return "".join(
        _LEVELS[int((value - low) / span * (len(_LEVELS) - 1))] if isfinite(value) else " "
        for value in shown
    )


def human_bytes(count: int) -> str:
    """Write a number of bytes with its unit (powers of 1000)."""
    units = ("B", "kB", "MB", "GB", "TB")
    for power, unit in reversed(list(enumerate(units))):
        if count >= 1000**power:
            return f"{count / 1000**power:.3g} {unit}" if power else f"{count} {unit}"
    return f"{count} B"
