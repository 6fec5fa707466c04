"""Where a child's output goes: straight into a file, so that no amount of it can block anybody."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import tempfile
from pathlib import Path

TAIL_LINES = 50
_TAIL_BYTES = 64 * 1024
_RELAY_LINES = 100
_RELAY_BYTES = 64 * 1024
_KEEP_BYTES = 1 << 20
_FORGET_BYTES = 8 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_fallocate = ctypes.CDLL(None).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]


class ActorLog:
    """The output of all incarnations of one actor. Without a folder it is a nameless file, gone with the actor."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self.path = folder / f"{safe_name(name)}.log" if folder is not None else None
        flags = os.O_APPEND | os.O_RDWR
        if self.path is None:
            self.fd = _nameless_file()
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(self.path, flags | os.O_CREAT, 0o644)
        self._start = self._relayed = self._forgotten = self.size_bytes

    @property
    def size_bytes(self) -> int:
        """Length of the file, 0 once it is closed."""
        return os.fstat(self.fd).st_size if self.fd >= 0 else 0

    def begin(self) -> None:
        """A new incarnation starts: what was written before is not part of its last lines."""
        self._start = self.size_bytes

    def tail(self, *, since: int | None = None) -> str:
        """Return the last lines of this incarnation, or of what was written after position `since`."""
        end = self.size_bytes
        start = max(self._start if since is None else since, end - _TAIL_BYTES, 0)
        text = self._read(start, end - start).decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def news(self, *, last: bool = False) -> list[str]:
        """Return the lines written since it was asked last, so many of them that a flood stays bearable.

        Args:
            last: Nothing more will be written, so an unfinished line counts as well.
        """
        end = self.size_bytes
        self._relayed = min(self._relayed, end)  # somebody may have cut it
        data = self._read(self._relayed, min(end - self._relayed, _RELAY_BYTES))
        if not last and len(data) < _RELAY_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        lines = data.decode("utf-8", "replace").splitlines()[:_RELAY_LINES]
        left = end - self._relayed - len(data)
        self._relayed += len(data)
        if left > _RELAY_BYTES:
            self._relayed += left
            lines.append(f"... {left} bytes more" + (f", see {self.path}" if self.path is not None else ""))
        return lines

    def _read(self, start: int, count: int) -> bytes:
        return os.pread(self.fd, count, start) if self.fd >= 0 and count > 0 else b""

    def forget_old(self) -> None:
        """Give back the space of what a nameless file holds beyond its end; all positions stay what they are."""
        size = self.size_bytes
        if self.path is None and size - self._forgotten > _KEEP_BYTES + _FORGET_BYTES:
            begin, end = self._forgotten, (size - _KEEP_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
            if _fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, begin, end - begin) == 0:
                self._forgotten = end

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def safe_name(name: str) -> str:
    """Turn an actor's name into a relative path: ``judger/0`` stays a folder and a file, nothing leads out of it."""
    parts = [re.sub(r"[^\w.#:=+-]", "_", part) for part in name.split("/")]
    return "/".join(part for part in parts if part.strip(".")) or "actor"


def _nameless_file() -> int:
    folder = tempfile.gettempdir()
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_APPEND, 0o600)
    except OSError:  # not every file system has it
        fd, name = tempfile.mkstemp(prefix="xrl-lite-", dir=folder)
        os.unlink(name)
        return fd
