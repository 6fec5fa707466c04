"""What a process that this one forks must not do with what it inherits.

A fork (``os.fork``, multiprocessing's "fork", the workers of a ``DataLoader``) has the same sockets and the same shared
memory as its parent, and none of its threads. So whatever speaks or writes on them is told, in the fork, to leave that.
"""

from __future__ import annotations

import os
import weakref
from typing import NoReturn, Protocol

from xrl_lite.errors import ActorError


class Inherited(Protocol):
    """Something that a fork inherits and must not use."""

    def after_fork(self) -> None:
        """Let go, in the new process."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def tell_forks(thing: Inherited) -> None:
    """Call ``thing.after_fork()`` in every process that this one forks from now on, as long as it is referred to."""
    _inherited.add(thing)


def refuse(what: str) -> NoReturn:
    """Say that something cannot be done in a fork.

    Raises:
        ActorError: always.
    """
    raise ActorError(
        f"{what} in process {os.getpid()}, which was forked (os.fork, multiprocessing, DataLoader) from the one that "
        "can: both would speak on the same connection. Call it in the parent and pass the result on, or start the "
        "process as an actor and give it the handle."
    )


def _tell_all() -> None:
    for thing in list(_inherited):
        thing.after_fork()


os.register_at_fork(after_in_child=_tell_all)
