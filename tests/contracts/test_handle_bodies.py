"""Actors that the handle contract calls. A module of its own, so that a child that runs them imports no pytest."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any


class BadlyPickledError(Exception):
    """Pickles, but does not unpickle: its constructor wants two arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class OwnError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class FrozenError(Exception):
    """An exception that takes no notes."""

    code: int


class HardToRebuild:
    """Pickles, and does not unpickle."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> Any:
    raise ValueError("cannot be rebuilt")


class Stateful:
    def __init__(self, start: int = 0, *, path: str = "") -> None:
        if start < 0:
            raise OwnError(f"start must not be negative, got {start}")
        self.value = start
        self.log: list[Any] = []
        self.path = path

    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    def note(self, item: Any) -> None:
        self.log.append(item)

    def notes(self) -> list[Any]:
        return self.log

    def echo(self, value: Any) -> Any:
        return value

    def call(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def is_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def raise_own(self) -> None:
        raise OwnError("mine")

    def raise_frozen(self, code: int) -> None:
        raise FrozenError(code)

    def hard_to_rebuild(self) -> HardToRebuild:
        return HardToRebuild()

    def raise_badly_pickled(self) -> None:
        raise BadlyPickledError(1, 2)

    def raise_local(self) -> None:
        class LocalError(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("no")

        raise LocalError("cannot travel")

    def raise_keyboard_interrupt(self) -> None:
        raise KeyboardInterrupt

    def raise_stop_iteration(self) -> None:
        raise StopIteration(3)

    def exit(self, code: Any) -> None:
        sys.exit(code)

    def exit_unless(self, path: str, times: int) -> int:
        """Die, unless that has been done `times` times."""
        with open(path, "a+") as file:
            file.write("x")
            file.seek(0)
            tries = len(file.read())
        if tries <= times:
            sys.exit(1)
        return tries

    def return_lock(self) -> Any:
        return {"inner": [threading.Lock()]}

    def wait(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def touch(self, path: str, seconds: float = 0.0) -> None:
        with open(path, "a") as file:
            file.write("begun\n")
        time.sleep(seconds)
        with open(path, "a") as file:
            file.write("done\n")

    def pid_of_process(self) -> int:
        return os.getpid()


class Caller:
    """Calls another actor, whose handle it was given."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def add(self, amount: int) -> int:
        return await self.handle.add.remote(amount)

    async def pass_on(self, value: Any) -> Any:
        return await self.handle.echo.remote(value)

    async def fail(self) -> None:
        await self.handle.raise_own.remote()

    async def too_long(self, seconds: float) -> None:
        await self.handle.wait.options(timeout_s=0.1).remote(seconds)

    async def give_handle(self) -> Any:
        return self.handle

    async def stop_it(self) -> None:
        self.handle.kill()


class ForeverCaller:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def forever(self) -> None:
        await self.handle.forever.remote()


class SyncCaller:
    def add(self, handle: Any, amount: int) -> int:
        return handle.add.remote(amount).result(20.0)


class Concurrent:
    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.cancelled = 0
        self.gate = asyncio.Event()

    async def meet(self, count: int) -> int:
        """Return when `count` calls have been inside at the same time."""
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running >= count:
            self.gate.set()
        await self.gate.wait()
        self.running -= 1
        return self.most

    async def forever(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def meet_by_sync(self, count: int) -> Any:
        return self.meet(count)

    def forever_by_sync(self) -> Any:
        async def forever() -> None:
            self.running += 1
            await self.forever()

        return forever()

    async def count_running(self) -> int:
        return self.running

    async def count_cancelled(self) -> int:
        return self.cancelled

    async def echo(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    async def echo_when_told(self, value: Any) -> Any:
        if value == "raise":
            raise OwnError("told to")
        if value == "long":
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return value

    async def tell(self) -> None:
        self.gate.set()

    async def raise_own(self) -> None:
        raise OwnError("mine")

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    async def exit(self, code: int) -> None:
        sys.exit(code)

    def sync(self) -> bool:
        return threading.current_thread() is threading.main_thread()


class Ordered:
    """Sync and async methods that note when they begin."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = asyncio.Event()

    def sync(self, name: str, seconds: float = 0.0) -> None:
        self.begun.append(name)
        time.sleep(seconds)

    async def quick(self, name: str) -> None:
        self.begun.append(name)

    async def until_told(self, name: str) -> None:
        self.begun.append(name)
        self.loop = asyncio.get_running_loop()
        await self.gate.wait()

    def tell_sync(self) -> None:
        self.loop.call_soon_threadsafe(self.gate.set)

    async def tell(self) -> None:
        self.gate.set()

    async def noted(self) -> list[str]:
        return self.begun
