"""The records between the wire and the tokens: what a request asks for, and what came of it. No vendor's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from xrl_lite.data.tokenizer import Message
from xrl_lite.gateway.spoken import Said, TokenLogprob
from xrl_lite.tools import FunctionCall, ToolSchema

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """What the model is asked for: the next turn of a conversation, or what follows a raw prompt."""

    messages: list[Message] = field(default_factory=list[Message])
    """The whole conversation, in the form of chat templates."""
    tools: list[ToolSchema] | None = None
    """Schemas shown to the model."""
    prompt: str | list[int] | None = None
    """Text or tokens, for a request without messages; the chat template is not used then."""
    stream: bool = False
    """The client wants the turn while it is made."""
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    """Sampling parameters that the request brings: temperature, top_p, top_k, max_tokens, stop, ..."""
    with_logprobs: bool = False
    """The answer is to hold the text of each token."""
    with_token_ids: bool = False
    """The answer is to hold the tokens of the prompt."""


@dataclass(frozen=True, kw_only=True)
class TurnHead:
    """What is known of a turn before it is made."""

    turn_id: str
    """Unique in the gateway."""
    created_s: int
    """Unix time of the request, seconds."""
    num_prompt_tokens: int
    """How many tokens the model sees."""


@dataclass(frozen=True, kw_only=True)
class TurnResult:
    """One turn of the model."""

    head: TurnHead
    """What was known before."""
    text: str
    """What the model said, without reasoning and calls."""
    reasoning: str | None = None
    """What it thought first; None if it did not."""
    calls: tuple[FunctionCall, ...] = ()
    """The well-formed calls; malformed ones are part of `text`, as they were written."""
    finish_reason: FinishReason
    """Why it ended."""
    stop_text: str | None = None
    """The text that ended it, where the request named some."""
    prompt_ids: list[int] | None = None
    """The tokens that the model saw, where the request asked for them."""
    response_ids: list[int]
    """What it sampled."""
    logprobs: list[float]
    """One per sampled token."""
    token_texts: list[str] | None = None
    """Text of each sampled token, where the request asked for log-probs."""

    @property
    def tokens(self) -> tuple[TokenLogprob, ...] | None:
        """The sampled tokens with their log-probs, where the request asked for these."""
        if self.token_texts is None:
            return None
        return tuple(map(TokenLogprob, self.token_texts, self.logprobs))

    @property
    def said(self) -> Said:
        """What it thought and said."""
        tokens = self.tokens or ()
        return Said(reasoning=self.reasoning, text=self.text, sampled=tokens, num_tokens=len(tokens))


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One trainable row of a session: a concatenation of what the model saw and sampled."""

    prompt_ids: list[int]
    """What the model saw first."""
    response_ids: list[int]
    """Sampled tokens, and between them what clients and tools said."""
    response_mask: list[int]
    """1 on sampled tokens; as long as `response_ids`."""
    response_logprobs: list[float]
    """Log-probability of each sampled token; 0.0 elsewhere."""
    policy_versions: list[int]
    """Version of the weights of each sampled token; elsewhere that of the one before."""
    messages: list[Message]
    """The conversation up to its last turn."""
    tools: list[ToolSchema] | None
    """Schemas shown to the model."""
    num_turns: int
    """Turns of the model that are trained on."""
    finish_reason: FinishReason
    """How the last turn ended."""
    ended_by: Literal["session", "rewrite", "max_trajectory_length"]
    """Why it does not go on: the session ended; the template changed earlier turns, and the next trajectory goes on; it
    was full."""


@dataclass(frozen=True, kw_only=True)
class SessionResult:
    """What is left of a session."""

    session_id: str
    """The session."""
    trajectories: list[Trajectory]
    """In the order of their last turns; the last is the one that the session ended with."""
    reward_info: dict[str, Any]
    """What the agent posted."""
    num_turns: int
    """Turns of the model that were answered."""
    num_failed_turns: int
    """Turns that the engine could not make."""
    num_calls: int
    """Calls of tools that the model made."""
    num_malformed_calls: int
    """Calls that could not be read, and were handed on as text."""
    was_truncated: bool
    """Whether a conversation outgrew `max_trajectory_tokens`."""
    failure: str | None
    """Why the last turn could not be made, where no later one was answered; then the session is no attempt."""
