"""Who holds how much of what a system may use. Asking for more fails at once, with a table.

::

    machine ──claim──> actor                          given back when the actor ends
       └──reserve──> bundle ──claim──> actor          a group of bundles is reserved and given back as one

CPUs and memory of a bundle are divided among the actors in it. Its accelerators and its pinned cores are not: every
actor in it sees all of them, or those that it names, so that a trainer and an engine can take turns on one accelerator.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from xrl_lite.actors.machine import MILLI, milli_cpus, neighbours, numa_nodes
from xrl_lite.errors import ResourceError

_MOST_ROWS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What one actor, or one bundle, asks for.

    Raises:
        ValueError: a number is negative, or too small to be counted.
    """

    num_cpus: float = 1
    """CPUs; may be a fraction, counted in thousandths. An agreement among actors, no limit of the kernel."""

    memory_bytes: int | None = None
    """Memory, which is also a ceiling: a child that uses more is ended. None for no ceiling, and nothing held."""

    num_accelerators: int = 0
    """Accelerators. An actor sees those that it was given and no other."""

    accelerators: tuple[str, ...] | None = None
    """Which accelerators of its bundle an actor sees, by name; all of them when not given."""

    pin_cpus: bool = False
    """Whether it gets cores that no other pinned actor has, next to each other, and may run on these only."""

    def __post_init__(self) -> None:
        if self.num_cpus < 0 or (self.num_cpus > 0 and milli_cpus(self.num_cpus) == 0):
            raise ValueError(f"num_cpus must be 0 or at least 0.001, got {self.num_cpus}.")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(f"memory_bytes must be positive, got {self.memory_bytes}. Use None for no ceiling.")
        if self.num_accelerators < 0:
            raise ValueError(f"num_accelerators must be at least 0, got {self.num_accelerators}.")
        if self.pin_cpus and (self.num_cpus < 1 or self.num_cpus != int(self.num_cpus)):
            raise ValueError(f"pin_cpus=True gives whole cores, so num_cpus must be one or more; got {self.num_cpus}.")


@dataclass(frozen=True, slots=True)
class Claim:
    """What one actor, or one bundle, holds."""

    milli_cpus: int = 0
    memory_bytes: int = 0
    accelerators: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    def __add__(self, other: Claim) -> Claim:
        return Claim(
            self.milli_cpus + other.milli_cpus,
            self.memory_bytes + other.memory_bytes,
            tuple(dict.fromkeys(self.accelerators + other.accelerators)),
            tuple(dict.fromkeys(self.cores + other.cores)),
        )

    def __sub__(self, other: Claim) -> Claim:
        return Claim(
            self.milli_cpus - other.milli_cpus,
            self.memory_bytes - other.memory_bytes,
            tuple(name for name in self.accelerators if name not in other.accelerators),
            tuple(core for core in self.cores if core not in other.cores),
        )


class Ledger:
    """Claims by name. May be used from any thread."""

    def __init__(self, capacity: Claim) -> None:
        self.capacity = capacity
        self._bundles: dict[str, Claim] = {}
        self._actors: dict[str, tuple[Claim, str]] = {}
        """Claim, and the name of the bundle it is taken from; empty for none."""

        self._lock = threading.Lock()

    @property
    def held(self) -> Claim:
        """The sum of all claims. What an actor holds out of a bundle is in the bundle's."""
        return _sum([*self._bundles.values(), *(claim for claim, bundle in self._actors.values() if not bundle)])

    @property
    def free(self) -> Claim:
        """What nobody holds."""
        return self.capacity - self.held

    def claim(self, name: str, wanted: Resources, *, bundle: str = "") -> Claim:
        """Give to the actor `name`, out of a bundle if one is named.

        Raises:
            ResourceError: not that much is left, or the bundle was given back.
        """
        with self._lock:
            if bundle and bundle not in self._bundles:
                raise ResourceError(f"Actor {name!r} cannot be placed in bundle {bundle!r}: it has been released.")
            granted = self._take_from(bundle, wanted) if bundle else _take(self.free, wanted, self.capacity)
            if granted is None:
                raise ResourceError(self._refusal(f"Actor {name!r}", [wanted], bundle))
            self._actors[name] = granted, bundle
            return granted

    def reserve(self, names: Sequence[str], wanted: Sequence[Resources]) -> list[Claim]:
        """Give to several bundles, to all or to none.

        Raises:
            ResourceError: not that much is left.
        """
        with self._lock:
            granted: list[Claim] = []
            for each in wanted:
                claim = _take(self.free - _sum(granted), each, self.capacity)
                if claim is None:
                    raise ResourceError(self._refusal(f"The group of {names[0]!r}", wanted, ""))
                granted.append(claim)
            self._bundles.update(zip(names, granted, strict=True))
            return granted

    def release(self, name: str) -> None:
        """Give back what the actor `name` holds."""
        with self._lock:
            self._actors.pop(name, None)

    def release_bundles(self, names: Sequence[str]) -> None:
        """Give bundles back, all at the same moment. Actors in them keep what they hold until they end."""
        with self._lock:
            for name in names:
                self._bundles.pop(name, None)
            for actor, (claim, bundle) in self._actors.items():
                if bundle in names:
                    self._actors[actor] = claim, ""

    def actors_in(self, bundle: str) -> list[str]:
        """Return the names of the actors that hold something out of a bundle."""
        with self._lock:
            return [name for name, (_, place) in self._actors.items() if place == bundle]

    def _take_from(self, bundle: str, wanted: Resources) -> Claim | None:
        whole = self._bundles[bundle]
        inside = _sum([claim for claim, place in self._actors.values() if place == bundle])
        # accelerators and cores are the bundle's as a whole
        left = Claim(whole.milli_cpus - inside.milli_cpus, whole.memory_bytes - inside.memory_bytes)
        plain = Resources(num_cpus=wanted.num_cpus, memory_bytes=wanted.memory_bytes)
        granted = _take(left, plain, self.capacity)
        seen = whole.accelerators if wanted.accelerators is None else wanted.accelerators
        if granted is None or wanted.num_accelerators > len(seen) or not set(seen).issubset(whole.accelerators):
            return None
        if wanted.pin_cpus and not whole.cores:
            return None
        return Claim(granted.milli_cpus, granted.memory_bytes, seen, whole.cores)

    def _refusal(self, who: str, wanted: Sequence[Resources], bundle: str) -> str:
        head = f"{who} asks for {' + '.join(_words(each) for each in _distinct(wanted))}, "
        if bundle:
            whole = self._bundles[bundle]
            inside = [(name, claim) for name, (claim, place) in self._actors.items() if place == bundle]
            left = Claim(
                whole.milli_cpus - sum(claim.milli_cpus for _, claim in inside),
                whole.memory_bytes - sum(claim.memory_bytes for _, claim in inside),
            )
            rows = [*inside, ("free", left), (f"bundle {bundle}", whole)]
            return f"{head}which its bundle has not free:\n{_table(rows)}\nAsk for less, or reserve a larger bundle."
        rows: list[tuple[str, Claim]] = []
        for name, claim in self._bundles.items():
            rows.append((f"bundle {name}", claim))
            rows += [(f"  {actor}", part) for actor, (part, place) in self._actors.items() if place == name]
        rows += [(name, claim) for name, (claim, place) in self._actors.items() if not place]
        rows += [("free", self.free), ("total", self.capacity)]
        return (
            f"{head}which are not free:\n{_table(rows)}\n"
            f"Ask for less (num_cpus may be a fraction), stop an actor, or raise ActorSystem(num_cpus=...)."
        )


def _sum(claims: Sequence[Claim]) -> Claim:
    total = Claim()
    for claim in claims:
        total += claim
    return total


def _take(free: Claim, wanted: Resources, order: Claim) -> Claim | None:
    """Choose what to give out of `free`; None if that is not enough."""
    cpus, memory = milli_cpus(wanted.num_cpus), wanted.memory_bytes or 0
    num_cores = int(wanted.num_cpus) if wanted.pin_cpus else 0
    if cpus > free.milli_cpus or (memory > 0 and memory > free.memory_bytes):
        return None
    if wanted.num_accelerators > len(free.accelerators) or num_cores > len(free.cores):
        return None
    cores = neighbours(free.cores, num_cores, order.cores, numa_nodes() if num_cores else ())
    return Claim(cpus, memory, neighbours(free.accelerators, wanted.num_accelerators, order.accelerators), cores)


def _distinct(wanted: Sequence[Resources]) -> list[tuple[int, Resources]]:
    return [(wanted.count(each), each) for each in dict.fromkeys(wanted)]


def _words(counted: tuple[int, Resources]) -> str:
    count, each = counted
    parts = [f"{each.num_cpus:g} {'pinned ' if each.pin_cpus else ''}CPUs"]
    parts.append(f"{(each.memory_bytes or 0) / 2**20:.0f} MB of memory")
    if each.accelerators:
        parts.append(f"accelerators {','.join(each.accelerators)}")
    elif each.num_accelerators:
        parts.append(f"{each.num_accelerators} accelerators")
    words = f"{', '.join(parts[:-1])} and {parts[-1]}"
    return words if count == 1 else f"{count} x ({words})"


def _table(holders: Sequence[tuple[str, Claim]]) -> str:
    rows = [("", "CPUs", "memory (MB)", "accelerators", "pinned cores")]
    rows += [(holder, *_cells(claim)) for holder, claim in holders]
    if len(rows) > _MOST_ROWS:
        hidden = len(rows) - _MOST_ROWS
        rows[_MOST_ROWS - 3 : -3] = [(f"... {hidden} more", "", "", "", "")]
    used = [column for column in range(5) if column < 3 or any(row[column] not in ("", "-") for row in rows[1:])]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  " + "  ".join([row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in used[1:])])
        for row in rows
    )


def _cells(claim: Claim) -> tuple[str, str, str, str]:
    return (
        f"{claim.milli_cpus / MILLI:g}",
        f"{claim.memory_bytes / 2**20:.0f}",
        ",".join(claim.accelerators) or "-",
        ",".join(map(str, claim.cores)) or "-",
    )
