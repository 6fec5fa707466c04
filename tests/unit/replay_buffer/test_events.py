"""The log of events: in order, whole lines, nothing after the end."""

from __future__ import annotations

from pathlib import Path

from tests.build import make_state
from xrl_lite.data import Status
from xrl_lite.replay_buffer.events import EventLog, attempts_of, read_events


def test_lines_have_number_time_and_fields(tmp_path: Path) -> None:
    times = iter([5.0, 5.5, 7.25])
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: next(times))
    log.record("admitted", group="g", row=3)
    log.record("started", group="g")
    log.close()
    assert list(read_events(tmp_path / "events.jsonl")) == [
        {"n": 1, "t": 0.5, "event": "admitted", "group": "g", "row": 3},
        {"n": 2, "t": 2.25, "event": "started", "group": "g"},
    ]


def test_a_torn_line_is_left_out_and_cut_off_by_the_next_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"n": 1, "event": "began"}\n{"n": 2, "eve')
    assert [event["event"] for event in read_events(path)] == ["began"]
    log = EventLog(path)
    log.record("over")
    log.close()
    assert [event["event"] for event in read_events(path)] == ["began", "over"]


def test_nothing_is_noted_after_the_end() -> None:
    log = EventLog()
    for event in ("trained", "over", "given_back"):
        log.record(event)
    assert [event["event"] for event in log.events] == ["trained", "over"]


def test_attempts_are_noted_by_what_decides_about_them() -> None:
    states = [
        make_state(response_model_steps=[3, 4], reward={"score": 1.0, "pred": "7"}),
        make_state(status=Status.FAILED, reward=None, response_ids=None, response_model_steps=None),
    ]
    assert attempts_of(states) == [
        {"status": "completed", "reward": {"score": 1.0}, "tokens": 2, "versions": (3, 4)},
        {"status": "failed", "reward": {}, "tokens": 0, "versions": None},
    ]
