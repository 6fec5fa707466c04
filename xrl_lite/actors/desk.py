"""Where the calls of one actor are: waiting, with its child, or ended. The path that every call takes.

::

    submit ──(a child serves, a slot is free)──────> with the child ──(reply)──> ended
       └──> queue ──(a slot is free)──────────────────^     │
              ^───(child died, call had not begun)──────────┘

Any thread may submit, and whichever polls the link takes the replies; so everything here is done under one lock.
Futures end outside of it: whoever is told of that may do anything.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from xrl_lite.actors.actor import ENDINGS, Call, CallCounts
from xrl_lite.actors.failure import unpack_failure
from xrl_lite.actors.future import WakeTogether
from xrl_lite.actors.hub import Hub
from xrl_lite.actors.link import Link
from xrl_lite.actors.wire import Frame, FrameReader, Kind
from xrl_lite.errors import ActorError
from xrl_lite.log import get_logger

logger = get_logger(__name__)

MakeError = Callable[[], BaseException]

CONSTRUCTOR = "__init__"

_LOOK_EVERY_S = 0.1
_ENDING_OF = {Kind.RESULT: "ok", Kind.ERROR: "raised", Kind.CANCELLED: "cancelled"}


class Desk:
    """The calls of one actor.

    Args:
        hub: Looks after what lies unread for long.
        name: The actor's name.
        on_constructed: Is told the reply to the constructor (hub thread).
        on_limit: Is told that the limits of the calls want looking at earlier than `next_check` said (hub thread).
        on_idle: Is told that there are no calls, after `tell_idle` (hub thread).
        on_broken: Is told that the link ended or what came could not be read, with the reason (hub thread).
    """

    def __init__(
        self,
        hub: Hub,
        name: str,
        *,
        on_constructed: Callable[[Link, Frame], None],
        on_limit: Callable[[], None],
        on_idle: Callable[[], None],
        on_broken: Callable[[Link, str], None],
    ) -> None:
        self._hub = hub
        self._name = name
        self._on_constructed = on_constructed
        self._on_limit = on_limit
        self._on_idle = on_idle
        self._on_broken = on_broken
        self._lock = threading.RLock()
        self._queue: deque[Call] = deque()
        self._running: dict[int, Call] = {}
        self._link: Link | None = None
        """Where calls go; None while no child serves."""
        self._num_holds = 0
        """Cancellations of which it is not clear yet whether they end the child: nothing more is sent to it."""
        self._refusal: MakeError | None = None
        self._tells_idle = False
        self._next_check = math.inf
        self._submitted = 0
        self._ended = 0
        self._counts = CallCounts()
        self._looked_after = False
        self._submitted_when_looked = 0

    @property
    def pending(self) -> int:
        """Calls that have not ended."""
        return self._submitted - self._ended

    @property
    def num_running(self) -> int:
        """Calls that are with the child."""
        return sum(call.method is not CONSTRUCTOR for call in list(self._running.values()))

    @property
    def counts(self) -> dict[str, int]:
        """How many calls ended how."""
        return {ending: self._counts[ending] for ending in ENDINGS}

    def is_running(self, call: Call) -> bool:
        """Whether the call is with the child."""
        return self._running.get(call.call_id) is call

    def running_calls(self) -> list[Call]:
        """Return the calls that are with the child."""
        with self._lock:
            return list(self._running.values())

    # ------------------------------------------------------------ any thread

    def submit(self, call: Call) -> None:
        """Take a call. It is sent at once where a child serves and nothing waits before it."""
        # the collector may run a user's __del__ in the midst of our own work, and that may call the actor
        if self._lock._is_owned():  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            self._hub.post(self.submit, call)
            return
        with self._lock:
            refusal = self._refusal
            if refusal is None:
                self._submitted += 1
                link = self._link
                if link is None or self._queue or self._num_holds or not link.free_slots:
                    self._queue.append(call)
                else:
                    alone = not self._running
                    self._hand_over(link, call, Kind.CALL)
                    loop = call.home
                    if loop is not link.poller:
                        link.poll_from(loop if loop is not None and alone else self._hub.loop)
                    if alone or loop is None or link.is_due:
                        link.flush()
                    elif not link.flush_due:
                        link.flush_soon(loop, self.flush)
                    if not self._looked_after:
                        self._look_after()
        if refusal is not None:
            call.set_exception(refusal())

    def receive(self, link: Link, reader: FrameReader | None = None) -> bool:
        """Take the replies that have arrived, and send what waited for their slots. Return whether there were any."""
        ended: deque[tuple[Call, Frame]] = deque()
        with self._lock:
            running, counts = self._running, self._counts
            try:
                frames = link.read(reader)
            except EOFError:
                self._hub.post(self._on_broken, link, "it closed its connection to the driver")
                return False
            except Exception:  # whatever it is, nobody may go on waiting for this child
                logger.exception("internal error while reading what actor %s sent", self._name)
                link.read_no_more()
                self._hub.post(self._on_broken, link, "the driver could not read what it sent")
                return False
            for frame in frames:
                call = running.pop(frame.call_id, None)
                if call is None:
                    continue
                link.free_slots.append(call.slot)
                ended.append((call, frame))
                if call.method is not CONSTRUCTOR:
                    self._ended += 1
                    if not call.done():  # counted before it is told: whoever is woken may look at the numbers
                        counts[_ENDING_OF[frame.kind]] += 1
                        call.is_counted = True
            if self._queue and frames and link is self._link and not self._num_holds:
                self._pump(link)
            if self._tells_idle:
                self._look_for_idle()
        if not ended:
            return bool(frames)
        try:
            if link.poller is self._hub.loop:
                with WakeTogether():
                    self._deliver(link, ended)
            else:
                self._deliver(link, ended)
        except BaseException:  # Ctrl-C in a thread: what was taken from the socket must reach its callers all the same
            self._hub.post(self._deliver, link, ended)
            raise
        return True

    def hold(self, call: Call) -> bool:
        """Send nothing more to the child of a call that is being cancelled: it may have to end for that."""
        with self._lock:
            if not self.is_running(call):
                return False
            self._num_holds += 1
            return True

    def flush(self, link: Link) -> None:
        """Send what is queued on the link."""
        with self._lock:
            link.flush()

    # ------------------------------------------------------------------- hub

    def construct(self, link: Link, call: Call) -> None:
        """Send the constructor to a new child, which serves no calls before it has answered."""
        with self._lock:
            self._hand_over(link, call, Kind.INIT)
            link.flush()

    def open(self, link: Link) -> None:
        """Let calls go to this child."""
        with self._lock:
            self._link = link
            self._num_holds = 0
            self._pump(link)

    def send(self, link: Link, kind: Kind) -> None:
        """Tell the child something that is about no call."""
        with self._lock:
            link.tell(kind)

    def close(self, link: Link) -> list[Call]:
        """Read what a dead child has left, and close its link.

        Calls that had not begun wait for its successor. Returns those that had, in the order in which they were sent.
        """
        num_incomplete = -1
        while self.receive(link) or link.num_incomplete != num_incomplete:
            num_incomplete = link.num_incomplete
        with self._lock:
            self._link = None
            link.close()
            running, self._running = sorted(self._running.values(), key=lambda call: call.call_id), {}
            begun: list[Call] = []
            waiting: list[Call] = []
            for call in running:
                has_begun = call.method is CONSTRUCTOR or link.page.started_ns(call.slot)
                (begun if has_begun else waiting).append(call)
            self._queue.extendleft(reversed(waiting))
        return begun

    def again(self, call: Call) -> None:
        """Let a call that was with a dead child wait for the next one, before all others."""
        with self._lock:
            self._counts["retried"] += 1
            self._queue.appendleft(call)

    def fail(self, call: Call, ending: str, error: BaseException) -> None:
        """End a call that is with nobody any more."""
        with self._lock:
            self._ended += 1
            call.is_counted = not call.done()
            self._counts[ending] += call.is_counted
        if not call.set_exception(error):
            self._take_back_count(call, ending)

    def expire(self, call: Call, error: BaseException) -> None:
        """End the future of a call that is with the child, which holds its slot until it has let go of it."""
        with self._lock:
            self._counts["timeout"] += 1
        if not call.set_exception(error):
            with self._lock:
                self._counts["timeout"] -= 1

    def release(self) -> None:
        """The child goes on, so calls may be sent to it again."""
        with self._lock:
            self._num_holds = max(0, self._num_holds - 1)
            if self._link is not None and not self._num_holds:
                self._pump(self._link)

    def was_cancelled(self) -> None:
        """Note that a caller cancelled a call."""
        with self._lock:
            self._counts["cancelled"] += 1

    def refuse(self, make_error: MakeError) -> None:
        """Take no more calls."""
        with self._lock:
            self._refusal = make_error

    def fail_all(self, make_error: MakeError) -> None:
        """Take no more calls, and end all there are."""
        self.refuse(make_error)
        with self._lock:
            self._link = None
            calls = [*self._running.values(), *self._queue]
            self._running.clear()
            self._queue.clear()
            self._look_for_idle()
        for call in calls:
            if call.method is not CONSTRUCTOR:
                self.fail(call, "unavailable", make_error())

    def tell_idle(self) -> None:
        """Call `on_idle` when there are no calls, also if there are none now."""
        with self._lock:
            self._tells_idle = True
            self._look_for_idle()

    def overdue(self, left_s: Callable[[Call], float]) -> tuple[list[Call], float]:
        """Return the calls with the child that have no time left, and after how many seconds to look again."""
        with self._lock:
            lefts = [(left_s(call), call) for call in self._running.values()]
            soonest_s = min((left for left, _ in lefts if left > 0), default=math.inf)
            self._next_check = time.monotonic() + soonest_s
        return [call for left, call in lefts if left <= 0], soonest_s

    def mark_cancelled(self, link: Link, call: Call) -> bool:
        """Tell the child to end a call; False where the call is not with it any more."""
        with self._lock:
            if not self.is_running(call) or not link.open:
                return False
            link.page.cancel(call.slot)
            link.tell(Kind.CANCEL, call.call_id, call.slot)
        return True

    def while_running(self, call: Call, act: Callable[[], None]) -> None:
        """Do something about a call that is with the child, if it is; it stays there meanwhile."""
        with self._lock:
            if self.is_running(call):
                act()

    # --------------------------------------------------------- under the lock

    def _look_after(self) -> None:
        self._looked_after = True
        self._hub.post(self._look)

    def _hand_over(self, link: Link, call: Call, kind: Kind) -> None:
        self._running[call.call_id] = call
        call.slot = link.send(kind, call.call_id, call.packed)
        if call.timeout_s is not None and time.monotonic() + call.timeout_s < self._next_check:
            self._next_check = time.monotonic() + call.timeout_s
            self._hub.post(self._on_limit)

    def _pump(self, link: Link) -> None:
        """Send what waits, as far as there are slots."""
        while self._queue and link.free_slots:
            call = self._queue.popleft()
            if call.done():  # cancelled while it waited
                self._ended += 1
            else:
                self._hand_over(link, call, Kind.CALL)
        link.flush()
        if not self._looked_after:
            self._look_after()

    def _look_for_idle(self) -> None:
        if self._tells_idle and not self._queue and not self._running:
            self._hub.post(self._on_idle)

    # ----------------------------------------------------------- without lock

    def _deliver(self, link: Link, ended: deque[tuple[Call, Frame]]) -> None:
        while ended:
            call, frame = ended[0]
            try:
                self._end(link, call, frame)
            except Exception as error:  # nobody may go on waiting
                logger.exception("internal error while %s() of actor %s ended", call.method, self._name)
                call.set_exception(ActorError(f"The end of {call.label} could not be told: {error!r}"))
            ended.popleft()

    def _end(self, link: Link, call: Call, frame: Frame) -> None:
        if frame.kind is Kind.RESULT and call.method is not CONSTRUCTOR:
            if not call.set_packed(frame.packed):
                self._take_back_count(call, "ok")
        elif call.method is CONSTRUCTOR:
            self._on_constructed(link, frame)
        elif frame.kind is Kind.ERROR:
            error = unpack_failure(frame.packed).error(self._name, call.method)
            if not call.set_exception(error):
                self._take_back_count(call, "raised")
        elif not call.cancel():
            self._take_back_count(call, "cancelled")

    def _take_back_count(self, call: Call, ending: str) -> None:
        """The future ended otherwise in the last moment."""
        if call.is_counted:
            with self._lock:
                self._counts[ending] -= 1

    def _look(self) -> None:
        """Take what lies unread, and send what lies unsent, because a loop is blocked or closed (hub, periodic)."""
        if (link := self._link) is not None:
            self.flush(link)
            self.receive(link)
        with self._lock:
            if self._submitted == self._submitted_when_looked and not self._running:
                self._looked_after = False
                return
            self._submitted_when_looked = self._submitted
        self._hub.loop.call_later(_LOOK_EVERY_S, self._look)
