"""Turns objects into bytes and back: pickle protocol 5 for data, cloudpickle for code, segments for large buffers.

``pack`` runs in the process and thread that sends, so an object that cannot be pickled is refused right there.
"""

from __future__ import annotations

import io
import itertools
import pickle
import struct
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import cloudpickle
from cloudpickle import cloudpickle as cloudpickle_impl

from xrl_lite.actors.culprit import locate
from xrl_lite.actors.segments import HEADER_BYTES, THRESHOLD_BYTES, BlockPool, Segment, end_of, place
from xrl_lite.actors.tensors import DispatchTable, tensor_reducers
from xrl_lite.errors import PayloadError

MAX_SHARED = 100
"""Shared values and handles in one message: the kernel carries about twice as many descriptors."""

_PROTOCOL = 5
_PLACE = struct.Struct("<QQ")
_TABLE = struct.Struct("<QI?")
_STACK_GLOBAL = 0x93
NameParts = Callable[[], Mapping[str, object]]

_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError, NotImplementedError)

_blocks = BlockPool()


@dataclass(slots=True)
class Packed:
    """A pickled object, ready to be sent. Never changed; not frozen, since that doubles the cost of making one."""

    body: bytes
    """The pickle itself; or, where `own_segment`, the place of the table inside the segment."""

    segments: tuple[Segment, ...] = ()
    """Shared memory that goes along: the object's own first, then that of `SharedValue`s inside it."""

    own_segment: bool = False
    """Whether the pickle and its large buffers lie in the first segment."""

    @property
    def size_bytes(self) -> int:
        """Bytes that this payload occupies."""
        return len(self.body) + sum(segment.size_bytes for segment in self.segments)


class SharedValue:
    """An object that was pickled once and may be sent to any number of actors without another copy.

    Make one with `share`. Pass it as an argument, or return it from a method: only a descriptor travels. `get` gives
    the object back; its tensors and arrays lie in shared memory. Writing to them changes only the reader's own copy.
    """

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    @property
    def size_bytes(self) -> int:
        """Bytes of shared memory behind the value."""
        return self._packed.size_bytes

    def get(self) -> Any:
        """Return the object. Each call gives new views of the same memory."""
        return unpack(self._packed)

    def __reduce__(self) -> tuple[Any, ...]:
        places = [send_along(segment) for segment in self._packed.segments]
        return _shared_value, (self._packed.body, places, self._packed.own_segment)


def share(value: object) -> SharedValue:
    """Pickle `value` once, so that it can be sent to many actors, or sent on, without copying it again."""
    return SharedValue(pack(value, name="value", once=False))


@dataclass(slots=True)
class _Travelling:
    """The segments that go with the payload which a thread is packing or unpacking."""

    collected: list[Segment] | None = None
    received: tuple[Segment, ...] = ()


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.travelling = _Travelling()


_this_thread = _PerThread()


def send_along(segment: Segment) -> int:
    """Let a descriptor travel with the object that is being pickled; return its place, for `came_along`.

    Raises:
        PicklingError: whoever pickles is not an actor's call or result, so there is nothing to travel with.
    """
    collected = _this_thread.travelling.collected
    if collected is None:
        raise pickle.PicklingError("SharedValues and handles can only be sent through an actor's call or result")
    collected.append(segment)
    return len(collected) - 1


def came_along(place: int) -> Segment:
    """Return the descriptor that came with the object that is being unpickled."""
    return _this_thread.travelling.received[place]


def _shared_value(body: bytes, places: list[int], own_segment: bool) -> SharedValue:
    return SharedValue(Packed(body, tuple(map(came_along, places)), own_segment))


def pack(value: object, *, name: str, names: NameParts | None = None, code: bool = False, once: bool = True) -> Packed:
    """Pickle `value`.

    Args:
        value: What to pickle.
        name: What an error calls the value.
        names: Gives the parts of `value` by the names an error should use (parameter names of a call).
        code: The value holds classes or functions to be carried by value, so start with cloudpickle.
        once: It is unpickled once at most, so that its large buffers may lie in memory that is used again.

    Raises:
        PayloadError: something in it cannot be pickled; the message says where.
    """
    travelling = _this_thread.travelling
    outer = travelling.collected
    if outer is None and not code and not _reducers and "torch" not in sys.modules:
        # most payloads hold neither tensors nor large buffers nor code, and take no longer than pickle itself
        found: list[pickle.PickleBuffer] = []
        try:
            data = pickle.dumps(value, _PROTOCOL, buffer_callback=found.append)
        except _UNPICKLABLE:
            pass
        else:
            if not found and len(data) <= THRESHOLD_BYTES and not _needs_code(data):
                return Packed(data)
    collected: list[Segment] = []
    travelling.collected = collected
    try:
        return _pack_carefully(value, collected, code=code, once=once)
    except _UNPICKLABLE as error:
        _refuse(error, names() if names is not None else {name: value})
    finally:
        travelling.collected = outer


def _pack_carefully(value: object, collected: list[Segment], *, code: bool, once: bool) -> Packed:
    buffers: list[memoryview] = []
    data = _dumps(value, buffers, collected, code=code)
    if len(collected) > MAX_SHARED:
        raise PayloadError(
            f"A message may carry at most {MAX_SHARED} shared values, got {len(collected)}. Share them as one."
        )
    if not buffers and len(data) <= THRESHOLD_BYTES:
        return Packed(data, tuple(collected))
    segment, body = _write([memoryview(data), *buffers], lent=once)
    return Packed(body, (segment, *collected), own_segment=True)


def _write(parts: list[memoryview], *, lent: bool) -> tuple[Segment, bytes]:
    """Write the pickle, its buffers, and a table of where they lie; return also what tells where the table lies."""
    places = place([part.nbytes for part in parts], HEADER_BYTES if lent else 0)
    table = b"".join(itertools.starmap(_PLACE.pack, places))
    table_place = place([len(table)], end_of(places))
    write = _blocks.write if lent else Segment.write
    segment = write([*parts, memoryview(table)], places + table_place)
    return segment, _TABLE.pack(table_place[0][0], len(places), lent)


def is_lent(body: bytes) -> bool:
    """Whether the own segment that goes with `body` is lent."""
    return _TABLE.unpack(body)[2]


def unpack(packed: Packed) -> Any:
    """Return the object. Large buffers in it are views of shared memory that nobody else writes to."""
    if not packed.segments:
        return pickle.loads(packed.body)
    travelling = _this_thread.travelling
    outer = travelling.received
    try:
        if not packed.own_segment:
            travelling.received = packed.segments
            return pickle.loads(packed.body)
        travelling.received = packed.segments[1:]
        start, count, lent = _TABLE.unpack(packed.body)
        memory = packed.segments[0].borrow() if lent else packed.segments[0].view()
        places = [_PLACE.unpack_from(memory, start + index * _PLACE.size) for index in range(count)]
        parts = [memory[offset : offset + length] for offset, length in places]
        return pickle.loads(parts[0], buffers=parts[1:])
    finally:
        travelling.received = outer


_reducers = DispatchTable()


class _DataPickler(pickle.Pickler):
    dispatch_table = _reducers


class _CodePickler(cloudpickle.Pickler):
    pass


def _learn_tensors() -> bool:
    if not _reducers:
        _reducers.update(reducers := tensor_reducers())
        if reducers:
            base = cast("Any", cloudpickle.Pickler).dispatch_table
            cast("Any", _CodePickler).dispatch_table = ChainMap(dict(reducers), base)
    return bool(_reducers)


def _needs_code(data: bytes) -> bool:
    """Whether the pickle names something in ``__main__``, which is another module in the process that reads it.

    Or in a module that `cloudpickle.register_pickle_by_value` was told of.
    """
    # looking for one byte first: it is ten times faster than looking for the word, and plain data has no such byte
    if _STACK_GLOBAL not in data:
        return False
    return b"__main__" in data or bool(cast("Any", cloudpickle_impl).list_registry_pickle_by_value())


def _dumps(value: object, buffers: list[memoryview], collected: list[Segment], *, code: bool) -> bytes:
    def take(buffer: pickle.PickleBuffer) -> bool:
        """Let large buffers travel outside the pickle."""
        raw = buffer.raw()
        if raw.nbytes < THRESHOLD_BYTES:
            return True
        buffers.append(raw)
        return False

    _learn_tensors()
    if not code:
        file = io.BytesIO()
        try:
            _DataPickler(file, _PROTOCOL, buffer_callback=take).dump(value)
            if not _needs_code(data := file.getvalue()):
                return data
        except _UNPICKLABLE:
            pass
        buffers.clear()
        collected.clear()
    file = io.BytesIO()
    pickler: Any = cast("Any", _CodePickler)(file, _PROTOCOL, buffer_callback=take)
    pickler.dump(value)
    return file.getvalue()


def pickles(value: object) -> bool:
    """Whether `value` could be sent."""
    travelling = _this_thread.travelling
    outer = travelling.collected
    collected: list[Segment] = []
    travelling.collected = collected
    try:
        _dumps(value, [], collected, code=False)
    except Exception:  # noqa: BLE001 whatever a user's __reduce__ raises means no
        return False
    finally:
        travelling.collected = outer
    return True


def _refuse(error: Exception, parts: Mapping[str, object]) -> NoReturn:
    name = next((name for name, part in parts.items() if not pickles(part)), next(iter(parts), "value"))
    path, culprit = locate(parts.get(name), name, pickles)
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
    raise PayloadError(
        f"{path} cannot be sent to another process: {kind} does not pickle ({error}). Leave it out, or make it inside "
        f"the actor, or give its class __getstate__ and __setstate__ that do without it."
    ) from error
