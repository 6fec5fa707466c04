"""The HTTP server: paths, keys, limits and streams. What a request means is read by the endpoints.

::

    /v1/...                        the key says which session
    /sessions/{id}/v1/...          the same, for clients that are given a base URL each
    /sessions/{id}/reward_info     what the agent says about its reward
    /sessions, /sessions/{id}, /sessions/{id}/finalize, .../abort      for whoever has the gateway's own key

A stream begins with the first text, or with signs of life after `keep_alive_s`. From then on an error is the last
event; before, it has its proper status, as that of any other request.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import anyio
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ExceptionHandler, Receive, Scope, Send

from xrl_lite.gateway.anthropic_dialect import ANTHROPIC, Messages, read_count_tokens
from xrl_lite.gateway.config import GatewayConfig
from xrl_lite.gateway.endpoint import Asked, Dialect, Endpoint, encode
from xrl_lite.gateway.openai_dialect import OPENAI, ChatCompletions, Completions
from xrl_lite.gateway.openapi import openapi
from xrl_lite.gateway.refusal import Refusal
from xrl_lite.gateway.session import PendingTurn, Session
from xrl_lite.gateway.turn import TurnResult
from xrl_lite.gateway.wire import REWARD_INFO, SESSION, read_body
from xrl_lite.log import get_logger

if TYPE_CHECKING:
    from xrl_lite.gateway.gateway import Gateway

logger = get_logger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

_RETRIES_HEADER = "x-stainless-retry-count"
_MOST_READ = 4
"""Clients that are still sending do not hear that they send too much: so many times the limit are read and dropped."""
_EVENT_STREAM = "text/event-stream"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class GatewayApp:
    """The ASGI application of a gateway.

    Args:
        gateway: Has the sessions.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._config = gateway.config
        self._started_s = int(time.time())
        handlers: dict[Any, ExceptionHandler] = {
            Refusal: self._refused,
            404: self._no_such_path,
            405: self._no_such_path,
            ClientDisconnect: self._gone,
            Exception: self._broken,
        }
        self.asgi = Starlette(routes=self._routes(), exception_handlers=handlers)

    def _routes(self) -> list[BaseRoute]:
        chat, completions, messages = ChatCompletions(), Completions(), Messages()
        served: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/chat/completions", self._turn(chat)),
            ("POST", "/v1/completions", self._turn(completions)),
            ("POST", "/v1/messages", self._turn(messages)),
            ("POST", "/v1/messages/count_tokens", self._count_tokens),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{model:path}", self._model),
            ("POST", "/reward_info", self._reward_info),
        ]
        routes = [
            Route(f"{prefix}{path}", handler, methods=[method])
            for prefix in ("", "/sessions/{session_id}")
            for method, path, handler in served
        ]
        own: list[tuple[str, str, Handler]] = [
            ("GET", "/health", self._health),
            ("GET", "/openapi.json", self._openapi),
            ("POST", "/sessions", self._create),
            ("GET", "/sessions/{session_id}", self._describe),
            ("POST", "/sessions/{session_id}/finalize", self._finalize),
            ("POST", "/sessions/{session_id}/abort", self._abort),
        ]
        return [*routes, *(Route(path, handler, methods=[method]) for method, path, handler in own)]

    # --- turns

    def _turn(self, endpoint: Endpoint) -> Handler:
        async def handle(request: Request) -> Response:
            session = self._session(request)
            body = await self._body(request)
            asked = endpoint.read(body)
            self._check_model(asked.model)
            pending = session.submit(
                asked.turn,
                digest=_digest(request, body),
                is_retry=request.headers.get(_RETRIES_HEADER, "0") not in ("", "0"),
                idempotency_key=request.headers.get("idempotency-key"),
            )
            return TurnResponse(endpoint, asked, pending, config=self._config)

        return handle

    async def _count_tokens(self, request: Request) -> Response:
        session = self._session(request)
        asked = read_count_tokens(await self._body(request))
        self._check_model(asked.model)
        return _json({"input_tokens": session.count_tokens(asked.turn)})

    async def _models(self, request: Request) -> Response:
        self._session(request)
        if _dialect(request) is ANTHROPIC:
            models = [self._anthropic_model()]
            return _json({"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]})
        return _json({"object": "list", "data": [self._openai_model()]})

    async def _model(self, request: Request) -> Response:
        self._session(request)
        self._check_model(request.path_params["model"])
        return _json(self._anthropic_model() if _dialect(request) is ANTHROPIC else self._openai_model())

    def _openai_model(self) -> dict[str, Any]:
        return {
            "id": self._config.model_name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "xrl-lite",
            "max_model_len": self._gateway.max_trajectory_tokens,
        }

    def _anthropic_model(self) -> dict[str, Any]:
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started_s))
        return {
            "type": "model",
            "id": self._config.model_name,
            "display_name": self._config.model_name,
            "created_at": started,
        }

    async def _reward_info(self, request: Request) -> Response:
        session = self._session(request)
        session.add_reward_info(read_body(REWARD_INFO, await self._body(request))["reward_info"])
        return _json({"session_id": session.session_id, "reward_info": session.reward_info})

    # --- sessions, for the holder of the gateway's key

    async def _create(self, request: Request) -> Response:
        self._check_owner(request)
        body = await self._body(request)
        given = read_body(SESSION, body or b"{}")
        handle = self._gateway.create_session(
            session_id=given.get("session_id"), sample_params=given.get("sample_params") or {}
        )
        return _json(asdict(handle), status=201)

    async def _describe(self, request: Request) -> Response:
        self._check_owner(request)
        session = self._gateway.session(request.path_params["session_id"])
        return _json(
            {
                "session_id": session.session_id,
                "state": session.state.value,
                "num_turns": session.num_turns,
                "num_in_flight": session.num_in_flight,
                "reward_info": session.reward_info,
            }
        )

    async def _finalize(self, request: Request) -> Response:
        self._check_owner(request)
        result = await self._gateway.finalize_session(request.path_params["session_id"])
        return _json(asdict(result))

    async def _abort(self, request: Request) -> Response:
        self._check_owner(request)
        session_id = request.path_params["session_id"]
        await self._gateway.abort_session(session_id)
        return _json({"session_id": session_id, "state": "aborted"})

    async def _health(self, _: Request) -> Response:
        return _json({"status": "ok", "num_sessions": self._gateway.num_sessions})

    async def _openapi(self, _: Request) -> Response:
        return _json(openapi(self._config))

    # --- who asks, and what for

    def _session(self, request: Request) -> Session:
        """Return the session of a request.

        Raises:
            Refusal: the key is wrong, or there is no such session.
        """
        return self._gateway.session_of(_key(request.headers), request.path_params.get("session_id"))

    def _check_owner(self, request: Request) -> None:
        if not secrets.compare_digest(_key(request.headers).encode(), self._gateway.api_key.encode()):
            raise Refusal("authentication", "Incorrect API key: this path is for the holder of the gateway's own key.")

    def _check_model(self, model: str) -> None:
        if not self._config.serves(model):
            raise Refusal(
                "not_found",
                f"The model {model!r} does not exist: {self._config.model_name!r} is served here. With model_aliases "
                f"the gateway answers to other names.",
                param="model",
                code="model_not_found",
            )

    async def _body(self, request: Request) -> bytes:
        limit = self._config.max_body_bytes
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > _MOST_READ * limit:
                break
        if size > limit:
            raise Refusal("too_large", f"The body is larger than {limit} bytes (gateway.max_body_bytes).")
        return b"".join(parts)

    # --- errors

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal), "registered for it"
        return refused(error, _dialect(request))

    async def _no_such_path(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        refusal = Refusal("not_found", f"There is no {request.method} {request.url.path} here.")
        return _json(_dialect(request).error_body(refusal), status=status, headers=getattr(error, "headers", None))

    async def _gone(self, _: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def _broken(self, request: Request, error: Exception) -> Response:
        logger.error("%s %s: unexpected error", request.method, request.url.path, exc_info=error)
        return _json(_dialect(request).error_body(Refusal("server", "Internal server error")), status=500)


class TurnResponse(Response):
    """Answers a request once its turn is there, or as it is made; a client that goes away is not waited for.

    Args:
        endpoint: Shapes the answer.
        asked: The request.
        pending: The turn.
        config: Says how often a stream says something, and how often that it has nothing to say.
    """

    def __init__(self, endpoint: Endpoint, asked: Asked, pending: PendingTurn, *, config: GatewayConfig) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._asked = asked
        self._pending = pending
        self._config = config
        self._answer = endpoint.stream(asked, pending.head)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._pending.attended():
            async with anyio.create_task_group() as talking:
                talking.start_soon(_until_gone, receive, talking.cancel_scope)
                first = b""
                if self._asked.turn.stream:
                    first = await self._next()
                else:
                    await self._pending.ended.wait()
                if self._pending.ended.is_set():
                    await self._whole()(scope, receive, send)
                else:
                    await self._stream(send, first)
                talking.cancel_scope.cancel()

    def _whole(self) -> Response:
        outcome = self._pending.outcome
        if isinstance(outcome, TurnResult) and self._asked.turn.stream:
            return Response(self._answer.finish(outcome), media_type=_EVENT_STREAM, headers=_STREAM_HEADERS)
        if isinstance(outcome, TurnResult):
            return _json(self._endpoint.answer(self._asked, outcome))
        assert outcome is not None, "it has ended"
        return refused(outcome, self._endpoint.dialect)

    async def _stream(self, send: Send, more: bytes) -> None:
        """Send what the turn says, or signs of life, until it has ended, and then the rest, or why there is none."""
        head = {**_STREAM_HEADERS, "content-type": _EVENT_STREAM}
        headers = [(name.encode(), value.encode()) for name, value in head.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not self._pending.ended.is_set():
            await _send_body(send, more or self._endpoint.dialect.keep_alive)
            if more:
                await self._rest()
            more = await self._next()
        await _send_body(send, more + self._last())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _last(self) -> bytes:
        outcome, dialect = self._pending.outcome, self._endpoint.dialect
        assert outcome is not None, "it has ended"
        if isinstance(outcome, Refusal):
            return dialect.error_event(outcome)
        if not outcome.said.continues(self._answer.sent):  # the engine began anew
            return dialect.error_event(Refusal("server", "The answer was made anew after a part of it had been sent."))
        return self._answer.finish(outcome)

    async def _next(self) -> bytes:
        """Wait for more to send, as long as a stream may be silent; return nothing where there is nothing."""
        pending = self._pending
        with anyio.move_on_after(self._config.keep_alive_s):
            while not pending.ended.is_set():
                has_news = pending.has_news
                if pending.spoken is not None and (more := self._answer.more(pending.spoken.said())):
                    return more
                await self._rest()
                await has_news.wait()
        return b""

    async def _rest(self) -> None:
        """Let news gather, unless the turn ends."""
        with anyio.move_on_after(self._config.stream_interval_s):
            await self._pending.ended.wait()


def refused(refusal: Refusal, dialect: Dialect) -> Response:
    """Return the answer to a request that is refused."""
    headers = {"x-should-retry": "true" if refusal.is_retryable else "false"}
    if refusal.kind == "too_large":
        headers["connection"] = "close"  # there may be more of it
    return _json(dialect.error_body(refusal), status=refusal.status, headers=headers)


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _key(headers: Headers) -> str:
    """Return the key of a request, however its vendor sends it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _dialect(request: Request) -> Dialect:
    """Return the dialect of a client, also where no endpoint was reached."""
    is_anthropic = "/v1/messages" in request.url.path or "anthropic-version" in request.headers
    return ANTHROPIC if is_anthropic else OPENAI


def _digest(request: Request, body: bytes) -> bytes:
    return hashlib.blake2b(request.url.path.encode() + b"\0" + body, digest_size=16).digest()


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status_code=status, headers=headers, media_type="application/json")
