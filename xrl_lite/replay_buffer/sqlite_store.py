"""The durable store: one SQLite file in the folder of the run, ``buffer.sqlite``.

::

    buffer (event loop) --operations--> queue --> writer thread --one transaction per batch--> buffer.sqlite (WAL)
    flush()  <--- woken by the writer once everything before it is committed

Waits for    `flush`: the commit of what was queued before it, with a deadline
Is woken by  the writer; a writer that failed answers every later call with its error

The file can be read with any SQLite client, also while the run goes on (``sqlite3 -readonly buffer.sqlite``)::

    groups                                    one line per prompt draw
        ordinal INTEGER PRIMARY KEY           order of admission
        uid TEXT                              name of the draw
        partition_id, task_name TEXT          train or val; the task
        row INTEGER                           row of the data set
        global_steps INTEGER                  step it was dispatched for
        status TEXT                           pending running finished failure aborted expired | trained dropped
        reason TEXT                           why it failed or was dropped
        num_rows, num_tokens INTEGER          attempts that can be trained on; response tokens of all
        min_version, max_version INTEGER      policy versions of its tokens
        step INTEGER                          step that trained on it, or that dropped it
        created_at, updated_at REAL           Unix time

    prompts                                   of groups that nothing was generated for yet
        ordinal INTEGER PRIMARY KEY           order of admission
        states BLOB                           the attempts as they were drawn (pickle), to run the group again

    trajectories                              one line per attempt that was generated
        id INTEGER PRIMARY KEY                ordinal of the group * 2**20 + place in the group
        rollout_id, status, finish_reason, error TEXT
        score REAL                            reward.score
        num_prompt_tokens, num_response_tokens, min_version, max_version INTEGER
        prompt_ids, response_ids, logprobs, response_mask, response_model_steps BLOB    packed numbers
        response, reward, shared, rest BLOB   compressed text; see `xrl_lite.replay_buffer.columns` for both forms

    notes                                     name TEXT, value TEXT (JSON): how far the samplers are, for example

For example, mean score and length by step::

    SELECT g.step, avg(t.score), avg(t.num_response_tokens)
    FROM trajectories t JOIN groups g ON g.ordinal = t.id >> 20 WHERE g.status = 'trained' GROUP BY g.step;

A commit survives the death of any process (``synchronous=NORMAL``). A power failure may cost the last commits, never
the file.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from xrl_lite.data import RolloutState
from xrl_lite.errors import StorageError
from xrl_lite.log import get_logger
from xrl_lite.replay_buffer.columns import NUMBERS, NotStorableError, decode_state, encode_states, readable
from xrl_lite.replay_buffer.groups import GroupStatus, PromptGroup
from xrl_lite.replay_buffer.store import IN_PROGRESS, StoredGroups

logger = get_logger(__name__)

SCHEMA_VERSION = 2
FLUSH_TIMEOUT_S = 120.0
_MAX_OPERATIONS = 1024
"""Operations in one transaction: bounds how long a flush waits for others."""
_PLACES = 20
"""Bits of the place in a group."""
_DELETED_AT_ONCE = 256
_PAGE_BYTES = 32_768
"""Several trajectories of 2k tokens fit: rows that leave most of a page unused cost as much to write as full ones."""
_CHECKPOINT_PAGES = (64 << 20) // _PAGE_BYTES
"""Pages in the WAL before they are copied to the file itself, which waits for the disk."""
_TRAINED, _DROPPED = "trained", "dropped"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    ordinal INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, partition_id TEXT NOT NULL, task_name TEXT NOT NULL,
    row INTEGER, global_steps INTEGER NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    num_rows INTEGER NOT NULL DEFAULT 0, num_tokens INTEGER NOT NULL DEFAULT 0,
    min_version INTEGER, max_version INTEGER, step INTEGER,
    created_at REAL NOT NULL, updated_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS groups_by_status ON groups (status, step);
CREATE TABLE IF NOT EXISTS prompts (ordinal INTEGER PRIMARY KEY, states BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories (
    id INTEGER PRIMARY KEY, rollout_id TEXT, status TEXT NOT NULL, finish_reason TEXT, error TEXT, score REAL,
    num_prompt_tokens INTEGER NOT NULL, num_response_tokens INTEGER NOT NULL, min_version INTEGER, max_version INTEGER,
    prompt_ids BLOB, response_ids BLOB, logprobs BLOB, response_mask BLOB, response_model_steps BLOB,
    response BLOB, reward BLOB, shared BLOB NOT NULL, rest BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_STATE_COLUMNS = (
    *("rollout_id", "status", "finish_reason", "error", "score", "num_prompt_tokens", "num_response_tokens"),
    *("min_version", "max_version", *NUMBERS, "response", "reward", "shared", "rest"),
)
_INSERT_STATE = (
    f"INSERT OR REPLACE INTO trajectories (id, {', '.join(_STATE_COLUMNS)}) "
    f"VALUES (:id, {', '.join(f':{name}' for name in _STATE_COLUMNS)})"
)
_REFUSE = "UPDATE groups SET status=?, reason=?, num_rows=0 WHERE ordinal=?"
_GROUP_COLUMNS = (
    "ordinal, uid, partition_id, task_name, row, global_steps, status, reason, num_rows, num_tokens, min_version, "
    "max_version"
)
_HERE = ", ".join(f"'{status.value}'" for status in GroupStatus)
"""Status of a group that is in the buffer."""

Operation = Callable[[sqlite3.Connection], object]


class SQLiteStore:
    """Writes to a file, in the order it is told, from a thread of its own.

    Args:
        path: The file; made if it does not exist.
        compression_level: How much to compress, 1 to 3; 0 only packs numbers tightly.
        flush_timeout_s: Longest wait for a commit.

    Raises:
        StorageError: the file cannot be opened, or is of another version.
    """

    is_durable = True

    def __init__(self, path: Path, *, compression_level: int = 1, flush_timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        self.path = path
        self._level = compression_level
        self._flush_timeout_s = flush_timeout_s
        self._queue: queue.SimpleQueue[Operation | _Flush | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._refused: dict[int, str] = {}
        self._reading = threading.Lock()
        try:
            self._writer = _connect(path)
            self._reader = _connect(path)
        except sqlite3.Error as error:
            raise StorageError(f"{path} cannot be used to keep what is generated: {error}.") from error
        self._thread = threading.Thread(target=self._write_until_closed, name="buffer-writer", daemon=True)
        self._thread.start()

    # --- told by the buffer; nothing here waits

    def admit(self, groups: Sequence[PromptGroup], notes: dict[str, Any]) -> None:
        now = time.time()
        # pickled here, not in the writer: the attempts begin to change as soon as they are dispatched
        rows = [(*_identity(group), now, now) for group in groups]
        prompts = [(group.ordinal, pickle.dumps(group.states, protocol=5)) for group in groups]
        values = [(name, json.dumps(value)) for name, value in notes.items()]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT INTO groups (ordinal, uid, partition_id, task_name, row, global_steps, status, created_at, "
                "updated_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
            connection.executemany("INSERT INTO prompts VALUES (?, ?)", prompts)
            connection.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?)", values)

        self._queue.put(write)

    def update(self, group: PromptGroup) -> None:
        values = (
            *(group.status.value, readable(group.reason), group.global_steps, group.num_rows, group.num_tokens),
            *(group.min_version, group.max_version, time.time(), group.ordinal),
        )
        statement = (
            "UPDATE groups SET status=?, reason=?, global_steps=?, num_rows=?, num_tokens=?, min_version=?, "
            "max_version=?, updated_at=? WHERE ordinal=?"
        )
        self._queue.put(lambda connection: connection.execute(statement, values))

    def write_states(self, group: PromptGroup) -> None:
        self.update(group)
        ordinal, uid, states = group.ordinal, group.uid, group.states

        def write(connection: sqlite3.Connection) -> None:
            first = ordinal << _PLACES
            connection.execute("DELETE FROM trajectories WHERE id >= ? AND id < ?", (first, first + (1 << _PLACES)))
            connection.execute("DELETE FROM prompts WHERE ordinal = ?", (ordinal,))
            try:
                rows = [
                    {"id": first + place, **row} for place, row in enumerate(encode_states(states, level=self._level))
                ]
            except NotStorableError as error:
                logger.warning("group %s is lost: %s", uid, error)
                self._refused[ordinal] = reason = str(error)
                connection.execute(_REFUSE, (GroupStatus.FAILURE.value, readable(reason), ordinal))
            else:
                connection.executemany(_INSERT_STATE, rows)

        self._queue.put(write)

    def take(self, groups: Sequence[PromptGroup], step: int) -> None:
        self._end(groups, _TRAINED, "", step)

    def drop(self, groups: Sequence[PromptGroup], reason: str, step: int) -> None:
        self._end(groups, _DROPPED, reason, step)

    def forget(self, step: int) -> None:
        def delete(connection: sqlite3.Connection) -> None:
            old = connection.execute(
                f"SELECT ordinal FROM groups WHERE status IN ('{_TRAINED}', '{_DROPPED}') AND step <= ? "
                f"LIMIT {_DELETED_AT_ONCE}",
                (step,),
            ).fetchall()
            _delete_groups(connection, [ordinal for (ordinal,) in old])
            if len(old) == _DELETED_AT_ONCE:  # in small portions, so that nobody waits long for its commit
                self._queue.put(delete)

        self._queue.put(delete)

    # --- waited for

    async def flush(self) -> None:
        self._raise_failure()
        marker = _Flush(asyncio.get_running_loop())
        self._queue.put(marker)
        try:
            with anyio.fail_after(self._flush_timeout_s):
                await marker.committed
        except TimeoutError as error:
            raise StorageError(
                f"Nothing could be written to {self.path} for {self._flush_timeout_s:g} s. Is the disk very slow, or "
                f"does another program hold a lock on the file?"
            ) from error

    def refusal(self, group: PromptGroup) -> str | None:
        return self._refused.pop(group.ordinal, None)

    async def load_states(self, groups: Sequence[PromptGroup]) -> list[list[RolloutState]]:
        await self.flush()
        return await self._read(lambda connection: [_read_states(connection, group.ordinal) for group in groups])

    async def read_notes(self) -> dict[str, Any]:
        return await self._read(_read_notes)

    async def rewind(self, step: int, *, keep_newer: bool) -> StoredGroups:
        self._queue.put(lambda connection: _rewind(connection, step, keep_newer=keep_newer))
        await self.flush()
        return await self._read(_read_waiting)

    async def close(self) -> None:
        self._queue.put(None)
        await anyio.to_thread.run_sync(self._thread.join, self._flush_timeout_s)
        with self._reading:
            self._reader.close()
        self._raise_failure()

    # --- the writer

    def _write_until_closed(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._next_batch()
            flushes = [item for item in batch if isinstance(item, _Flush)]
            try:
                if self._failure is None:
                    self._commit(item for item in batch if not isinstance(item, _Flush))
            except Exception as error:
                self._failure = error
                logger.exception("cannot write to %s", self.path)
            _answer(flushes, self._failure_as_error())
        self._writer.close()

    def _next_batch(self) -> tuple[list[Operation | _Flush], bool]:
        batch: list[Operation | _Flush] = []
        item = self._queue.get()
        while item is not None:
            batch.append(item)
            if len(batch) == _MAX_OPERATIONS:
                return batch, True
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, True
        return batch, False

    def _commit(self, operations: Iterable[Operation]) -> None:
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            for operation in operations:
                operation(self._writer)
        except BaseException:
            self._writer.rollback()
            raise
        self._writer.commit()

    def _end(self, groups: Sequence[PromptGroup], status: str, reason: str, step: int) -> None:
        now = time.time()
        rows = [(status, readable(reason or group.reason), step, now, group.ordinal) for group in groups]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("UPDATE groups SET status=?, reason=?, step=?, updated_at=? WHERE ordinal=?", rows)
            connection.executemany("DELETE FROM prompts WHERE ordinal = ?", [row[-1:] for row in rows])

        self._queue.put(write)

    async def _read(self, read: Callable[[sqlite3.Connection], Any]) -> Any:
        def locked() -> Any:
            with self._reading:
                return read(self._reader)

        try:
            return await anyio.to_thread.run_sync(locked)
        except sqlite3.Error as error:
            raise StorageError(f"{self.path} cannot be read: {error}.") from error

    def _failure_as_error(self) -> StorageError | None:
        if self._failure is None:
            return None
        is_of_the_disk = isinstance(self._failure, sqlite3.OperationalError | OSError)
        advice = " Free some space, then go on with checkpoint.resume=auto." if is_of_the_disk else ""
        error = StorageError(f"What was generated cannot be written to {self.path}: {self._failure}.{advice}")
        error.__cause__ = self._failure
        return error

    def _raise_failure(self) -> None:
        error = self._failure_as_error()
        if error is not None:
            raise error


class _Flush:
    """Somebody who waits for the commit of what was queued before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.committed: asyncio.Future[None] = loop.create_future()


def _answer(flushes: Sequence[_Flush], error: Exception | None) -> None:
    """Wake whoever waits; called by the writer. A loop is woken once, whatever the number of its waiters."""

    def wake(loop: asyncio.AbstractEventLoop) -> None:
        for flush in flushes:
            if flush.loop is not loop or flush.committed.done():  # a done one gave up
                continue
            if error is None:
                flush.committed.set_result(None)
            else:
                flush.committed.set_exception(error)

    for loop in {flush.loop for flush in flushes}:
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            loop.call_soon_threadsafe(wake, loop)


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30.0)
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, SCHEMA_VERSION):
        connection.close()
        raise StorageError(f"{path} has schema version {version}, this is for {SCHEMA_VERSION}. Use another run name.")
    if version == 0:
        connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
    connection.executescript(_SCHEMA)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    return connection


def _identity(group: PromptGroup) -> tuple[object, ...]:
    return (
        *(group.ordinal, group.uid, group.partition_id, group.task_name, group.row, group.global_steps),
        group.status.value,
    )


def _delete_groups(connection: sqlite3.Connection, ordinals: Sequence[int]) -> None:
    connection.executemany(
        "DELETE FROM trajectories WHERE id >= ? AND id < ?",
        [(ordinal << _PLACES, (ordinal + 1) << _PLACES) for ordinal in ordinals],
    )
    for table in ("prompts", "groups"):
        connection.executemany(f"DELETE FROM {table} WHERE ordinal = ?", [(ordinal,) for ordinal in ordinals])


def _rewind(connection: sqlite3.Connection, step: int, *, keep_newer: bool) -> None:
    """Undo what was done after the end of `step`."""
    if not keep_newer:
        ordinals = connection.execute(
            f"SELECT ordinal FROM groups WHERE status IN ({_HERE}) "
            f"UNION ALL SELECT ordinal FROM groups WHERE status IN ('{_TRAINED}', '{_DROPPED}') AND step > ?",
            (step,),
        ).fetchall()
        _delete_groups(connection, [ordinal for (ordinal,) in ordinals])
        return
    # what was dropped stays dropped: it was replaced by another draw, which is here too
    connection.execute("UPDATE groups SET status='finished', step=NULL WHERE status='trained' AND step > ?", (step,))


def _read_states(connection: sqlite3.Connection, ordinal: int) -> list[RolloutState]:
    cursor = connection.execute(
        f"SELECT {', '.join(_STATE_COLUMNS)} FROM trajectories WHERE id >= ? AND id < ? ORDER BY id",
        (ordinal << _PLACES, (ordinal + 1) << _PLACES),
    )
    return [decode_state(dict(zip(_STATE_COLUMNS, row, strict=True))) for row in cursor]


def _read_prompt(connection: sqlite3.Connection, ordinal: int) -> list[RolloutState]:
    (states,) = connection.execute("SELECT states FROM prompts WHERE ordinal = ?", (ordinal,)).fetchone()
    return pickle.loads(states)


def _read_waiting(connection: sqlite3.Connection) -> StoredGroups:
    rows = connection.execute(f"SELECT {_GROUP_COLUMNS} FROM groups WHERE status IN ({_HERE}) ORDER BY ordinal")
    (last,) = connection.execute("SELECT max(ordinal) FROM groups").fetchone()
    groups = [_group(connection, row) for row in rows]
    return StoredGroups(groups=groups, next_ordinal=0 if last is None else last + 1, notes=_read_notes(connection))


def _read_notes(connection: sqlite3.Connection) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in connection.execute("SELECT name, value FROM notes")}


def _group(connection: sqlite3.Connection, row: Sequence[Any]) -> PromptGroup:
    known: dict[str, Any] = dict(zip(_GROUP_COLUMNS.split(", "), row, strict=True))
    known["status"] = GroupStatus(known["status"])
    group = PromptGroup(**known)
    if group.status in IN_PROGRESS:
        # what was interrupted goes on from what it had; what was running begins with its prompt
        kept = _read_states(connection, group.ordinal) if group.status is not GroupStatus.PENDING else []
        group.states = kept or _read_prompt(connection, group.ordinal)
    else:
        group.is_spilled = True
    return group
