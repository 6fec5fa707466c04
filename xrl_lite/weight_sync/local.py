"""Weights of this very process as a source, for scripts and tests that have no training engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread

if TYPE_CHECKING:
    from torch import Tensor

    from xrl_lite.algorithms.weights import WeightBucket, WeightOffer, WeightSender

T = TypeVar("T")


class LocalWeights:
    """Hands over what `weights` returns whenever a transfer begins.

    Args:
        weights: Every weight by its Hugging Face name.
        in_thread: Copy them in a thread. In virtual time, in which threads do not live, small ones are copied on the
            event loop.
    """

    def __init__(self, weights: Callable[[], Mapping[str, Tensor]], *, in_thread: bool = True) -> None:
        self._weights = weights
        self._in_thread = in_thread
        self._sender: WeightSender | None = None
        self.peft_config: dict[str, Any] | None = None
        """Settings of the adapter, where `weights` are those of one."""
        self.num_updates = 0
        """Stands for the trainer's optimizer updates; add to it where the weights are meant to have changed."""

    async def attach_weights(self, sender: WeightSender) -> None:
        """Take this end of a transport."""
        self._sender = sender

    async def open_weights(self, version: int, *, adapters_only: bool = False) -> WeightOffer:
        """Begin a transfer; `adapters_only` where `weights` are those of an adapter."""
        weights = iter(self._weights().items())
        begin = partial(
            self._attached().open,
            weights,
            version=version,
            num_updates=self.num_updates,
            adapter=self.peft_config if adapters_only else None,
        )
        return await self._run(begin)

    async def send_weights(self, number: int, num_receivers: int) -> WeightBucket:
        """Hand over a bucket."""
        return await self._run(partial(self._attached().send, number, num_receivers))

    async def interrupt_weights(self) -> None:
        """Have a `send_weights` that waits for receivers raise."""
        await self._run(self._attached().interrupt)

    async def close_weights(self) -> None:
        """End a transfer."""
        self._attached().close()

    async def _run(self, copy: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(copy) if self._in_thread else copy()

    def _attached(self) -> WeightSender:
        assert self._sender is not None, "attach_weights comes first"
        return self._sender
