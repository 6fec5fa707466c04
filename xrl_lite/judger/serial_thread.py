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
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from xrl_lite.judger.company import Case, hand_over
from xrl_lite.judger.loop_local import LoopLocal
from xrl_lite.judger.outcome import JudgementTimeoutError, ended_by
from xrl_lite.judger.stopwatch import Item, running_stopwatch, unwrap
from xrl_lite.log import get_logger

logger = get_logger(__name__)


@dataclass(eq=False, slots=True)
class Job:
    """A call in line or at work."""

    call: Callable[[Any], Any]
    argument: Any
    limit_s: float
    future: asyncio.Future[Any]
    mail: _Mail
    case: Case | None = None
    began: float | None = None
    is_over: bool = False


class _Mail:
    """Results on their way to one loop. The thread wakes the loop once for all that it has not fetched yet.

    One timer watches over the job that runs: it looks when that job's limit is over, and if another has begun since, at
    the end of that one's. A job whose own loop has ended is watched by the next one.
    """

    num_expected = 0
    """Jobs in line or under way."""

    def __init__(self, thread: weakref.ref[SerialThread]) -> None:
        self._thread = thread
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._ended: deque[tuple[Job, Item]] = deque()
        self._is_announced = False
        self._is_watching = False

    def watch(self, limit_s: float) -> None:
        if not self._is_watching:
            self._watch_again(limit_s, limit_s)

    def close(self, job: Job) -> None:
        job.is_over = True
        self.num_expected -= 1

    def post(self, job: Job, item: Item) -> None:
        """Called by the thread."""
        self._ended.append((job, item))
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
            job, item = self._ended.popleft()
            if not job.is_over:
                self.close(job)
                hand_over(job.future, item, job.case)

    @property
    def is_void(self) -> bool:
        """Whether its loop has ended, so that nobody watches over its jobs."""
        loop = self._loop()
        return loop is None or loop.is_closed()

    def _look(self, limit_s: float) -> None:
        self._is_watching = False
        thread = self._thread()
        left_s = limit_s
        if thread is not None:
            thread.go_on()
            job = thread.running
            if job is not None and job.began is not None and (job.mail is self or job.mail.is_void):
                run_s = perf_counter() - job.began
                left_s = job.limit_s - run_s
                if left_s <= 0:
                    thread.end(job, run_s)
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
    running: Job | None = None
    """Set by the thread."""


class SerialThread:
    """Runs calls in one daemon thread at a time, in the order they come. Starts on first use; pickles as a new one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._worker: _Worker | None = None
        self._replacing = threading.Lock()  # several loops may ask at the same time
        self._mail: LoopLocal[_Mail] = LoopLocal(partial(_Mail, weakref.ref(self)))
        weakref.finalize(self, self._jobs.put, None)  # lets the idle thread end

    async def run(self, call: Callable[[Any], Any], argument: Any, *, limit_s: float) -> Any:
        """Return ``call(argument)``. The limit counts from when it begins.

        Raises:
            JudgementTimeoutError: it ran longer; the thread is left behind.
            Exception: what `call` raised.
        """
        watch = running_stopwatch()
        job = self.put(call, argument, limit_s=limit_s)
        try:
            item = await job.future
        except BaseException:
            self.drop(job)
            if job.began is not None:
                watch.took(perf_counter() - job.began)
            raise
        return unwrap(item, watch)

    def put(self, call: Callable[[Any], Any], argument: Any, *, limit_s: float, case: Case | None = None) -> Job:
        """Get a call in line; its future gets what comes of it, see `hand_over`. Who waits no longer must `drop` it."""
        if self._worker is None:
            self._start_worker()
        loop = asyncio.get_running_loop()
        mail = self._mail.get(loop)
        job = Job(call, argument, limit_s, loop.create_future(), mail, case)
        mail.num_expected += 1
        mail.watch(limit_s)
        self._jobs.put(job)
        return job

    def drop(self, job: Job) -> None:
        """Have a call in line passed over; leave the thread behind that is at work on it."""
        if not job.is_over:
            job.mail.close(job)
            self._leave_behind(job)
            self.go_on()

    @property
    def running(self) -> Job | None:
        """The call at work."""
        return None if self._worker is None else self._worker.running

    def end(self, job: Job, run_s: float) -> None:
        """End a call that has run too long, if it still runs."""
        if self._leave_behind(job):
            job.mail.close(job)
            hand_over(job.future, (_too_long(job.limit_s), False, run_s), job.case)
            self.go_on()

    def go_on(self) -> None:
        """Start a thread for those in line where the last one was left behind; later, if that cannot be now."""
        try:
            self._start_worker()
        except RuntimeError as error:
            logger.warning("%s: no thread can be started at the moment: %s", self._name, error)

    def __reduce__(self) -> tuple[type[SerialThread], tuple[str]]:
        return SerialThread, (self._name,)

    def _start_worker(self) -> None:
        with self._replacing:
            if self._worker is None:
                worker = _Worker()
                threading.Thread(target=_work, args=(worker, self._jobs), name=self._name, daemon=True).start()
                self._worker = worker

    def _leave_behind(self, job: Job) -> bool:
        """Leave the thread behind that is at work on a call; return whether one is."""
        with self._replacing:
            worker = self._worker
            if worker is None:
                return False
            with worker.lock:
                if worker.running is not job:  # it waits in line still, or has just ended
                    return False
                worker.running = None
                worker.is_left_behind = True
            self._worker = None
            return True


def _too_long(limit_s: float) -> JudgementTimeoutError:
    return JudgementTimeoutError(
        f"no reward within {limit_s:g} s (request_timeout). The thread that runs the code cannot be ended and is left "
        f"behind; give the judger cpu_resources to run it in a process that can."
    )


def _work(worker: _Worker, jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        worker.running = job  # first: who drops it from now on leaves this thread behind
        item = None if job.is_over else _run(job)
        with worker.lock:
            if worker.is_left_behind:
                return
            worker.running = None
        if item is not None:
            job.mail.post(job, item)
        del job, item


def _run(job: Job) -> Item:
    job.began = began = perf_counter()
    try:
        output = job.call(job.argument)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the caller gets it
        return error, False, perf_counter() - began
    except BaseException as error:  # noqa: BLE001 - sys.exit() in user code must not end the run
        return ended_by(error), False, perf_counter() - began
    return output, True, perf_counter() - began
