"""Scoring by a service: POST the arguments as JSON, read the reward dict from the answer."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import anyio

from xrl_lite.judger.handler import DEFAULT_CONCURRENCY
from xrl_lite.judger.loop_local import LoopLocal
from xrl_lite.judger.outcome import JudgementTimeoutError, RewardValueError

if TYPE_CHECKING:
    import httpx

_MAX_BACKOFF_S = 10.0
_SHOWN = 200


class SharedClient:
    """One connection pool for each event loop.

    The client lives inside an async generator, so a loop that ends closes it, also when nobody calls `aclose`.

    Args:
        timeout_s: Limit of one request.
        transport: Replaces the network, for tests.
    """

    def __init__(self, timeout_s: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._open: LoopLocal[AsyncGenerator[httpx.AsyncClient, None]] = LoopLocal(
            partial(_open_client, timeout_s, transport)
        )
        self._clients: LoopLocal[list[httpx.AsyncClient]] = LoopLocal(list)

    async def get(self) -> httpx.AsyncClient:
        """Return the client of the running loop."""
        clients = self._clients.get()
        if not clients:
            clients.append(await anext(self._open.get()))
        return clients[0]

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        self._clients.take()
        generator = self._open.take()
        if generator is not None:
            await generator.aclose()


class HttpScorer:
    """Asks a scoring service, and again where the trouble may pass: connection errors, 408, 429 and 5xx.

    Args:
        url: Where to POST ``{"response", "label", "extra_info"}``; the answer is a JSON object with ``score``.
        timeout_s: Limit of one judgement, all tries together.
        max_retries: Further tries after the first.
        backoff_s: Wait before the second try; doubles with each, with jitter. A ``Retry-After`` in seconds wins.
        transport: Replaces the network, for tests.
    """

    is_async = True

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        max_retries: int = 3,
        backoff_s: float = 0.2,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._backoff_s = backoff_s
        self._client = SharedClient(timeout_s, transport)
        self._jitter = random.Random()  # only spreads waits, no result depends on it

    @property
    def __name__(self) -> str:
        return self.url

    async def __call__(self, response: str, label: Any, extra_info: Mapping[str, Any]) -> Any:
        """Return the JSON of the answer.

        Raises:
            JudgementTimeoutError: no answer in time.
            httpx.HTTPStatusError: the last try was refused with this status.
            httpx.TransportError: the last try did not reach the service.
            RewardValueError: the answer is not JSON.
        """
        body = {"response": response, "label": label, "extra_info": dict(extra_info)}
        deadline = monotonic() + self._timeout_s
        for tried in range(self._max_retries + 1):
            wait_s = self._backoff_s * 2**tried * self._jitter.uniform(0.75, 1.25)
            can_retry = tried < self._max_retries and monotonic() + wait_s < deadline
            answer = await self._post(body, swallow=can_retry)
            if answer is not None and not (can_retry and may_pass(answer.status_code)):
                return _read_json(answer, self.url)
            await anyio.sleep(retry_after(answer, wait_s))
        raise AssertionError("the last try returns or raises")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _post(self, body: Mapping[str, Any], *, swallow: bool) -> httpx.Response | None:
        import httpx  # costs a tenth of a second, and most judgers never ask a service

        client = await self._client.get()
        try:
            return await client.post(self.url, json=body)
        except httpx.TimeoutException as error:
            raise JudgementTimeoutError(f"{self.url} did not answer within {self._timeout_s:g} s") from error
        except httpx.TransportError:
            if not swallow:
                raise
            return None


def may_pass(status: int) -> bool:
    """Return whether the trouble that an HTTP status stands for may be over at the next try."""
    return status in (408, 429) or status >= 500


async def _open_client(
    timeout_s: float, transport: httpx.AsyncBaseTransport | None
) -> AsyncGenerator[httpx.AsyncClient, None]:
    import httpx  # as above

    # who asks has a limit of his own; looking for one of many idle connections costs more than to open another
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=DEFAULT_CONCURRENCY)
    async with httpx.AsyncClient(timeout=timeout_s, transport=transport, limits=limits) as client:
        yield client


def _read_json(answer: httpx.Response, url: str) -> Any:
    answer.raise_for_status()
    try:
        return answer.json()
    except ValueError as error:
        kind = answer.headers.get("content-type", "no content type")
        raise RewardValueError(f"{url} answered {kind} instead of JSON: {answer.text[:_SHOWN]!r}") from error


def retry_after(answer: httpx.Response | None, wait_s: float) -> float:
    """Return the seconds that an answer asks to wait, or else `wait_s`; never very many."""
    told = answer.headers.get("retry-after", "") if answer is not None else ""
    return min(float(told) if told.isdigit() else wait_s, _MAX_BACKOFF_S)
