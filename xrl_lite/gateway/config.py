"""Settings of the gateway. Imports neither torch nor a web framework."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from xrl_lite.data.token_builder import OnRewrite
from xrl_lite.settings import Settings, UserPath
from xrl_lite.tools import PARSERS

RequestParam = Literal[
    "temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty"
]
"""Sampling parameters that a request may bring."""

TRAINING_PARAMS: tuple[RequestParam, ...] = ("max_tokens", "stop")
"""Those that leave the distribution alone."""


def _known_format(name: str) -> str:
    PARSERS.check(name)
    return name


class GatewayConfig(Settings):
    """Where the endpoint listens, what it accepts, and how conversations become trajectories."""

    host: str = "127.0.0.1"
    """Address to listen on. The default is reached from this machine only."""

    advertised_host: str | None = None
    """Name of this machine in the URLs that agents get, where they run in containers or the like; `host` when not
    given."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one. `xrl-lite serve` takes 8000 when not given."""

    model_name: str = "policy"
    """Name of the model in requests and answers."""

    model_aliases: list[str] = Field(default_factory=list[str])
    """Further names that requests may use, with wildcards: ["*"] takes any."""

    tool_format: Annotated[str, AfterValidator(_known_format)] = "hermes"
    """Format in which the model calls tools: hermes, gpt-oss, qwen3_coder, glm, seed, minimax, kimi, deepseek, gemma,
    or your own."""

    chat_template: UserPath | None = None
    """Jinja file that takes the place of the model's own chat template, for example one that knows tools."""

    template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the chat template, for example {enable_thinking: false}."""

    end_token_ids: list[int] = Field(default_factory=list[int])
    """Tokens that end a turn, where neither tokenizer nor template tell."""

    on_rewrite: OnRewrite = "fork"
    """Where the chat template changes earlier turns (reasoning that is dropped): go on in a second trajectory, refuse,
    or keep the turns as they were sampled."""

    enable_last_assistant_rollback: bool = True
    """A request that replaces the last turn of the model goes on from before it, instead of in a new trajectory."""

    max_trajectory_tokens: int | None = Field(default=None, gt=1)
    """Prompt and response of a trajectory together; what the engine takes when not given."""

    request_params: list[RequestParam] | None = None
    """Sampling parameters that requests may set; others keep the values of the session. When not given: max_tokens and
    stop where what is sampled is trained on, else temperature, top_p and top_k as well."""

    max_body_bytes: int = Field(default=32 << 20, gt=0)
    """Largest body of a request."""

    keep_alive_s: float = Field(default=10.0, gt=0)
    """A stream that has nothing to say yet says so this often."""

    stream_interval_s: float | None = Field(default=0.1, ge=0)
    """A stream is sent what is new this often at most; None sends the turn once it is whole, which costs least."""

    retry_grace_s: float = Field(default=30.0, ge=0)
    """A request whose client has gone is still answered for so long: the client's retry gets that answer."""

    finalize_grace_s: float = Field(default=5.0, ge=0)
    """How long the end of a session waits for requests in flight."""

    idle_timeout_s: float | None = Field(default=None, gt=0)
    """Sessions without a request for so long are aborted; None keeps them."""

    @property
    def allowed_params(self) -> list[RequestParam]:
        """Sampling parameters that requests may set where nothing is trained."""
        if self.request_params is not None:
            return self.request_params
        return [*TRAINING_PARAMS, "temperature", "top_p", "top_k"]

    def serves(self, model: str) -> bool:
        """Return whether requests for this model are answered."""
        return any(fnmatchcase(model, pattern) for pattern in (self.model_name, *self.model_aliases))
