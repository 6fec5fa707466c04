"""Limits on how often a judger is asked, for services that count requests and tokens per minute."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Self

import anyio
from pydantic import Field, model_validator

from xrl_lite.errors import ConfigError
from xrl_lite.settings import Settings


class RateLimit(Settings):
    """Most judgements, or tokens of a service, per minute. Holds for a judger as a whole, not for each worker."""

    max_rpm: float | None = Field(default=None, gt=0)
    """Requests per minute."""

    max_tpm: float | None = Field(default=None, gt=0)
    """Tokens per minute."""

    estimated_tokens_per_request: float = Field(default=2000.0, gt=0)
    """Tokens that one request is taken to cost."""

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.max_rpm is None and self.max_tpm is None:
            raise ConfigError("give max_rpm or max_tpm, or leave rate_limit out.")
        return self


class TokenBucket:
    """Fills with `rate_per_s` up to what it holds in one second, and is drawn from ahead of time.

    Args:
        rate_per_s: How fast it fills.
        clock: Tells the seconds.
    """

    def __init__(self, rate_per_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._rate_per_s = rate_per_s
        self._clock = clock
        self._level = self._capacity = rate_per_s
        self._seen = clock()

    def reserve(self, amount: float) -> float:
        """Draw an amount, and return the seconds to wait until it is there. More than it holds makes others wait."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._seen) * self._rate_per_s) - amount
        self._seen = now
        return max(0.0, -self._level / self._rate_per_s)

    def give_back(self, amount: float) -> None:
        """Undo a reservation."""
        self._level += amount


class RateLimiter:
    """Lets judgements through as often as a `RateLimit` allows, in the order they come.

    Args:
        limit: What is allowed.
        clock: Tells the seconds.
    """

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = monotonic) -> None:
        self._buckets: list[tuple[TokenBucket, float]] = []
        if limit.max_rpm is not None:
            self._buckets.append((TokenBucket(limit.max_rpm / 60, clock), 1.0))
        if limit.max_tpm is not None:
            self._buckets.append((TokenBucket(limit.max_tpm / 60, clock), limit.estimated_tokens_per_request))

    def reserve(self) -> float:
        """Take the next turn, and return the seconds until it comes."""
        return max(bucket.reserve(cost) for bucket, cost in self._buckets)

    async def wait(self) -> None:
        """Wait for the next turn. Cancelling gives it up."""
        wait_s = self.reserve()
        if wait_s <= 0:
            return
        try:
            await anyio.sleep(wait_s)
        except BaseException:
            for bucket, cost in self._buckets:
                bucket.give_back(cost)
            raise
