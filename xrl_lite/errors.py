"""Every error xrl-lite raises, as one tree. Catch at the level you mean.

::

    XrlLiteError
    ├── ConfigError (ValueError)         a setting, a file or a row is wrong; raised before anything costly starts
    │   ├── UnknownNameError             a registered name that does not exist; lists what exists
    │   ├── DataError                    a data set is missing, empty, or a row lacks something
    │   ├── TemplateError                a chat template refuses messages, or cannot go on from sampled tokens
    │   └── ToolError                    a tool, a file of tools or a server of tools cannot be used
    ├── PluginError                      user code named by a path cannot be loaded
    ├── ResourceError (RuntimeError)     more CPU slots, memory or accelerators asked for than there are
    ├── ActorError                       something about an actor or a call to it
    │   ├── ActorTaskError               the call raised an exception that could not be carried over as itself
    │   ├── ActorTimeoutError (TimeoutError)   the call ran longer than its limit; its process was replaced
    │   ├── ActorDiedError               the process died; says how, and what it last wrote to stderr
    │   ├── ActorUnavailableError        restarts are used up, or the actor was shut down
    │   └── PayloadError (TypeError)     an argument or a result cannot be pickled; says where in the object
    ├── JudgerError                      judging as a whole cannot go on (the first N judgements all failed)
    ├── RolloutError                     generation failed for one request; becomes a FAILED sample
    ├── WeightSyncError                  a replica did not end up with the weights it was sent
    ├── RankError                        a training rank lost the others; names rank and phase
    ├── CheckpointError                  a checkpoint cannot be written or read
    ├── LeaseError                       a group is no longer in the hands of who writes to it; the write is refused
    └── RunError                         the run cannot go on; says why and what to do
        ├── BufferStarvedError           filters and failures leave nothing to train on; has the rewards filtered
        └── StorageError                 what was generated cannot be written to the disk, or not be read back

All of them pickle: an error may be raised in one process and read in another.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from difflib import get_close_matches
from typing import cast


class XrlLiteError(Exception):
    """Base of all errors that xrl-lite raises on purpose."""


class ConfigError(XrlLiteError, ValueError):
    """A setting is wrong. The message names the key, the value given and what is allowed."""


class UnknownNameError(ConfigError):
    """A name that nothing is registered under. The message lists what exists and the closest match."""


class DataError(ConfigError):
    """A data set cannot be used: missing, empty, or a row lacks a column."""


class TemplateError(ConfigError):
    """A chat template refuses messages, or what it renders does not go on from the tokens that were sampled."""


class ToolError(ConfigError):
    """A tool cannot be used: no schema can be made of it, its file is missing, its name is taken."""


class PluginError(XrlLiteError):
    """User code that was named by a path cannot be loaded."""


class ResourceError(XrlLiteError, RuntimeError):
    """More was asked for than the machine has left. The message is a table of who holds what."""


class ActorError(XrlLiteError):
    """Something about an actor, or about a call to it."""

    actor = ""
    """Name of the actor whose end it tells of; empty where it tells of none."""


class ActorTaskError(ActorError):
    """The call raised, and its exception could not be carried to the caller as itself. Has the remote traceback."""


class ActorTimeoutError(ActorError, TimeoutError):
    """The call ran longer than its limit and was ended."""

    is_loop_blocked = False
    """Whether an async method blocked the event loop of the actor at that time: this one, or another beside it."""


class ActorDiedError(ActorError):
    """The actor's process died while the call was running."""


class ActorUnavailableError(ActorError):
    """No process will serve this call: restarts are used up, or the actor was shut down."""


class PayloadError(ActorError, TypeError):
    """An argument or a result cannot be pickled. The message gives the path inside the object."""


class JudgerError(XrlLiteError):
    """Judging as a whole cannot go on."""


class RolloutError(XrlLiteError):
    """Generation failed for one request."""


class WeightSyncError(XrlLiteError):
    """A replica did not end up with the weights that it was sent."""


class RankError(XrlLiteError):
    """A training rank lost the others: one died, raised, or did not come to a collective in time."""


class CheckpointError(XrlLiteError):
    """A checkpoint cannot be written or read."""


class LeaseError(XrlLiteError):
    """A write by a worker whose lease on the group is over: it ran too long, died, or was replaced."""


class RunError(XrlLiteError):
    """The run cannot go on."""


class BufferStarvedError(RunError):
    """Filters and failures take every group, however many are generated."""


class StorageError(RunError):
    """What was generated cannot be kept on the disk, or cannot be read back."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest known name, or an empty string."""
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


@contextmanager
def errors_as_themselves() -> Generator[None]:
    """Raise the error that began it instead of the groups that task groups wrap around it."""
    first: BaseException | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        first = _innermost(group)
    if first is not None:  # raised out here, so that the groups do not become its context
        raise first


def is_being_cancelled() -> bool:
    """Return whether the current task is being cancelled: as a task, or by a scope around it.

    Where it is not, a CancelledError in it comes from awaiting another task that was cancelled.
    """
    import asyncio  # settings are read without them

    import anyio

    task = asyncio.current_task()
    return anyio.current_effective_deadline() == -math.inf or (task is not None and task.cancelling() > 0)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
