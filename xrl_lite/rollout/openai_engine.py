"""A server that is already running: any that speaks OpenAI's completions protocol with token ids in and out.

Token ids go in as `prompt`, and come out as `token_ids` beside `logprobs`: vLLM does so when asked with
`return_token_ids`, SGLang and others with options of their own (`extra_body`). A server that returns only text is
refused: text that is encoded anew is other tokens than were sampled.

Waits for    the server, `request_timeout_s` of the run
Is woken by  a streamed piece of a response; the end of the connection
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import BaseModel, ValidationError

from xrl_lite.errors import ConfigError, RolloutError, WeightSyncError
from xrl_lite.log import get_logger
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, RolloutReplica

if TYPE_CHECKING:
    from xrl_lite.algorithms.weights import WeightBucket

logger = get_logger(__name__)

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Answers after which the same request may well succeed."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
_ERROR_CHARACTERS = 500


class _Logprobs(BaseModel, extra="ignore"):
    token_logprobs: list[float] | None = None


class _Choice(BaseModel, extra="ignore"):
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(BaseModel, extra="ignore"):
    """What is read of a streamed piece of a response."""

    error: Any = None
    choices: list[_Choice] | None = None


class OpenAIReplica(RolloutReplica):
    """Asks a completions server.

    Options (`RolloutConfig.engine_options`):
        base_urls: Where, one for each replica, for example ["http://127.0.0.1:8000/v1"].
        model: Name of the model at the server; the run's model path by default.
        api_key: Sent as a bearer token; none by default.
        max_attempts: How often a request is sent that the server was too busy for, or broke at; 5 by default.
        connect_timeout_s: 10 by default.
        idle_timeout_s: A response of which nothing comes for so long has failed; 300 by default.
        extra_body: Is added to every request; {"return_token_ids": True} by default.
    """

    def __init__(self, *, config: RolloutConfig, model_path: str, replica: int) -> None:
        super().__init__(config=config, model_path=model_path, replica=replica)
        self._options = config.options_of(
            "openai",
            base_urls=[],
            model=model_path,
            api_key=None,
            max_attempts=5,
            connect_timeout_s=10.0,
            idle_timeout_s=300.0,
            extra_body={"return_token_ids": True},
        )
        urls: list[str] = self._options["base_urls"]
        if len(urls) != config.num_replicas:
            raise ConfigError(
                f"rollout.engine_options.base_urls must have one address for each of the {config.num_replicas} "
                f"replicas, got {urls!r}. Write for example base_urls: ['http://127.0.0.1:8000/v1']."
            )
        key = self._options["api_key"]
        self._client = httpx.AsyncClient(
            base_url=urls[replica].rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self._options["idle_timeout_s"], connect=self._options["connect_timeout_s"]),
            limits=httpx.Limits(max_connections=config.max_batch_size, max_keepalive_connections=64),
        )
        self._results: dict[str, GenerateResult] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def admit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._results[request.request_id] = GenerateResult()
            self._tasks[request.request_id] = asyncio.create_task(self._generate(request), name=request.request_id)

    def drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            task, result = self._tasks.pop(request_id), self._results.pop(request_id)
            task.cancel()  # closes the connection, by which the server knows
            result.finish_reason = "abort"
            self.deliver(request_id, result)

    def partial(self, request_id: str) -> GenerateResult:
        return self._results[request_id]

    async def load_tensors(self, bucket: WeightBucket) -> dict[str, str]:
        raise WeightSyncError("a server of others keeps its own weights")

    async def _generate(self, request: GenerateRequest) -> None:
        request_id, result = request.request_id, self._results[request.request_id]
        outcome: GenerateResult | RolloutError = result
        try:
            await self._ask(request, result)
        except RolloutError as error:
            outcome = error
        except Exception as error:
            logger.exception("request %s failed", request_id)
            outcome = RolloutError(f"asking the server failed with {type(error).__name__}: {error}")
        if self._results.pop(request_id, None) is not None:
            del self._tasks[request_id]
            self.deliver(request_id, outcome)

    async def _ask(self, request: GenerateRequest, result: GenerateResult) -> None:
        body = self._body(request)
        pause = FIRST_PAUSE_S
        for attempt in range(1, self._options["max_attempts"] + 1):
            try:
                async with self._client.stream("POST", "completions", json=body) as response:
                    if response.is_success:
                        async for event in _events(response):
                            self._take(request, result, event)
                        if result.finish_reason is None:
                            raise RolloutError("the server ended the response without a finish reason")
                        return
                    text = (await response.aread()).decode(errors="replace")[:_ERROR_CHARACTERS]
                    problem = f"the server answered {response.status_code}: {text}"
                    if response.status_code not in RETRIED:
                        raise RolloutError(problem)
                    pause = _retry_after(response) or pause
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__} at {self._client.base_url}: {error}"
                if result.token_ids:  # what was sampled cannot be sampled again in the same way
                    raise RolloutError(f"the connection broke in mid-response: {problem}") from error
            if attempt == self._options["max_attempts"]:
                raise RolloutError(f"{problem} ({attempt} attempts)")
            logger.warning("request %s: %s; again in %g s", request.request_id, problem, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        params = request.sample_params
        body: dict[str, Any] = {
            "model": self._options["model"],
            "prompt": request.prompt_ids,
            "stream": True,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "seed": (request.seed + request.num_sampled) % (1 << 31),
            "logprobs": 0,
        }
        # what OpenAI's protocol does not have is sent only where it is wanted
        if params.top_k > 0:
            body["top_k"] = params.top_k
        if params.repetition_penalty != 1.0:
            body["repetition_penalty"] = params.repetition_penalty
        if params.min_tokens:
            body["min_tokens"] = params.min_tokens
        if params.stops:
            body |= {"stop": params.stops, "include_stop_str_in_output": True}
        if params.stop_token_ids:
            body["stop_token_ids"] = params.stop_token_ids
        return body | self._options["extra_body"]

    def _take(self, request: GenerateRequest, result: GenerateResult, event: _Event) -> None:
        if event.error:
            raise RolloutError(f"the server reported {event.error!r}")
        if not event.choices:
            return
        choice = event.choices[0]
        token_ids = choice.token_ids or []
        logprobs = (choice.logprobs and choice.logprobs.token_logprobs) or []
        if choice.token_ids is None and choice.text:
            raise RolloutError(
                "the server returns text without token ids, and text encoded anew is other tokens than were "
                "sampled. Use a server that returns them (vLLM does with return_token_ids), and say in "
                "engine_options.extra_body how it is asked to."
            )
        if len(logprobs) != len(token_ids):
            raise RolloutError(f"the server returned {len(logprobs)} log-probs for {len(token_ids)} tokens")
        result.token_ids += token_ids
        result.logprobs += logprobs
        result.policy_versions += [self.policy_version] * len(token_ids)
        result.finish_reason = choice.finish_reason or result.finish_reason
        self.advanced([request.request_id])


async def _events(response: httpx.Response) -> AsyncIterator[_Event]:
    """Yield the events of a stream of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data:") and (data := line[len("data:") :].strip()) != "[DONE]":
            try:
                yield _Event.model_validate_json(data)
            except ValidationError as error:
                raise RolloutError(
                    f"the server sent an event that is none of the protocol: {data[:_ERROR_CHARACTERS]!r} ({error})"
                ) from error


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return min(float(value), MAX_PAUSE_S) if value.replace(".", "", 1).isdigit() else None
