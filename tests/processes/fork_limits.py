"""Preloaded by a fork server, it lets forks fail while there is a file, as they do for a user with many processes."""

from __future__ import annotations

import errno
import os

NO_FORKS_WHILE = "TESTS_NO_FORKS_WHILE"

_fork = os.fork


def _limited_fork() -> int:
    if os.path.exists(os.environ.get(NO_FORKS_WHILE, "")):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()


os.fork = _limited_fork
