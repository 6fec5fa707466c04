"""One system for the whole process, for those who do not want to carry one around."""

from __future__ import annotations

import os
import threading
from typing import Any

from xrl_lite.actors.system import ActorSystem

_lock = threading.Lock()
_current: list[ActorSystem] = []


def _after_fork() -> None:
    """Let a fork have a default system of its own."""
    _current.clear()


os.register_at_fork(after_in_child=_after_fork)


def init(**settings: Any) -> ActorSystem:
    """Make the default system with these settings (see `ActorSystem`).

    Raises:
        RuntimeError: there is one already.
    """
    with _lock:
        if _current:
            raise RuntimeError("The default actor system exists already. Call init() before it is used, or shutdown().")
        _current.append(ActorSystem(**settings))
        return _current[0]


def default_system() -> ActorSystem:
    """Return the default system, making it on first use. It ends at exit."""
    with _lock:
        if not _current:
            _current.append(ActorSystem())
        return _current[0]


def shutdown(grace_s: float = 5.0) -> None:
    """End the default system if there is one; blocks until nothing of it is left."""
    with _lock:
        systems = _current[:]
        _current.clear()
    for system in systems:
        system.shutdown_now(grace_s)
