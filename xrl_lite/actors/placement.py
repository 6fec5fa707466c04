"""Groups of reserved resources, and the actors that are placed in them.

A group is reserved as a whole or not at all, so that of two components that each start half of their workers neither
waits for the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from xrl_lite.actors.ledger import Claim, Resources
from xrl_lite.actors.machine import MILLI

if TYPE_CHECKING:
    from xrl_lite.actors.system import ActorSystem


@dataclass(frozen=True, slots=True)
class Bundle:
    """One part of a `PlacementGroup`, to be given to ``spawn(..., bundle=group[0])``."""

    name: str
    """``<group>[<index>]``."""

    resources: Resources
    """What was asked for."""

    claim: Claim
    """What was given."""

    kind: str = "GPU"
    """What its accelerators are called in `PlacementGroup.bundle_specs`."""

    @property
    def spec(self) -> dict[str, float]:
        """Its size: ``CPU``, ``memory`` in bytes, and ``GPU`` or ``NPU`` if it has any."""
        sizes = {"CPU": self.claim.milli_cpus / MILLI, "memory": float(self.claim.memory_bytes)}
        return {**sizes, self.kind: float(len(self.claim.accelerators))} if self.claim.accelerators else sizes


class PlacementGroup:
    """Bundles that were reserved together and are released together. Made by `ActorSystem.reserve`.

    As a context manager it is released at the end.
    """

    def __init__(
        self, name: str, system: ActorSystem, bundles: tuple[Bundle, ...], *, on_release: Callable[[], None]
    ) -> None:
        self.name = name
        self.system = system
        self.bundles = bundles
        self.placing = threading.RLock()
        """To be held while somebody chooses a free bundle and places an actor in it."""

        self._on_release = on_release
        self._released = False

    def __repr__(self) -> str:
        return f"<PlacementGroup {self.name} of {len(self)} bundles>"

    def __len__(self) -> int:
        return len(self.bundles)

    def __getitem__(self, index: int) -> Bundle:
        return self.bundles[index]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def bundle_specs(self) -> list[dict[str, float]]:
        """Sizes of its bundles, as `CPUResourceManager` reads them."""
        return [bundle.spec for bundle in self.bundles]

    def release(self) -> None:
        """Give all bundles back at the same moment. May be called twice.

        Nothing can be placed in them any more. Actors in them live on, and hold their own part until they end.
        """
        with self.placing:
            if not self._released:  # its name may be another group's by now
                self._released = True
                self.system.ledger.release_bundles([bundle.name for bundle in self.bundles])
                self._on_release()

    def is_taken(self, index: int) -> bool:
        """Whether a living actor is placed in the bundle."""
        return bool(self.system.ledger.actors_in(self.bundles[index].name))

    def first_free(self, num_bundles: int) -> int:
        """Return the first index at which `num_bundles` bundles in a row hold no actor; len(self) if there is none."""
        taken = [self.is_taken(index) for index in range(len(self))]
        starts = (start for start in range(len(self) - num_bundles + 1) if not any(taken[start : start + num_bundles]))
        return next(starts, len(self))
