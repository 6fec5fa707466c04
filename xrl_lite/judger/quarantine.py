"""Payloads that hung or killed their workers, and are not run a third time.

The same response may be judged again: when a group is run again because of a sibling, or by evaluation. What has ended
two workers would most likely end the next one, and each costs the limit of a judgement.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import cloudpickle

from xrl_lite.errors import ActorDiedError, ActorTimeoutError
from xrl_lite.judger.ledger import Statistics
from xrl_lite.log import get_logger

logger = get_logger(__name__)

MAX_ENDED = 2
"""Workers that a payload may end."""

_KEPT = 1000
_SHOWN = 200


@dataclass
class _Case:
    num_ended: int = 0
    error: type[Exception] = ActorDiedError


class Quarantine:
    """Remembers what ended workers.

    Args:
        judger: Name of the judger, for messages.
    """

    def __init__(self, judger: str) -> None:
        self._judger = judger
        self._cases: OrderedDict[bytes, _Case] = OrderedDict()

    @property
    def num_closed(self) -> int:
        """How many payloads are not run any more."""
        return sum(case.num_ended >= MAX_ENDED for case in self._cases.values())

    def check(self, payload: Any) -> None:
        """Let a payload pass.

        Raises:
            ActorTimeoutError, ActorDiedError: it has ended too many workers; the kind of its last end.
        """
        if not self._cases:  # nearly always
            return
        case = self._cases.get(_digest(payload))
        if case is not None and case.num_ended >= MAX_ENDED:
            raise case.error(f"not run again: this very payload has ended {case.num_ended} workers before")

    def note(self, payload: Any, error: Exception, *, num_ended: int) -> None:
        """Note that a payload ended workers."""
        key = _digest(payload)
        case = self._cases.setdefault(key, _Case())
        self._cases.move_to_end(key)
        case.num_ended += num_ended
        case.error = ActorTimeoutError if isinstance(error, ActorTimeoutError) else ActorDiedError
        if case.num_ended >= MAX_ENDED:
            logger.warning(
                "judger %r: a payload has ended %d workers and is not run again: %s",
                self._judger,
                case.num_ended,
                repr(payload)[:_SHOWN],
            )
        while len(self._cases) > _KEPT:
            self._cases.popitem(last=False)


def with_quarantine(statistics: Statistics, quarantine: Quarantine) -> Statistics:
    """Return statistics with the count of payloads that are not run any more, since the start."""
    return {name: {**values, "poisoned": quarantine.num_closed} for name, values in statistics.items()}


def _digest(payload: Any) -> bytes:
    # as it takes what travels to workers, lambdas included
    data = cloudpickle.dumps(payload, protocol=5)  # pyright: ignore[reportUnknownMemberType]
    return hashlib.blake2b(data, digest_size=16).digest()
