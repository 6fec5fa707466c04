"""Weight sync in two phases: nobody generates between the first replica that changes and the last.

::

    gate closed --> export from the trainer --> push to every replica --> digests equal? --> gate open
                                                                     '--> no: WeightSyncError names the replica

Waits for    the export and each push, all with deadlines of their own
Is woken by  the actors; the gate opens again whatever happens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import anyio

from xrl_lite.errors import WeightSyncError, errors_as_themselves

if TYPE_CHECKING:
    from torch import Tensor


class WeightSource(Protocol):
    """Has the weights."""

    async def export_weights(self) -> dict[str, Tensor]:
        """Return every weight under its Hugging Face name."""
        ...


class WeightTarget(Protocol):
    """Takes weights."""

    name: str

    async def update_weights(self, version: int, weights: dict[str, Tensor]) -> str:
        """Take weights and return the digest of what is held now."""
        ...


class GenerationGate(Protocol):
    """Can hold generation."""

    async def pause_generation(self) -> None:
        """Let no request start."""
        ...

    async def continue_generation(self) -> None:
        """Let requests start again."""
        ...


class WeightSync:
    """Brings weights from one source to all targets."""

    def __init__(self, *, source: WeightSource, targets: Sequence[WeightTarget], gate: GenerationGate) -> None:
        self._source = source
        self._targets = targets
        self._gate = gate
        self.policy_version = -1
        """Version that every target holds; -1 before the first sync."""

    async def sync(self, version: int) -> None:
        """Give every target the source's present weights, as `version`.

        Raises:
            WeightSyncError: a target holds something else afterwards; names it.
        """
        from xrl_lite.algorithms.digest import weights_digest  # loads torch

        await self._gate.pause_generation()
        try:
            weights = await self._source.export_weights()
            expected = weights_digest(weights)
            held: dict[str, str] = {}

            async def push(target: WeightTarget) -> None:
                held[target.name] = await target.update_weights(version, weights)

            with errors_as_themselves():
                async with anyio.create_task_group() as pushes:
                    for target in self._targets:
                        pushes.start_soon(push, target)
            for name, digest in held.items():
                if digest != expected:
                    raise WeightSyncError(
                        f"{name} holds other weights than it was sent as version {version} "
                        f"(digest {digest}, sent {expected}). Same dtype on both sides? The run stops here, "
                        f"since it would train on samples of another policy."
                    )
            self.policy_version = version
        finally:
            await self._gate.continue_generation()
