"""A thread that runs calls one after the other and is left behind when a call takes too long.

::

    run() --job--> queue --> daemon thread --results--> mail --> the loop of the caller
      waits for    its result, at most `limit_s` from when the job begins
      is woken by  the thread, for all results since it last looked; or by its timer, and then another thread takes the
                   rest of the queue

This is the weak way to limit code: Python cannot end a thread, so what is left behind goes on using CPU and memory
until it ends by itself. Worker processes are the strong way.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from xrl_lite.judger.loop_local import LoopLocal
from xrl_lite.judger.outcome import JudgementTimeoutError, ended_by
from xrl_lite.judger.stopwatch import Item, running_stopwatch, unwrap


@dataclass(eq=False, slots=True)
class _Job:
    call: Callable[[Any], Any]
    argument: Any
    limit_s: float
    done: asyncio.Future[Item]
    mail: _Mail
    began: float | None = None
    is_dropped: bool = False


class _Mail:
    """Results on their way to one loop. The thread wakes the loop once for all that it has not fetched yet.

    One timer watches over the job that runs: it looks when that job's limit is over, and if another has begun since, at
    the end of that one's.
    """

    num_expected = 0
    """Jobs in line or under way."""
    running: _Job | None = None
    """Set by the thread."""

    def __init__(self) -> None:
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._items: deque[tuple[asyncio.Future[Item], Item]] = deque()
        self._is_announced = False
        self._is_watching = False

    def watch(self, limit_s: float) -> None:
        if not self._is_watching:
            self._watch_again(limit_s, limit_s)

    def post(self, done: asyncio.Future[Item], item: Item) -> None:
        """Called by the thread."""
        self._items.append((done, item))
        if self._is_announced:
            return
        self._is_announced = True
        loop = self._loop()
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended, nobody waits
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_announced = False  # before the items are fetched: what comes from now on is announced again
        while self._items:
            done, item = self._items.popleft()
            if not done.done():
                done.set_result(item)

    def _look(self, limit_s: float) -> None:
        self._is_watching = False
        job = self.running
        left_s = limit_s
        if job is not None and job.began is not None:
            left_s = job.began + job.limit_s - perf_counter()
            if left_s <= 0:
                _end(job)
                left_s = limit_s
        if self.num_expected:
            self._watch_again(left_s, limit_s)

    def _watch_again(self, left_s: float, limit_s: float) -> None:
        loop = self._loop()
        assert loop is not None, "it runs right now"
        self._is_watching = True
        loop.call_later(left_s, self._look, limit_s)


@dataclass(eq=False)
class _Worker:
    """What thread and caller share about one thread, under the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    is_left_behind: bool = False


class SerialThread:
    """Runs calls in one daemon thread at a time, in the order they come. Starts on first use; pickles as a new one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._worker: _Worker | None = None
        self._mail: LoopLocal[_Mail] = LoopLocal(_Mail)
        weakref.finalize(self, self._jobs.put, None)  # lets the idle thread end

    async def run(self, call: Callable[[Any], Any], argument: Any, *, limit_s: float) -> Any:
        """Return ``call(argument)``. The limit counts from when it begins.

        Raises:
            JudgementTimeoutError: it ran longer; the thread is left behind.
            Exception: what `call` raised.
        """
        watch = running_stopwatch()
        loop = asyncio.get_running_loop()
        mail = self._mail.get(loop)
        job = _Job(call, argument, limit_s, loop.create_future(), mail)
        mail.num_expected += 1
        mail.watch(limit_s)
        if self._worker is None:
            self._start_worker()
        self._jobs.put(job)
        try:
            item = await job.done
        except BaseException:  # cancelled, or over its limit
            self._drop(job)
            if job.began is not None:
                watch.took(perf_counter() - job.began)
            raise
        finally:
            mail.num_expected -= 1
        return unwrap(item, watch)

    def __reduce__(self) -> tuple[type[SerialThread], tuple[str]]:
        return SerialThread, (self._name,)

    def _start_worker(self) -> None:
        self._worker = _Worker()
        threading.Thread(target=_work, args=(self._worker, self._jobs), name=self._name, daemon=True).start()

    def _drop(self, job: _Job) -> None:
        """Have a job in line passed over; leave the thread behind that is at work on it."""
        job.is_dropped = True
        worker = self._worker
        assert worker is not None, "there is one from the first call on"
        with worker.lock:
            if job.mail.running is not job:  # it waits in line still, or has just ended
                return
            job.mail.running = None
            worker.is_left_behind = True
        self._start_worker()


def _end(job: _Job) -> None:
    if not job.done.done():
        job.done.set_exception(
            JudgementTimeoutError(
                f"no reward within {job.limit_s:g} s (request_timeout). The thread that runs the code cannot be ended "
                f"and is left behind; give the judger cpu_resources to run it in a process that can."
            )
        )


def _work(worker: _Worker, jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        mail = job.mail
        mail.running = job  # first: who drops it from now on leaves this thread behind
        item = None if job.is_dropped else _run(job)
        with worker.lock:
            if worker.is_left_behind:
                return
            mail.running = None
        if item is not None:
            mail.post(job.done, item)
        del job, item


def _run(job: _Job) -> Item:
    job.began = began = perf_counter()
    try:
        output = job.call(job.argument)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the caller gets it
        return error, False, perf_counter() - began
    except BaseException as error:  # noqa: BLE001 - sys.exit() in user code must not end the run
        return ended_by(error), False, perf_counter() - began
    return output, True, perf_counter() - began
