"""Who holds how much of what a system may use. Asking for more fails at once, with a table."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from xrl_lite.actors.machine import MILLI, milli_cpus
from xrl_lite.errors import ResourceError


@dataclass(frozen=True, slots=True)
class Claim:
    """What one actor holds."""

    milli_cpus: int
    memory_bytes: int


class Ledger:
    """Claims by name. May be used from any thread."""

    def __init__(self, *, capacity_milli_cpus: int, capacity_memory_bytes: int) -> None:
        self.capacity = Claim(capacity_milli_cpus, capacity_memory_bytes)
        self._claims: dict[str, Claim] = {}
        self._lock = threading.Lock()

    @property
    def held(self) -> Claim:
        """The sum of all claims."""
        claims = list(self._claims.values())
        return Claim(sum(claim.milli_cpus for claim in claims), sum(claim.memory_bytes for claim in claims))

    def claim(self, name: str, *, num_cpus: float, memory_bytes: int | None) -> None:
        """Reserve for `name`.

        Raises:
            ResourceError: not that much is left.
        """
        wanted = Claim(milli_cpus(num_cpus), memory_bytes or 0)
        with self._lock:
            held = self.held
            too_many_cpus = held.milli_cpus + wanted.milli_cpus > self.capacity.milli_cpus
            too_much_memory = wanted.memory_bytes > 0 and (
                held.memory_bytes + wanted.memory_bytes > self.capacity.memory_bytes
            )
            if too_many_cpus or too_much_memory:
                raise ResourceError(self._refusal(name, wanted, held))
            self._claims[name] = wanted

    def release(self, name: str) -> None:
        """Give back what `name` holds."""
        with self._lock:
            self._claims.pop(name, None)

    def _refusal(self, name: str, wanted: Claim, held: Claim) -> str:
        free = Claim(self.capacity.milli_cpus - held.milli_cpus, self.capacity.memory_bytes - held.memory_bytes)
        rows = [("", "CPUs", "memory (MB)")]
        rows += [(holder, *_cells(claim)) for holder, claim in self._claims.items()]
        rows += [("free", *_cells(free)), ("total", *_cells(self.capacity))]
        width = max(len(row[0]) for row in rows)
        table = "\n".join(f"  {row[0]:<{width}}  {row[1]:>7}  {row[2]:>12}" for row in rows)
        cpus, memory = _cells(wanted)
        return (
            f"Actor {name!r} asks for {cpus} CPUs and {memory} MB of memory, which are not free:\n{table}\n"
            f"Ask for less (num_cpus may be a fraction), stop an actor, or raise ActorSystem(num_cpus=...)."
        )


def _cells(claim: Claim) -> tuple[str, str]:
    return f"{claim.milli_cpus / MILLI:g}", f"{claim.memory_bytes / 2**20:.0f}"
