"""What is refused is written down with its reason, in bounded space, and each reason explained."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hetertrain import codec
from hetertrain.cell import Refusal
from hetertrain.core.events import UpdateArrived
from hetertrain.core.gate import NORM_LIMIT_MEDIANS, Outcome, Reason
from hetertrain.core.layout import ParameterLayout
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS
from hetertrain.core.update import Update
from hetertrain.logging import silent_logger
from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.contents import pack_update
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import Begin, Chunk, NodeState
from hetertrain.wire.transfer import content_digest
from hetertrain_cloud.driver import JobDriver
from hetertrain_cloud.reasons import EXPLANATIONS
from hetertrain_cloud.refusals import (
    FILE_BYTES_MAX,
    GATHER_SECONDS,
    GROUPS_MAX,
    OLDER_FILE,
    REFUSALS_FILE,
    RefusalLog,
    newest_first,
)
from tests.builders import SIZE, make_aggregator, make_checkpoint, make_update

ROOT = Path(__file__).parents[2]


def refusal(node: str = "n0", reason: str = "norm", **more: object) -> Refusal:
    return Refusal(node=node, reason=reason, detail="why", **more)  # type: ignore[arg-type]


def book(directory: Path) -> RefusalLog:
    return RefusalLog(directory, silent_logger())


def counts(directory: Path) -> list[tuple[str, str, int]]:
    return [(row["node"], row["reason"], row["count"]) for row in newest_first(directory)]


def test_a_refusal_is_written_at_once_and_a_flood_shares_a_row_a_minute(tmp_path: Path) -> None:
    log = book(tmp_path)
    log.note(refusal(), 1000.0)
    assert log.wakes_at == 0.0  # a time, as every wait has one
    log.flush(5.0)
    assert counts(tmp_path) == [("n0", "norm", 1)]
    for second in range(50):
        log.note(refusal(seq=second), 1001.0 + second)
        log.flush(6.0 + second)
    log.note(refusal(reason="lag"), 1060.0)
    log.flush(60.0)
    assert counts(tmp_path) == [("n0", "lag", 1), ("n0", "norm", 1)]
    assert log.wakes_at == 5.0 + GATHER_SECONDS
    log.flush(log.wakes_at)

    newest = next(newest_first(tmp_path))
    assert (newest["count"], newest["seq"]) == (50, 49)
    assert (newest["first_at"], newest["at"]) == (1001.0, 1050.0)
    assert log.wakes_at == float("inf")


def test_a_flood_of_many_nodes_is_bounded(tmp_path: Path) -> None:
    log = book(tmp_path)
    for number in range(10 * GROUPS_MAX):
        log.note(refusal(f"n{number}"), 1.0)
    log.flush(1.0)
    found = counts(tmp_path)
    assert len(found) == GROUPS_MAX + 1
    assert sum(count for *_, count in found) == 10 * GROUPS_MAX
    assert found[0] == ("", "norm", 9 * GROUPS_MAX)


def test_two_files_take_turns_and_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    now = 0.0
    for _ in range(3):
        log = book(tmp_path)
        for _ in range(10):
            for number in range(250):
                log.note(Refusal(node=f"n{number}", reason="norm", detail="x" * 5000), 1.0)
            now += GATHER_SECONDS
            log.flush(now)
        log.close()
    sizes = [(tmp_path / name).stat().st_size for name in (REFUSALS_FILE, OLDER_FILE)]
    numbers = [row["number"] for row in newest_first(tmp_path)]

    assert max(sizes) <= FILE_BYTES_MAX
    assert numbers == list(range(7500, 7500 - len(numbers), -1))
    assert len(numbers) < 7500


def test_a_damaged_book_stops_nobody_and_what_is_whole_is_read(tmp_path: Path) -> None:
    log = book(tmp_path)
    log.note(refusal(), 1.0)
    log.close()
    with (tmp_path / REFUSALS_FILE).open("ab") as file:
        file.write(b"\0" * 40 + b"\n" + b'{"number": 9, "tor')

    again = book(tmp_path)
    again.note(refusal(reason="lag"), 2.0)
    again.close()

    assert counts(tmp_path) == [("n0", "lag", 1), ("n0", "norm", 1)]
    assert [row["number"] for row in newest_first(tmp_path)] == [2, 1]


def test_a_full_disk_stops_nobody(tmp_path: Path) -> None:
    log = book(tmp_path)
    (tmp_path / REFUSALS_FILE).mkdir()
    log.note(refusal(), 1.0)
    log.flush(1.0)
    assert log.wakes_at == float("inf")


def update(**changes: object) -> Update:
    made = make_update("n0", 1)
    fields = {name: getattr(made, name) for name in Update.__slots__}
    return Update(**fields | changes)


LARGE = codec.encode(np.full(SIZE, 1000.0, np.float32), None).payload
NOT_FINITE = LARGE[: -4 * SIZE] + np.full(SIZE, np.nan, "<f4").tobytes()


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({"layout": "other"}, Outcome.REJECTED, Reason.LAYOUT),
        ({"lineage": "other"}, Outcome.REJECTED, Reason.LINEAGE),
        ({"steps": 0}, Outcome.QUARANTINED, Reason.COUNTS),
        ({"base_version": 9}, Outcome.REJECTED, Reason.BASE_AHEAD),
        ({"payload": b"?"}, Outcome.QUARANTINED, Reason.PAYLOAD),
        ({"payload": NOT_FINITE}, Outcome.QUARANTINED, Reason.NON_FINITE),
        ({"payload": LARGE}, Outcome.QUARANTINED, Reason.NORM),
    ],
)
def test_the_gate_names_the_reason(
    changes: dict[str, object], outcome: Outcome, reason: Reason
) -> None:
    machine = make_aggregator()
    machine.handle(UpdateArrived(make_update("n1", 1)), 0.0)
    assert machine.checkpoint.version == 1

    base = {"base_version": 1} | changes
    (verdict,) = machine.handle(UpdateArrived(update(**base)), 1.0).verdicts

    assert verdict.finding is not None
    assert (verdict.outcome, verdict.finding.code) == (outcome, reason)
    if reason is Reason.NORM:
        assert verdict.finding.measured == pytest.approx(1000 * SIZE**0.5)
        assert verdict.finding.limit == pytest.approx(NORM_LIMIT_MEDIANS * 0.1 * SIZE**0.5)
        assert verdict.finding.base_version == 1


def test_every_reason_is_explained() -> None:
    literal = re.compile(r'FrameError\(\s*"([a-z_]+)"')
    frames = {
        f"frame_{reason}"
        for path in (ROOT / "shared/hetertrain/wire").glob("*.py")
        if path.name not in ("uplink.py", "arrivals.py")  # a node's end
        for reason in literal.findall(path.read_text(encoding="utf-8"))
    }
    assert {"frame_signature", "frame_chunk"} <= frames
    assert frames | set(Reason) == set(EXPLANATIONS)


class Wire:
    bytes_up = bytes_down = 0

    def publish(self, outgoing: tuple[Outgoing, ...]) -> None:
        del outgoing

    def resubscribe(self, subscriptions: tuple[str, ...]) -> None:
        del subscriptions


def test_an_aggregator_writes_down_whom_it_refused_and_why(tmp_path: Path) -> None:
    layout = ParameterLayout.of({"w": np.zeros(SIZE, np.float32)}, {"w"}, ())
    driver = JobDriver(
        downlink=Downlink("job", "cloud"),
        layout=layout,
        initial=make_checkpoint(),
        policy=SYNC_PRESETS["sap"],
        weights=WEIGHT_PRESETS["sap"],
        lineage="run",
        directory=tmp_path,
        link=Wire(),
        on_version=lambda _release, _progress: None,
        wall_seconds=lambda: 77.0,
        log=silent_logger(),
    )
    driver.start(0.0)
    topic = topics.up("job", "cloud", "t1", "n0")
    content = pack_update(make_update("n0", 1))
    digest, size = content_digest(content), len(content)
    begin = Begin(node="n0", seq=1, size_bytes=size, chunk_bytes=4096, digest=digest)
    driver.take(mqtt.Received(topic, pack(begin)), 1.0)
    driver.take(mqtt.Received(topic, pack(Chunk(node="n0", seq=1, index=0), content)), 1.0)
    state = NodeState(node="n1", job="job", cell="cloud", tier="t1", role="vehicle", is_online=True)
    driver.take(mqtt.Received(topics.state("n0"), pack(state)), 1.0)
    driver.tick(max(1.0, driver.wakes_at))

    assert counts(tmp_path) == [("n0", "frame_identity", 1), ("n0", "layout", 1)]
    row = list(newest_first(tmp_path))[1]
    assert (row["seq"], row["base_version"], row["at"]) == (1, 0, 77.0)
    assert "layout" in row["detail"]
    assert driver.status(2.0, {}).uplink_bytes == size
    assert driver.status(2.0, {}).uplink_dense_bytes == 4 * SIZE
    driver.close()
