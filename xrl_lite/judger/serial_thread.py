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
from xrl_lite.judger.stopwatch import execution_took


@dataclass(eq=False, slots=True)
class _Job:
    call: Callable[[], Any]
    done: asyncio.Future[Any]
    mail: _Mail
    limit_s: float
    began: float | None = None
    ended: float | None = None
    is_dropped: bool = False
    is_delivered: bool = False


class _Mail:
    """Results on their way to one loop. The thread wakes the loop once for all that it has not fetched yet.

    One timer watches over the job that runs: it looks when that job's limit is over, and if another has begun since, at
    the end of that one's.
    """

    def __init__(self) -> None:
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._results: deque[tuple[_Job, Any, Exception | None]] = deque()
        self._is_announced = False
        self._num_expected = 0
        self._is_watching = False
        self.running: _Job | None = None
        """Set by the thread."""

    def expect(self, job: _Job) -> None:
        self._num_expected += 1
        if not self._is_watching:
            self._watch_again(job.limit_s, job.limit_s)

    def expect_no_more(self) -> None:
        self._num_expected -= 1

    def post(self, job: _Job, result: Any, error: Exception | None) -> None:
        """Called by the thread."""
        job.ended = perf_counter()
        self._results.append((job, result, error))
        loop = self._loop()
        if not self._is_announced and loop is not None:
            self._is_announced = True
            with suppress(RuntimeError):  # the loop has ended, nobody waits
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_announced = False  # before the results are fetched: what comes from now on is announced again
        while self._results:
            job, result, error = self._results.popleft()
            job.is_delivered = True
            if job.done.done():
                continue
            if error is None:
                job.done.set_result(result)
            else:
                job.done.set_exception(error)

    def _look(self, limit_s: float) -> None:
        self._is_watching = False
        job = self.running
        left_s = limit_s
        if job is not None and job.began is not None:
            left_s = job.began + job.limit_s - perf_counter()
            if left_s <= 0:
                _end(job)
                left_s = limit_s
        if self._num_expected:
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
    job: _Job | None = None
    is_left_behind: bool = False


class SerialThread:
    """Runs calls in one daemon thread at a time, in the order they come. Starts on first use; pickles as a new one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._worker: _Worker | None = None
        self._mail: LoopLocal[_Mail] = LoopLocal(_Mail)
        weakref.finalize(self, self._jobs.put, None)  # lets the idle thread end

    async def run(self, call: Callable[[], Any], *, limit_s: float) -> Any:
        """Return what `call` returns. The limit counts from when it begins.

        Raises:
            JudgementTimeoutError: it ran longer; the thread is left behind.
            Exception: what `call` raised.
        """
        loop = asyncio.get_running_loop()
        job = _Job(call, loop.create_future(), self._mail.get(), limit_s)
        job.mail.expect(job)
        self._ensure_worker()
        self._jobs.put(job)
        try:
            return await job.done
        finally:
            job.is_dropped = True
            job.mail.expect_no_more()
            if job.began is not None:
                execution_took((job.ended or perf_counter()) - job.began)
            if not job.is_delivered:
                self._leave_behind(job)

    def __reduce__(self) -> tuple[type[SerialThread], tuple[str]]:
        return SerialThread, (self._name,)

    def _ensure_worker(self) -> None:
        if self._worker is None:
            self._worker = _Worker()
            threading.Thread(target=_work, args=(self._worker, self._jobs), name=self._name, daemon=True).start()

    def _leave_behind(self, job: _Job) -> None:
        worker = self._worker
        if worker is None:
            return
        with worker.lock:
            if worker.job is not job:  # it waits in line still, or has just ended
                return
            worker.is_left_behind = True
        self._worker = None
        self._ensure_worker()


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
        if job.is_dropped:
            continue
        with worker.lock:
            worker.job = job
        job.began = perf_counter()
        job.mail.running = job
        try:
            result = job.call()
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the caller gets it
            job.mail.post(job, None, RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
        except BaseException as error:  # noqa: BLE001 - sys.exit() in user code must not end the run
            job.mail.post(job, None, ended_by(error))
        else:
            job.mail.post(job, result, None)
        mail = job.mail
        del job
        with worker.lock:
            worker.job = None
            if worker.is_left_behind:
                return
            mail.running = None
