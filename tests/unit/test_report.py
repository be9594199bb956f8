"""What people look at: the report and the live view."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hetertrain.wire.messages import AggregatorStatus, NodeState
from hetertrain_lab.live import FleetView, human_bytes, sparkline
from hetertrain_lab.report import (
    Curve,
    NodeRow,
    RunRecord,
    Totals,
    seconds_to,
    summary_table,
    write_report,
)

HOSTILE = "<script>x</script>[red]"
ROW = NodeRow(
    node="vehicle-01",
    label=HOSTILE,
    cell="edge-1",
    tier="t0",
    step_seconds=0.02,
    steps=100,
    updates=10,
    bytes_up=5000,
    bytes_down=9000,
    alone=-0.3,
)
RISE = Curve(label="SAP-SGD", points=tuple((float(t), t / 10) for t in range(11)))
RECORD = RunRecord(
    title="test",
    metric="r2",
    settings={"vehicles": 1},
    machine="test",
    seconds=10.0,
    curves=(RISE, Curve(label="synchronous", points=((0.0, 0.1),))),
    totals=(Totals(versions=10, updates=10, bytes_up=5000, bytes_down=9000),) * 2,
    pooled={"r2": 0.99},
    final={"r2": 0.97, "r2_bus": 0.9},
    baseline_final={"r2": 0.5},
    nodes=(ROW,),
    updates_by_lag={0: 5, 3: 1},
    dense_bytes_per_update=24000,
    notes=("a note",),
)


def render(renderable) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()


def test_a_report_is_one_file_without_external_parts_and_escapes_what_nodes_say(
    tmp_path: Path,
) -> None:
    page = write_report(RECORD, tmp_path).read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page


def test_a_report_of_a_run_that_was_interrupted_at_once_is_still_written(tmp_path: Path) -> None:
    empty = replace(
        RECORD,
        curves=(),
        final={},
        baseline_final={},
        nodes=(),
        pooled={},
        totals=(),
        updates_by_lag={},
    )
    assert write_report(empty, tmp_path).exists()
    assert render(summary_table(empty))


def test_a_level_counts_as_reached_only_where_it_holds() -> None:
    assert seconds_to(RISE, 0.75) == 8.0
    assert seconds_to(RISE, 1.5) is None
    assert seconds_to(Curve(label="lucky", points=((0, 0.0), (1, 1.0), (2, 0.0))), 0.9) is None


def test_the_summary_says_how_many_times_faster_only_where_both_got_there() -> None:
    both = replace(
        RECORD, curves=(RISE, Curve(label="slow", points=tuple((t * 4, v) for t, v in RISE.points)))
    )
    assert "4.0 ×" in render(summary_table(replace(both)))
    assert "not reached" in render(summary_table(RECORD))


def test_the_live_view_renders_before_any_message_and_shows_hostile_names_as_text() -> None:
    view = FleetView("test", 60.0)
    assert "starting" in render(view.render(0.0))
    view.node(
        NodeState(
            node="[red]n0",
            job="j",
            cell="c",
            tier="t0",
            role="vehicle",
            is_online=True,
            label="[x]",
        )
    )
    view.aggregator(
        AggregatorStatus(
            job="j",
            cell="cloud",
            version=3,
            elapsed_seconds=9.0,
            sync=1,
            sync_in_seconds=4.0,
            is_syncing=False,
            active=1,
            open_updates=0,
            metrics={"r2": 0.5},
            updates_by_lag={0: 3, 90: 1},
            refused={"quarantined": 2},
            waiting_code="updates",
            waiting_for="updates of 3 nodes, 1 present",
        )
    )
    shown = render(view.render(9.0))
    for text in ("[red]n0", "[x]", "in 4 s", "updates of 3 nodes", "quarantined 2", "0.500"):
        assert text in shown


def make_state(**changes) -> NodeState:
    state = NodeState(node="n0", job="j", cell="c", tier="t0", role="vehicle", is_online=True)
    return replace(state, **changes)


def test_a_node_cannot_steer_the_terminal_or_take_the_screen() -> None:
    view = FleetView("test", 60.0)
    view.node(make_state(label="\x1b[2J\x1b]0;x\x07" + "a\n" * 100, waiting_for="\x9b2J\u202e"))
    shown = render(view.render(1.0))
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(shown)
    assert shown.count("\n") < 20


def test_what_a_node_waits_for_is_readable_in_a_terminal_of_100_columns() -> None:
    view = FleetView("test", 60.0)
    view.node(
        make_state(
            node="vehicle-01",
            label="L" * 300,
            cell="edge-1",
            step_seconds=0.02,
            version=12345,
            bytes_up=324_000,
            bytes_down=11_200_000,
            waiting_for="the next version",
        )
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(view.render(1.0))
    shown = console.file.getvalue()
    for text in ("vehicle-01", "12345", "324 kB / 11.2 MB", "the next version"):
        assert text in shown


def test_a_model_that_diverged_does_not_end_the_live_view_or_the_report(tmp_path: Path) -> None:
    assert sparkline([0.0, float("nan"), float("inf"), 1.0]) == "▁  █"
    lost = Curve(label="lost", points=((0.0, 0.1), (1.0, float("nan")), (2.0, float("inf"))))
    assert write_report(replace(RECORD, curves=(lost,)), tmp_path).exists()


def test_numbers_are_written_for_people() -> None:
    assert [human_bytes(n) for n in (0, 999, 1500, 2_340_000)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.34 MB",
    ]
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
