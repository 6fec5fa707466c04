"""A thread that runs calls one after the other and is left behind when a call takes too long.

::

    run_each() --job--> queue --> daemon thread --results--> mail --> the loop of the caller
      waits for    its results, at most `limit_s` for each call from when it begins
      is woken by  the thread, for all jobs that ended since it last looked; or by its timer, and then another thread
                   takes the rest of the job and of the queue

This is the weak way to limit code: Python cannot end a thread, so what is left behind goes on using CPU and memory
until it ends by itself. Worker processes are the strong way.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
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
    arguments: Sequence[Any]
    limit_s: float
    done: asyncio.Future[list[Item]]
    mail: _Mail
    items: list[Item] = field(default_factory=list[Item])
    at_work: tuple[int, float] | None = None
    """Which argument it is at, and since when; set by the thread, in one piece."""
    is_dropped: bool = False


class _Mail:
    """Results on their way to one loop. The thread wakes the loop once for all that it has not fetched yet.

    One timer watches over the call that runs: it looks when that call's limit is over, and if another has begun since,
    at the end of that one's.
    """

    num_expected = 0
    """Jobs in line or under way."""
    running: _Job | None = None
    """Set by the thread."""

    def __init__(self) -> None:
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._ended: deque[_Job] = deque()
        self._is_announced = False
        self._is_watching = False

    def watch(self, limit_s: float) -> None:
        if not self._is_watching:
            self._watch_again(limit_s, limit_s)

    def post(self, job: _Job) -> None:
        """Called by the thread."""
        self._ended.append(job)
        if self._is_announced:
            return
        self._is_announced = True
        loop = self._loop()
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended, nobody waits
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_announced = False  # before the jobs are fetched: what comes from now on is announced again
        while self._ended:
            job = self._ended.popleft()
            if not job.done.done():
                job.done.set_result(job.items)

    def _look(self, limit_s: float) -> None:
        self._is_watching = False
        job = self.running
        left_s = limit_s
        at_work = None if job is None else job.at_work
        if job is not None and at_work is not None:
            left_s = at_work[1] + job.limit_s - perf_counter()
            if left_s <= 0:
                if not job.done.done():
                    job.done.set_exception(_TooLongError(at_work))
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
        (item,) = await self.run_each(call, [argument], limit_s=limit_s)
        return unwrap(item, watch)

    async def run_each(self, call: Callable[[Any], Any], arguments: Sequence[Any], *, limit_s: float) -> list[Item]:
        """Return what came of `call` with each of the arguments, in order. The limit holds for each of the calls.

        One that runs longer ends as `JudgementTimeoutError`; its thread is left behind, and another goes on with the
        next. Cancelling leaves the thread behind that is at work for it.
        """
        mail = self._mail.get()
        mail.num_expected += 1
        items: list[Item] = []
        try:
            while len(items) < len(arguments):
                mail.watch(limit_s)
                items += await self._run_job(call, arguments[len(items) :] if items else arguments, limit_s, mail)
        finally:
            mail.num_expected -= 1
        return items

    async def _run_job(
        self, call: Callable[[Any], Any], arguments: Sequence[Any], limit_s: float, mail: _Mail
    ) -> list[Item]:
        """Return the items up to the last argument, or to the first that ran too long."""
        job = _Job(call, arguments, limit_s, asyncio.get_running_loop().create_future(), mail)
        if self._worker is None:
            self._start_worker()
        self._jobs.put(job)
        try:
            return await job.done
        except _TooLongError as error:
            self._drop(job)
            index, began = error.at_work
            return [*job.items[:index], (_too_long(limit_s), False, perf_counter() - began)]
        except BaseException:
            self._drop(job)
            raise

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


class _TooLongError(Exception):
    def __init__(self, at_work: tuple[int, float]) -> None:
        super().__init__()
        self.at_work = at_work


def _too_long(limit_s: float) -> JudgementTimeoutError:
    return JudgementTimeoutError(
        f"no reward within {limit_s:g} s (request_timeout). The thread that runs the code cannot be ended and is left "
        f"behind; give the judger cpu_resources to run it in a process that can."
    )


def _work(worker: _Worker, jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        mail = job.mail
        mail.running = job  # first: who drops it from now on leaves this thread behind
        if not job.is_dropped:
            _run(job, worker)
        with worker.lock:
            if worker.is_left_behind:
                return
            mail.running = None
        mail.post(job)
        del job


def _run(job: _Job, worker: _Worker) -> None:
    for index, argument in enumerate(job.arguments):
        if worker.is_left_behind:
            return
        began = perf_counter()
        job.at_work = (index, began)
        job.items.append(_call(job.call, argument, began))


def _call(call: Callable[[Any], Any], argument: Any, began: float) -> Item:
    try:
        return call(argument), True, perf_counter() - began
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the caller gets it
        return error, False, perf_counter() - began
    except BaseException as error:  # noqa: BLE001 - sys.exit() in user code must not end the run
        return ended_by(error), False, perf_counter() - began
