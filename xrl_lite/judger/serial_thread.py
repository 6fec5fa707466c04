"""A thread that runs calls one after the other and is left behind when a call takes too long.

::

    run() --job--> queue --> daemon thread --> result back to the loop of the caller
      waits for    its job to begin, then for its result, at most `limit_s`
      is woken by  the thread; or by the limit, and then another thread takes the rest of the queue

This is the weak way to limit code: Python cannot end a thread, so what is left behind goes on using CPU and memory
until it ends by itself. Worker processes are the strong way.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import anyio

from xrl_lite.judger.outcome import JudgementTimeoutError
from xrl_lite.judger.stopwatch import execution_starts


@dataclass(eq=False)
class _Job:
    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    begun: asyncio.Future[None]
    done: asyncio.Future[Any]
    is_dropped: bool = False


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
        weakref.finalize(self, self._jobs.put, None)  # lets the idle thread end

    async def run(self, call: Callable[[], Any], *, limit_s: float) -> Any:
        """Return what `call` returns. The limit counts from when it begins.

        Raises:
            JudgementTimeoutError: it ran longer; the thread is left behind.
            Exception: what `call` raised.
        """
        loop = asyncio.get_running_loop()
        job = _Job(call, loop, loop.create_future(), loop.create_future())
        worker = self._ensure_worker()
        self._jobs.put(job)
        try:
            await job.begun
            execution_starts()
            with anyio.move_on_after(limit_s):
                return await job.done
        finally:
            job.is_dropped = True
            if not job.done.done() or job.done.cancelled():
                self._leave_behind(job)
            del worker
        raise JudgementTimeoutError(
            f"no reward within {limit_s:g} s (request_timeout). The thread that runs the code cannot be ended and is "
            f"left behind; give the judger cpu_resources to run it in a process that can."
        )

    def __reduce__(self) -> tuple[type[SerialThread], tuple[str]]:
        return SerialThread, (self._name,)

    def _ensure_worker(self) -> _Worker:
        if self._worker is None:
            self._worker = _Worker()
            threading.Thread(target=_work, args=(self._worker, self._jobs), name=self._name, daemon=True).start()
        return self._worker

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


def _work(worker: _Worker, jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        if job.is_dropped:
            continue
        with worker.lock:
            worker.job = job
        _tell(job, job.begun, None)
        try:
            result = job.call()
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the caller gets it
            _fail(job, RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
        except BaseException as error:  # noqa: BLE001 - sys.exit() in user code must not end the run
            exit_error = RuntimeError(f"the reward code raised {error!r}, which would end the process")
            exit_error.__cause__ = error
            _fail(job, exit_error)
        else:
            _tell(job, job.done, result)
        del job
        with worker.lock:
            worker.job = None
            if worker.is_left_behind:
                return


def _tell(job: _Job, future: asyncio.Future[Any], result: Any) -> None:
    with suppress(RuntimeError):  # the loop has ended, nobody waits
        job.loop.call_soon_threadsafe(_set, future, result, None)


def _fail(job: _Job, error: Exception) -> None:
    with suppress(RuntimeError):
        job.loop.call_soon_threadsafe(_set, job.done, None, error)


def _set(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
