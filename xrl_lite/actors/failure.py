"""How an exception travels: as itself where it survives pickling both ways, otherwise as a description of it."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass

from xrl_lite.actors.payload import Packed, pack, unpack
from xrl_lite.errors import ActorTaskError, PayloadError


@dataclass(frozen=True, slots=True)
class Failure:
    """What a call raised, made of plain types only, so that it always unpickles."""

    type_name: str
    message: str
    traceback: str
    pickled: Packed | None = None
    """The exception itself."""

    def error(self, actor: str, method: str) -> BaseException:
        """Return the exception to raise at the caller, with the remote traceback as a note."""
        where = f"Raised in actor {actor!r}, {method}():\n{self.traceback.rstrip()}"
        error = self._own()
        if error is not None and add_note(error, where):
            return error
        return ActorTaskError(f"{method}() of actor {actor!r} raised {self.type_name}: {self.message}\n{where}")

    def _own(self) -> Exception | None:
        if self.pickled is None:
            return None
        try:
            error = unpack(self.pickled)
        except Exception:  # noqa: BLE001 a user's class may raise anything while it is rebuilt; the text is kept
            return None
        return error if isinstance(error, Exception) else None


def describe(error: BaseException, *, skip_frames: int = 0) -> Failure:
    """Describe an exception where it was raised. `skip_frames` are ours and say nothing to a user."""
    trace = error.__traceback__
    for _ in range(skip_frames):
        if trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
    text = "".join(traceback.TracebackException(type(error), error, trace).format())
    return Failure(_name(type(error)), _message(error), text, _carry(error))


def add_note(error: BaseException, note: str) -> bool:
    """Add a note to an exception; return False where its class takes none (a frozen dataclass, for one)."""
    try:
        error.add_note(note)
    except Exception:  # noqa: BLE001 a user's __setattr__ may raise anything
        return False
    return True


def _carry(error: BaseException) -> Packed | None:
    # StopIteration cannot leave an `await`, and what is no Exception (KeyboardInterrupt) would end the driver
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        return None
    try:
        packed = pack(error, name="error")
        return packed if isinstance(unpack(packed), type(error)) else None
    except Exception:  # noqa: BLE001 a user's class may raise anything while it is pickled or rebuilt
        return None


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 a user's __str__ may raise anything
        return "(its message cannot be shown)"


def pack_failure(failure: Failure) -> Packed:
    """Pickle a failure; cannot fail."""
    own = failure.pickled
    whole = (failure.type_name, failure.message, failure.traceback)
    # the inner payload keeps its segments by travelling as plain bytes: an exception is small, or it loses its type
    inner = own.body if own is not None and not own.segments else None
    return Packed(pickle.dumps((*(text[-12_000:] for text in whole), inner), 5))


def unpack_failure(packed: Packed) -> Failure:
    """The inverse of `pack_failure`."""
    type_name, message, text, inner = pickle.loads(packed.body)
    return Failure(type_name, message, text, Packed(inner) if inner is not None else None)


def unsendable(error: PayloadError, method: str) -> PayloadError:
    """Say that it was the result of `method` that could not be sent."""
    return PayloadError(f"{method}() returned something that cannot be sent back: {error}")
