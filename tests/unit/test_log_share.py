"""The end of a node's log: what is kept, who is told, how much and how often."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hetertrain import logging
from hetertrain.core.tiers import TIERS
from hetertrain.errors import FrameError
from hetertrain.wire import topics
from hetertrain.wire.events import FrameRefused, UplinkReady
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.log_share import ANSWER_SECONDS_MIN, LogShare, bounded
from hetertrain.wire.messages import LogLines, LogRequest, NodeState
from hetertrain.wire.signing import CONTROL_SIGNER, signed
from hetertrain.wire.uplink import Uplink
from hetertrain_cloud.control.log_desk import REUSE_SECONDS, WAITING_MAX, LogDesk
from hetertrain_cloud.control.problems import ProblemError

FRAME_BYTES_MAX = 64 << 10
STATE = NodeState(node="car-1", job="job", cell="cloud", tier="t1", role="vehicle", is_online=True)


def request(number: int, node: str = "car-1") -> LogRequest:
    return LogRequest(node=node, number=number)


# What is kept


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    logging.configure("info", json=True)
    logging._lines.clear()
    yield capsys
    logging.configure("info")
    logging._lines.clear()


def test_the_last_lines_are_those_that_went_out_without_secrets(
    log: pytest.CaptureFixture[str],
) -> None:
    logger = logging.get_logger(node="car-1")
    logger.debug("not_logged")
    logger.info("agent_started", password="hunter2")
    logger.warning("disconnected", reason="no route")
    assert list(logging.last_lines()) == log.readouterr().err.splitlines()
    assert len(logging.last_lines()) == 2
    assert "hunter2" not in str(logging.last_lines())


def test_of_lines_and_their_lengths_only_so_many_are_kept(
    log: pytest.CaptureFixture[str],
) -> None:
    del log
    logger = logging.get_logger()
    for number in range(500):
        logger.info("x" * 9000, number=number)
    kept = logging.last_lines()
    assert len(kept) == logging.LINES_KEPT
    assert {len(line) for line in kept} == {logging.LINE_CHARACTERS_KEPT}


def test_a_traceback_is_kept_line_by_line_and_colours_are_not() -> None:
    render = logging._Keeping(lambda *_: "\x1b[31mfailed\x1b[0m\n  in a place")
    logging._lines.clear()
    assert render(None, "error", {}) == "\x1b[31mfailed\x1b[0m\n  in a place"
    assert logging.last_lines() == ("failed", "  in a place")


# What a node answers


def test_an_answer_has_the_newest_lines_within_all_bounds() -> None:
    lines = [f"{number} " + "漢" * 600 for number in range(300)]
    answer = LogShare(lambda: lines).answer(request(1), 0.0)
    assert answer is not None
    frame = pack(answer)
    assert len(frame) < FRAME_BYTES_MAX
    assert unpack(frame)[0] == answer
    assert answer.lines[-1].startswith("299 ")
    assert len(answer.lines) <= 100
    assert all(len(line) <= 500 for line in answer.lines)
    assert len(bounded(["short"] * 300)) == 100


def test_what_is_no_text_does_not_travel() -> None:
    assert bounded(["a\udcffb", "c\x1b]0;title\x07d"]) == ("a?b", "c ]0;title d")


def test_who_asks_twice_within_two_seconds_is_answered_once() -> None:
    share = LogShare(lambda: ["line"])
    answers = [share.answer(request(number), number / 10) for number in range(100)]
    assert len([each for each in answers if each]) == 10 / ANSWER_SECONDS_MIN


def test_a_request_that_is_sent_again_later_is_not_answered() -> None:
    share = LogShare(lambda: ["line"])
    assert share.answer(request(7), 0.0)
    assert share.answer(request(7), 10.0) is None
    assert share.answer(request(6), 20.0) is None


def test_where_the_owner_does_not_share_the_answer_says_so_and_nothing_else() -> None:
    answer = LogShare().answer(request(1), 0.0)
    assert answer == LogLines(node="car-1", number=1, is_shared=False)


@pytest.mark.parametrize(
    "change", [{"lines": ("x",) * 101}, {"lines": ("x" * 501,)}, {"number": -1}, {"node": ""}]
)
def test_an_answer_out_of_bounds_is_refused(change: dict) -> None:
    answer = LogLines(node="car-1", number=1, is_shared=True)
    with pytest.raises(FrameError, match="header"):
        unpack(pack(replace(answer, **change)))


class Signer:
    """Signs as one name; who checks knows no other."""

    def __init__(self, name: str) -> None:
        self.name = name.encode()

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        return data[-64:], self.name

    @staticmethod
    def check(
        signer: str, role: str | None, data: bytes, signature: bytes, certificate: bytes
    ) -> bool:
        del role
        return (signer.encode(), data[-64:]) == (certificate, signature)


def ask(uplink: Uplink, asked: LogRequest) -> UplinkReady:
    return uplink.received(topics.inbox("car-1"), pack(asked), 5.0)


def node() -> Uplink:
    share = LogShare(lambda: ["agent_started"])
    return Uplink(STATE, TIERS["t1"], check=Signer.check, log_share=share)


def test_a_node_answers_the_control_plane_on_a_topic_of_its_own() -> None:
    ready = ask(node(), signed(request(1), "", "", Signer(CONTROL_SIGNER).sign))
    (sent,) = ready.send
    assert (sent.topic, sent.retain) == (topics.log("car-1"), False)
    assert unpack(sent.frame)[0] == LogLines(
        node="car-1", number=1, is_shared=True, lines=("agent_started",)
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(1), "signature"),
        (signed(request(1), "", "", Signer("aggregator").sign), "signature"),
        (replace(signed(request(1), "", "", Signer(CONTROL_SIGNER).sign), number=2), "signature"),
        (signed(request(1, "car-2"), "", "", Signer(CONTROL_SIGNER).sign), "identity"),
    ],
    ids=["unsigned", "another's", "altered", "for another node"],
)
def test_a_request_that_is_not_the_control_planes_for_this_node_is_refused(
    asked: LogRequest, reason: str
) -> None:
    ready = ask(node(), asked)
    assert ready.send == ()
    assert [e.reason for e in ready.events if isinstance(e, FrameRefused)] == [reason]


# Who asks


class Desk:
    """A desk, its clock, and nodes that answer at once if they are to."""

    def __init__(self, *, answers: bool = True) -> None:
        self.now = 0.0
        self.sent: list[tuple[str, int]] = []
        self.answers = answers
        self.desk = LogDesk(self.send, lambda: self.now, first_number=10)

    def send(self, node: str, number: int) -> None:
        self.sent.append((node, number))
        if self.answers:
            assert self.desk.take(answer(node, number))
        else:
            self.now += 3.999


def answer(node: str, number: int) -> LogLines:
    return LogLines(node=node, number=number, is_shared=True, lines=(f"line {number}",))


def test_who_asks_has_the_nodes_answer() -> None:
    desk = Desk()
    assert desk.desk.read("car-1").lines == ("line 11",)
    assert desk.sent == [("car-1", 11)]


def test_a_node_is_not_asked_more_often_than_it_answers() -> None:
    desk = Desk()
    for tenth in range(100):
        desk.now = tenth / 10
        assert desk.desk.read("car-1").is_shared
    assert len(desk.sent) == 10 / REUSE_SECONDS


def test_a_silent_node_is_a_problem_of_its_own_and_is_asked_anew_later() -> None:
    desk = Desk(answers=False)
    with pytest.raises(ProblemError) as found:
        desk.desk.read("car-1")
    assert (found.value.status, found.value.problem) == (504, "node_silent")
    desk.answers, desk.now = True, 100.0
    assert desk.desk.read("car-1").lines == ("line 12",)


@pytest.mark.parametrize("said", [answer("car-1", 99), answer("car-2", 11)])
def test_what_nobody_asked_for_is_not_taken(said: LogLines) -> None:
    desk = Desk(answers=False)
    with pytest.raises(ProblemError):
        desk.desk.read("car-1")
    assert not desk.desk.take(said)


def test_an_answer_counts_once() -> None:
    desk = Desk()
    desk.desk.read("car-1")
    assert not desk.desk.take(replace(answer("car-1", 11), lines=("forged",)))
    assert desk.desk.read("car-1").lines == ("line 11",)


def test_more_than_a_few_do_not_wait_at_a_time() -> None:
    begun = threading.Semaphore(0)
    desk = LogDesk(lambda _node, _number: begun.release())
    silent: list[str] = []

    def read(number: int) -> None:
        try:
            desk.read(f"car-{number}")
        except ProblemError as problem:
            silent.append(problem.problem)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(WAITING_MAX)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=10)
    with pytest.raises(ProblemError) as found:
        desk.read("one-more")
    assert found.value.status == 429
    for number in range(WAITING_MAX):
        desk.take(answer(f"car-{number}", desk._asked[f"car-{number}"].number))
    for thread in threads:
        thread.join(10)
    assert silent == []
