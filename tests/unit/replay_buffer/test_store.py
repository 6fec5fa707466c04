"""The durable store: what was generated is there after a kill, in columns that come back as they were."""

from __future__ import annotations

import json
import math
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import zlib
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.build import make_state
from xrl_lite.data import RolloutFunctionCall, RolloutState, RolloutToolCall, Status
from xrl_lite.errors import StorageError
from xrl_lite.replay_buffer import GroupStatus, ReplayBuffer, ReplayBufferConfig, SQLiteStore, build_replay_buffer
from xrl_lite.replay_buffer.columns import decode_state, encode_states, pack, unpack

HALF = "\ud83d"
"""Half of a surrogate pair: what json.loads makes of a torn emoji, and UTF-8 refuses."""


def open_buffer(folder: Path, **config: Any) -> ReplayBuffer:
    store = SQLiteStore(folder / "buffer.sqlite", flush_timeout_s=20)
    return build_replay_buffer(ReplayBufferConfig(**config), trainer_mode="separate_async", store=store)


@pytest.fixture
async def buffer(tmp_path: Path) -> AsyncIterator[ReplayBuffer]:
    opened = open_buffer(tmp_path)
    yield opened
    await opened.close()


def attempts(number: int, **fields: Any) -> list[RolloutState]:
    return [
        make_state(group_id=number, rollout_id=2 * number + place, extra_fields={"row": number}, **fields)
        for place in (0, 1)
    ]


async def add(buffer: ReplayBuffer, *numbers: int, finish: bool = True, step: int = 1) -> None:
    for number in numbers:
        fresh = attempts(number, status=Status.INIT, response_ids=None, logprobs=None, response=None, reward=None)
        group = buffer.new_group(f"g{number}", partition_id="train", global_steps=step, task_name="t", states=fresh)
        buffer.admit_all([group], {"drawn": number})
        if finish:
            await buffer.finish(buffer.start(group.uid), attempts(number, response_model_steps=[step, step]))


def query(folder: Path, sql: str) -> list[Any]:
    with sqlite3.connect(f"file:{folder / 'buffer.sqlite'}?mode=ro", uri=True) as connection:
        return connection.execute(sql).fetchall()


# --- columns


@given(
    st.one_of(
        st.none(),
        st.lists(st.integers(0, 255)),
        st.lists(st.integers(0, 1 << 17), max_size=300),
        st.lists(st.integers(-(1 << 62), 1 << 62)),
        st.lists(st.floats(width=32, allow_nan=False), max_size=300),
        st.lists(st.floats(allow_nan=False)),
    ),
    st.integers(0, 3),
)
@settings(deadline=None)
def test_packed_numbers_come_back_as_they_were(numbers: list[float] | None, level: int) -> None:
    assert unpack(pack(numbers, level=level)) == numbers


def test_packing_is_tight_and_compresses_what_repeats() -> None:
    assert len(pack([1] * 2000) or b"") < 50
    assert len(pack([4] * 1000 + [5] * 1000) or b"") < 60
    assert len(pack([300 + n % 7 for n in range(2000)]) or b"") < 400
    assert len(pack([math.sin(n) for n in range(2000)]) or b"") == 2 + 8 * 2000, "doubles stay doubles"
    assert math.isnan((unpack(pack([float("nan"), -0.5])) or [0.0])[0])


def test_the_documented_way_to_read_a_column_works() -> None:
    for numbers in ([7, 70000] * 100, [-0.5, -0.25], [3] * 9, [-1, 5], [0.1] * 3):
        blob = pack(numbers) or b""
        kind, how, body = blob[:1].decode(), blob[1:2], blob[2:]
        times = int.from_bytes(body[:4], "little") if how == b"=" else 1
        body = body[4:] if how == b"=" else zlib.decompress(body) if how == b"z" else body
        if kind in "1234":
            size = len(body) // int(kind)
            read = [sum(body[n + place * size] << 8 * place for place in range(int(kind))) for n in range(size)] * times
        else:
            read = list(array(kind, body)) * times
        assert read == numbers


@pytest.mark.parametrize(
    "state",
    [
        make_state(),
        make_state(response="grüße\n" * 90, error_msg="e", reward={"score": 0.5, "part": [1, 2]}),
        make_state(extra_fields={"pair": (1, 2), "nested": {"a": None}}),
        make_state(tool_calls=[RolloutToolCall(id="1", function=RolloutFunctionCall(name="f", arguments={"x": 1}))]),
        RolloutState(message=[{"role": "user", "content": "x"}], status=Status.FAILED),
        make_state(input_ids=[1, 2], labels=[-100, 2], session_id="s", data_source={"a": 1.0}, seq_staleness=3),
        make_state(response=f"half {HALF}", reward={"pred": HALF}, extra_fields={HALF: [HALF, (HALF, "\ude00")]}),
        make_state(message=[{"role": "user", "content": HALF}]),
    ],
)
def test_a_state_comes_back_as_it_was(state: RolloutState) -> None:
    (row,) = encode_states([state])
    again = decode_state(row)
    assert again == state
    assert again.extra_fields == state.extra_fields
    assert again.sample_params == state.sample_params


# --- what survives


async def test_what_is_finished_is_on_the_disk_before_it_counts(tmp_path: Path, buffer: ReplayBuffer) -> None:
    await add(buffer, 0)
    assert query(tmp_path, "SELECT uid, status, row, num_rows FROM groups") == [("g0", "finished", 0, 2)]
    assert query(tmp_path, "SELECT count(*), avg(score), min(num_response_tokens) FROM trajectories") == [(2, 1.0, 2)]


async def test_the_file_is_little_larger_than_what_it_holds(tmp_path: Path, buffer: ReplayBuffer) -> None:
    tokens = 1280
    logprobs = [0.1 * n for n in range(tokens)]  # floats of 8 bytes, which are not compressed
    for number in range(128):
        await add(buffer, number, finish=False)
        states = attempts(number, response_ids=[1] * tokens, logprobs=logprobs, response_model_steps=[1] * tokens)
        await buffer.finish(buffer.start(f"g{number}"), states)
    await buffer.close()
    assert (tmp_path / "buffer.sqlite").stat().st_size < 1.3 * 128 * 2 * 8 * tokens


async def test_the_documented_query_gives_scores_by_step(tmp_path: Path, buffer: ReplayBuffer) -> None:
    await add(buffer, 0, 1)
    await buffer.sample(3, "train", 2)
    await buffer.flush()
    sql = (
        "SELECT g.step, avg(t.score), avg(t.num_response_tokens) "
        "FROM trajectories t JOIN groups g ON g.ordinal = t.id >> 20 WHERE g.status = 'trained' GROUP BY g.step"
    )
    assert query(tmp_path, sql) == [(3, 1.0, 2.0)]


async def test_groups_beyond_the_memory_limit_wait_on_the_disk(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, storage={"max_memory_bytes": 6000})
    await add(buffer, 0, 1, 2)
    assert [group.is_spilled for group in buffer.table] == [False, True, True]
    groups, metrics = await buffer.sample(1, "train", 2)
    assert [len(group.states) for group in groups] == [2, 2]
    assert groups[1].states == attempts(1, response_model_steps=[1, 1])
    assert metrics["buffer/memory_mb"] == 0.0
    await add(buffer, 3)
    assert not buffer.table.get("g3").is_spilled  # type: ignore[union-attr]
    await buffer.close()


async def test_after_a_restart_everything_is_where_it_was(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    await add(buffer, 0, 1, 2, step=1)
    await add(buffer, 3, 4, finish=False, step=2)
    await buffer.abort(buffer.start("g3"), attempts(3, status=Status.ABORTED, response_model_steps=[1, 1]))
    buffer.start("g4")
    await buffer.sample(1, "train", 1)
    await buffer.sample(2, "train", 1)  # step 2 comes to no checkpoint
    await buffer.close()

    again = open_buffer(tmp_path)
    notes = await again.restore(1, keep_newer=True)
    assert notes == {"drawn": 4}
    assert [(group.uid, group.status) for group in again.table] == [
        ("g1", GroupStatus.FINISHED),
        ("g2", GroupStatus.FINISHED),
        ("g3", GroupStatus.ABORTED),
        ("g4", GroupStatus.ABORTED),
    ]
    g3, g4 = again.table.get("g3"), again.table.get("g4")
    assert g3 is not None
    assert g4 is not None
    assert [state.status for state in g3.states] == [Status.ABORTED] * 2
    assert [state.status for state in g4.states] == [Status.INIT] * 2
    groups, _ = await again.sample(2, "train", 2)
    assert [group.uid for group in groups] == ["g1", "g2"]
    assert groups[0].states == attempts(1, response_model_steps=[1, 1])
    await add(again, 5)
    assert again.table.get("g5").ordinal == 5  # type: ignore[union-attr]
    await again.close()


async def test_going_back_without_keeping_deletes_what_will_be_drawn_again(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    await add(buffer, 0, 1)
    await buffer.sample(1, "train", 1)
    await buffer.sample(2, "train", 1)
    await add(buffer, 2, finish=False)
    await buffer.close()

    again = open_buffer(tmp_path)
    await again.restore(1, keep_newer=False)
    assert len(again) == 0
    assert query(tmp_path, "SELECT uid FROM groups") == [("g0",)]
    await add(again, 1, 2)
    assert [group.ordinal for group in again.table] == [1, 2]
    await again.close()


@pytest.mark.parametrize("how", ["unusable", "discarded"])
async def test_what_was_dropped_after_the_checkpoint_can_be_drawn_again(how: str, tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    await add(buffer, 0, finish=False, step=5)
    await buffer.fail(buffer.start("g0"), "scripted")
    if how == "unusable":
        buffer.evict_unusable(6, "train")
    else:
        buffer.at_step(6)
        buffer.discard(list(buffer.table), "tests")
    await buffer.flush()
    assert query(tmp_path, "SELECT status, step FROM groups") == [("dropped", 6)]
    await buffer.close()

    again = open_buffer(tmp_path)
    await again.restore(5, keep_newer=False)
    await add(again, 0, step=6)
    assert query(tmp_path, "SELECT status FROM groups") == [("finished",)]
    await again.close()


async def test_what_was_dropped_before_the_checkpoint_stays_dropped(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    await add(buffer, 0, step=6)
    buffer.at_step(5)
    buffer.discard(list(buffer.table), "tests")
    await buffer.close()
    again = open_buffer(tmp_path)
    await again.restore(5, keep_newer=False)
    assert query(tmp_path, "SELECT status, step FROM groups") == [("dropped", 5)]
    await again.close()


async def test_eight_ids_two_trained_two_buffered_continue_with_the_buffered_ones(tmp_path: Path) -> None:
    """Train batch 2, generation batch 4: after the first step 2 and 3 are buffered, and come next."""
    buffer = open_buffer(tmp_path)
    await add(buffer, 0, 1, 2, 3)
    trained = [group.uid for group in (await buffer.sample(1, "train", 2))[0]]
    await buffer.flush()
    await buffer.close()
    again = open_buffer(tmp_path)
    notes = await again.restore(1, keep_newer=True)
    assert notes["drawn"] == 3, "the next one drawn is 4"
    await add(again, 4, 5, 6, 7, step=2)
    for step in (2, 3, 4):
        trained += [group.uid for group in (await again.sample(step, "train", 2))[0]]
    assert trained == [f"g{n}" for n in range(8)]
    await again.close()


async def test_a_group_that_is_running_cannot_be_written_by_the_run_before(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    await add(buffer, 0, finish=False)
    buffer.start("g0")
    await buffer.close()
    again = open_buffer(tmp_path)
    await again.restore(0, keep_newer=True)
    assert again.status("g0") is GroupStatus.ABORTED
    await again.close()


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.replay_buffer.test_store import add, open_buffer

async def main():
    buffer = open_buffer(Path({folder!r}))
    number = 0
    while True:
        await add(buffer, number)
        print(number, flush=True)
        number += 1

asyncio.run(main())
"""


def run_until_killed(folder: Path) -> int:
    """Let another process fill a buffer, kill it, and return the last group that it said was finished."""
    root = str(Path(__file__).resolve().parents[3])
    program = KILLED.format(root=root, folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 20:
                process.send_signal(signal.SIGKILL)
                break
        return max([20, *(int(line) for line in process.stdout if line.strip())])


@pytest.mark.process
async def test_kill_9_loses_nothing_that_was_counted(tmp_path: Path) -> None:
    last = run_until_killed(tmp_path)
    again = open_buffer(tmp_path)
    await again.restore(0, keep_newer=True)
    finished = [group.uid for group in again.table if group.status is GroupStatus.FINISHED]
    assert finished[: last + 1] == [f"g{n}" for n in range(last + 1)]
    await again.close()


# --- retention and failure


async def test_what_no_checkpoint_goes_back_to_is_deleted(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, storage={"keep_steps": 1})
    await add(buffer, *range(6))
    for step in (1, 2, 3):
        await buffer.sample(step, "train", 2)
    buffer.checkpointed(2)
    await buffer.flush()
    assert query(tmp_path, "SELECT uid FROM groups") == [("g2",), ("g3",), ("g4",), ("g5",)]
    assert query(tmp_path, "SELECT count(*) FROM trajectories") == [(8,)]
    await buffer.close()


async def test_many_old_groups_are_deleted_in_portions(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, storage={"keep_steps": 0})
    groups = [buffer.new_group(f"g{n}", partition_id="train", global_steps=1) for n in range(600)]
    buffer.admit_all(groups)
    buffer.discard(groups, "test")
    await buffer.flush()
    buffer.checkpointed(1)
    for _ in range(4):
        await buffer.flush()
    assert query(tmp_path, "SELECT count(*) FROM groups") == [(0,)]
    await buffer.close()


async def test_half_a_surrogate_pair_in_an_error_costs_nothing(tmp_path: Path, buffer: ReplayBuffer) -> None:
    bad = make_state(status=Status.FAILED, error_msg=f"no number: {HALF}", finish_reason=HALF, rollout_id=HALF)
    await add(buffer, 0, 1, finish=False)
    assert await buffer.finish(buffer.start("g0"), [make_state(), bad]) is GroupStatus.FINISHED
    assert await buffer.finish(buffer.start("g1"), [bad]) is GroupStatus.FAILURE
    assert query(tmp_path, "SELECT reason FROM groups WHERE uid = 'g1'") == [(r"no number: \ud83d",)]
    ((_, again),) = await buffer.store.load_states([buffer.table.get("g0")])  # type: ignore[list-item]
    assert (again.error_msg, again.rollout_id) == (r"no number: \ud83d", HALF)


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"extra_fields": {"client": threading.Lock()}}, r"extra_fields\['client'\]"),
        ({"reward": {"score": 1.0, "parts": [threading.Lock()]}}, r"reward\['parts'\]\[0\]"),
        ({"response_mask": [1, None]}, "response_mask"),
        ({"response": 7}, "response"),
    ],
)
async def test_what_cannot_be_kept_costs_its_group_and_not_the_run(
    fields: dict[str, Any], culprit: str, tmp_path: Path, buffer: ReplayBuffer
) -> None:
    bad = make_state(rollout_id=5)
    for name, value in fields.items():
        setattr(bad, name, value)
    await add(buffer, 0, finish=False)
    assert await buffer.finish(buffer.start("g0"), [make_state(), bad]) is GroupStatus.FAILURE
    assert re.match(rf"sample 5: {culprit} cannot be kept on the disk \(.*\)", buffer.reason("g0"))
    assert query(tmp_path, "SELECT status, num_rows, reason FROM groups") == [("failure", 0, buffer.reason("g0"))]
    await add(buffer, 1)
    buffer.evict_unusable(1, "train")
    groups, _ = await buffer.sample(1, "train", 1)
    assert [group.uid for group in groups] == ["g1"]


async def test_a_store_that_cannot_write_says_why_to_everybody(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    await add(buffer, 0)
    buffer.store.admit([buffer.table.get("g0")], {})  # type: ignore[list-item]
    with pytest.raises(
        StorageError, match=r"cannot be written to .*buffer.sqlite: UNIQUE constraint failed: [\w., ]+\.$"
    ):
        await buffer.flush()
    await buffer.admit("g9", global_steps=1)
    with pytest.raises(StorageError, match="UNIQUE"):
        await buffer.finish(buffer.start("g9"), attempts(9))
    with pytest.raises(StorageError, match="UNIQUE"):
        await buffer.close()


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(StorageError, match="has schema version 99, this is for 2"):
        SQLiteStore(path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "buffer.sqlite").mkdir()
    with pytest.raises(StorageError, match="cannot be used"):
        SQLiteStore(tmp_path / "buffer.sqlite")


async def test_notes_are_json(tmp_path: Path, buffer: ReplayBuffer) -> None:
    await add(buffer, 7)
    ((value,),) = query(tmp_path, "SELECT value FROM notes WHERE name='drawn'")
    assert json.loads(value) == 7
