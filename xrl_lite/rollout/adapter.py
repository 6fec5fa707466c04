"""The weights side of a replica: how the trainer's weights reach it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class ServerAdapter:
    """Pushes weights to one replica.

    Args:
        replica: The actor.
        number: Its number, for messages.
        timeout_s: Limit of one push.
    """

    def __init__(self, replica: Any, number: int, *, timeout_s: float) -> None:
        self._replica = replica
        self._timeout_s = timeout_s
        self.name = f"rollout/{number}"

    async def update_weights(self, version: int, weights: dict[str, Tensor]) -> str:
        """Hand over weights and return the digest of what the replica now holds."""
        push = self._replica.update_weights.options(timeout_s=self._timeout_s)
        return await push.remote(version, weights)
