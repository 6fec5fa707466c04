"""An actor as seen from a process that got its handle: it is called, and not owned."""

from __future__ import annotations

from typing import Any, NoReturn

from xrl_lite.actors.actor import ActorSpec, DeathCallback, cut_off
from xrl_lite.actors.forks import tell_forks
from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.payload import Packed
from xrl_lite.actors.restart import NEVER
from xrl_lite.errors import ActorError


class BorrowedActor:
    """What is the same whichever way the calls take. Its class is not known here, so neither are its methods."""

    def __init__(self, name: str, max_pending: int) -> None:
        self._spec = ActorSpec(
            name=name,
            cls=_unknown_class,
            construction=Packed(b""),
            num_cpus=0,
            memory_bytes=None,
            num_threads=1,
            max_concurrency=1,
            max_pending=max_pending,
            restart=NEVER,
            on_cancel="kill",
            env={},
            preload=(),
            start_timeout_s=0,
        )
        tell_forks(self)

    @property
    def spec(self) -> ActorSpec:
        return self._spec

    @property
    def pid(self) -> int | None:
        return None

    @property
    def restarts(self) -> int:
        return 0

    def ready(self) -> CallFuture[None]:
        """End at once: every call tells what the constructor raised."""
        future: CallFuture[None] = CallFuture(f"ready() of actor {self._spec.name!r}")
        future.set_result(None)
        return future

    def stop(self, grace_s: float) -> Any:
        self._refuse("stop")

    def kill(self) -> None:
        self._refuse("kill")

    def on_death(self, callback: DeathCallback) -> None:
        self._refuse("watch")

    def after_fork(self) -> None:
        cut_off(self, self._spec.name)

    def _refuse(self, verb: str) -> NoReturn:
        raise ActorError(f"Only the process that spawned actor {self._spec.name!r} can {verb} it.")


def _unknown_class() -> None:
    """Stands for the class of an actor that lives elsewhere."""
