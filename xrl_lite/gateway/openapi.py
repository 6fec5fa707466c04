"""The description of the server in OpenAPI 3.1, made of the request bodies that it reads."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from xrl_lite.gateway.config import GatewayConfig
from xrl_lite.gateway.wire import CHAT_COMPLETION, COMPLETION, COUNT_TOKENS, MESSAGES, REWARD_INFO, SESSION

_SERVED: dict[str, tuple[str, TypeAdapter[Any] | None, str]] = {
    "/v1/chat/completions": ("post", CHAT_COMPLETION, "The next turn of a conversation, as OpenAI has it."),
    "/v1/completions": ("post", COMPLETION, "What follows a raw prompt, as OpenAI has it."),
    "/v1/messages": ("post", MESSAGES, "The next turn of a conversation, as Anthropic has it."),
    "/v1/messages/count_tokens": ("post", COUNT_TOKENS, "How many tokens the model would see."),
    "/v1/models": ("get", None, "The model that is served."),
    "/reward_info": ("post", REWARD_INFO, "What the agent says about its reward."),
    "/sessions": ("post", SESSION, "A new session, with its key and URLs."),
}
_STATUSES = {
    "200": "The answer.",
    "201": "What was made.",
    "400": "The request can never be answered.",
    "401": "The key is wrong.",
    "404": "There is no such model or session.",
    "409": "The session is over.",
    "413": "The body is too large.",
    "500": "The engine failed.",
}


def openapi(config: GatewayConfig) -> dict[str, Any]:
    """Return the description."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, (method, adapter, summary) in _SERVED.items():
        responses: dict[str, Any] = {}
        for status, text in _STATUSES.items():
            responses[status] = {"description": text, "content": {"application/json": {}}}
        responses["200"]["content"]["text/event-stream"] = {}
        operation: dict[str, Any] = {"summary": summary, "responses": responses}
        if adapter is not None:
            schema = adapter.json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            body = {"content": {"application/json": {"schema": schema}}, "required": True}
            operation["requestBody"] = body
        paths[path] = {method: operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"xrl-lite gateway ({config.model_name})", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }
