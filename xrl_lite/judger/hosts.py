"""Several servers of one model: who is asked, who is left alone for a while, how often it is tried again.

::

    post() --> the server with the fewest requests that is well --> answer
      waits for    a place among `max_concurrency`; the answer; after a failure `retry_wait_s`, or what the server says
      is woken by  who leaves; the server, or the time limit of the request
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import anyio

from xrl_lite.judger.handler import DEFAULT_CONCURRENCY
from xrl_lite.judger.http import SharedClient, retry_after
from xrl_lite.judger.loop_local import LoopLocal
from xrl_lite.judger.stopwatch import running_stopwatch
from xrl_lite.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

logger = get_logger(__name__)

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 60.0
_SHOWN = 200


@dataclass
class Host:
    """A server and how it is."""

    url: str
    """Address, without a slash at the end."""
    in_flight: int = 0
    """Requests under way."""
    num_failures: int = 0
    """Failures since the last answer."""
    rests_until: float = 0.0
    """Not asked before this time while others are well."""

    def fail(self, now: float) -> None:
        """Note a failure; each one in a row doubles the rest."""
        self.rests_until = now + min(_FIRST_REST_S * 2**self.num_failures, _LONGEST_REST_S)
        self.num_failures += 1

    def succeed(self) -> None:
        """Note an answer."""
        self.num_failures, self.rests_until = 0, 0.0


class Hosts:
    """Asks servers that all serve the same model, in OpenAI's or vLLM's protocol.

    Args:
        addresses: ``host:port``, or URLs; ``/v1`` at the end of a URL is left out, as paths are given in full.
        judger: Name of the judger, for messages.
        request_timeout: Limit of one request, in seconds.
        max_retries: Requests for one answer before it fails.
        retry_wait_s: Wait between two requests.
        max_concurrency: Answers that are waited for at the same time.
        headers: Sent with every request.
        transport: Replaces the network, for tests.
        clock: Tells the seconds, for tests.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        judger: str,
        request_timeout: float = 30.0,
        max_retries: int = 3,
        retry_wait_s: float = 1.0,
        max_concurrency: int = DEFAULT_CONCURRENCY,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.hosts = [Host(_url(address)) for address in addresses]
        self._judger = judger
        self._max_retries = max_retries
        self._retry_wait_s = retry_wait_s
        self._headers = dict(headers or {})
        self._request_timeout = request_timeout
        self._client = SharedClient(request_timeout, transport)
        self._limiter: LoopLocal[anyio.Semaphore] = LoopLocal(partial(anyio.Semaphore, max_concurrency))
        self._clock = clock
        self._model: str | None = None

    async def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Any]) -> Any:
        """Return what `read` finds in the JSON of the answer; waits while `max_concurrency` others are waited for.

        Args:
            path: For example ``/v1/chat/completions``.
            body: Sent as JSON. A `model` of None is filled in with what the server says it serves.
            read: Takes the answer apart; ValueError, LookupError or TypeError from it is a failure of the server.

        Raises:
            RuntimeError: no server gave an answer that can be read.
        """
        async with self._limiter.get():
            running_stopwatch().start()
            return await self._try(path, body, read)

    async def _try(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Any]) -> Any:
        import httpx  # costs a tenth of a second, and most judgers never ask a service

        failure: Exception | None = None
        wait_s = 0.0
        for attempt in range(self._max_retries):
            await anyio.sleep(wait_s)
            host = self.choose()
            host.in_flight += 1
            try:
                found = read(await self._ask(host, path, body))
            except (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError) as error:
                host.fail(self._clock())
                logger.warning(
                    "judger %r: %s did not judge (attempt %d): %s", self._judger, host.url, attempt + 1, _told(error)
                )
                failure = error
                answer = error.response if isinstance(error, httpx.HTTPStatusError) else None
                wait_s = retry_after(answer, self._retry_wait_s)
            else:
                host.succeed()
                return found
            finally:
                host.in_flight -= 1
        raise RuntimeError(
            f"Cannot connect to judger service for {self._max_retries} times. The last answer: {_told(failure)}"
        ) from failure

    def choose(self) -> Host:
        """Return the server to ask next: well, and with the fewest requests; or else the one that rested longest."""
        now = self._clock()
        well = [host for host in self.hosts if host.rests_until <= now]
        if well:
            return min(well, key=lambda host: host.in_flight)
        return min(self.hosts, key=lambda host: host.rests_until)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, host: Host, path: str, body: Mapping[str, Any]) -> Any:
        if "model" in body and body["model"] is None:
            if self._model is None:
                listed = await self._request("GET", f"{host.url}/v1/models")
                self._model = str(listed["data"][0]["id"])
            body = {**body, "model": self._model}
        return await self._request("POST", f"{host.url}{path}", body)

    async def _request(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of an answer. The client limits the wait for each piece of it, not for all of it."""
        client = await self._client.get()
        with anyio.move_on_after(self._request_timeout):
            answer = await client.request(method, url, json=body, headers=self._headers)
            return answer.raise_for_status().json()
        raise TimeoutError(f"no whole answer from {url} within {self._request_timeout:g} s")


def _url(address: str) -> str:
    url = address if "://" in address else f"http://{address}"
    return url.rstrip("/").removesuffix("/v1")


def _told(error: Exception | None) -> str:
    answer = getattr(error, "response", None)
    text = f": {answer.text[:_SHOWN]}" if answer is not None else ""
    return f"{error!r}{text}"
