"""The agent that calls tools, and the one that answers at once.

::

    prompt --> generate --> calls? --no--> done
                  ^           | yes
                  '-- tools --'

It stops at the first of: no call in a turn; `response_length` tokens behind the prompt; `max_assistant_turns` turns of
the model; `max_user_turns` turns of tools. What tools say is only added if the model can still answer it, so a
trajectory ends on the model's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast
from uuid import uuid4

from xrl_lite.agent_loop.agents import AgentLoopBase, refuse_images
from xrl_lite.agent_loop.client import TokenOutputLike
from xrl_lite.agent_loop.output import AgentLoopMetrics, AgentLoopOutput
from xrl_lite.data.token_builder import TokenBuilder
from xrl_lite.data.tokenizer import Message
from xrl_lite.errors import ConfigError, RolloutError
from xrl_lite.tools import FunctionCall, ToolSession, call_message, message_of

StopReason = Literal["no_tool_call", "response_length", "max_assistant_turns", "max_user_turns", "aborted"]


@dataclass
class AgentData:
    """One trajectory while it runs; tools get it as `agent_data`."""

    request_id: str
    """Id of its requests."""
    messages: list[Message]
    """The conversation so far."""
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """For tools that keep something between calls."""
    tool_rewards: list[float] = field(default_factory=list[float])
    """Reward of each call."""
    turn_scores: list[float] = field(default_factory=list[float])
    """Scores that interactions gave to turns."""
    assistant_turns: int = 0
    """Turns of the model."""
    user_turns: int = 0
    """Turns of tools."""
    generate_s: float = 0.0
    """Seconds spent generating."""
    tools_s: float = 0.0
    """Seconds spent in tools."""


class SingleTurnAgent(AgentLoopBase):
    """One prompt, one response."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        tokens = self.start(kwargs["raw_prompt"])
        started = time.perf_counter()
        limited = {"max_tokens": self.parts.settings.response_length, **sampling_params}
        output = await self.server_manager.generate(
            str(kwargs.get("session_id") or uuid4().hex), prompt_ids=tokens.context_ids, sampling_params=limited
        )
        _add(tokens, output)
        return AgentLoopOutput.of_row(
            (tokens.rows() or tokens.all_rows())[-1],
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=time.perf_counter() - started),
            extra_fields={
                "messages": tokens.messages,
                "finish_reason": output.extra_fields.get("finish_reason"),
                "stop_reason": output.stop_reason,
            },
        )


class ToolAgentLoop(AgentLoopBase):
    """Calls tools until it has an answer. Malformed calls are answered with what is wrong with them."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        row = RowTools.of(kwargs)
        async with self.parts.toolbox.session(selection=row.selection, create_kwargs=row.create_kwargs) as tools:
            tokens = self.start(kwargs["raw_prompt"], tools=tools.schemas or None)
            data = AgentData(str(kwargs.get("session_id") or uuid4().hex), tokens.messages)
            stop, finish = await self._converse(tokens, tools, data, sampling_params)
            return self._outputs(tokens, tools, data, stop, finish)

    async def _converse(
        self, tokens: TokenBuilder, tools: ToolSession, data: AgentData, sampling_params: Mapping[str, Any]
    ) -> tuple[StopReason, str | None]:
        """Run turns until one of the rules stops; return which, and how the last response ended."""
        settings = self.parts.settings
        while True:
            room = settings.response_length - tokens.num_added
            calls, output = await self._turn(tokens, tools, data, sampling_params, room)
            finish = output.extra_fields.get("finish_reason")
            if output.stop_reason == "aborted":
                return "aborted", finish
            if tokens.num_added >= settings.response_length:
                return "response_length", "length"
            if not calls:
                return "no_tool_call", finish
            if settings.max_assistant_turns and data.assistant_turns >= settings.max_assistant_turns:
                return "max_assistant_turns", finish
            if settings.max_user_turns and data.user_turns >= settings.max_user_turns:
                return "max_user_turns", finish
            if not await self._answer(tokens, tools, data, calls):
                return "response_length", "length"

    async def _turn(
        self,
        tokens: TokenBuilder,
        tools: ToolSession,
        data: AgentData,
        sampling_params: Mapping[str, Any],
        room: int,
    ) -> tuple[list[FunctionCall], TokenOutputLike]:
        """Generate one turn and add it; return the calls in it that are carried out."""
        parts = self.parts
        stops = parts.tokenizer.token_ids_of(parts.parser.stop_texts)
        given: list[int] = sampling_params.get("stop_token_ids") or []
        limit = min(room, sampling_params.get("max_tokens") or room)
        started = time.perf_counter()
        output = await self.server_manager.generate(
            data.request_id,
            prompt_ids=tokens.context_ids,
            sampling_params={**sampling_params, "max_tokens": limit, "stop_token_ids": sorted({*given, *stops})},
        )
        data.generate_s += time.perf_counter() - started
        data.assistant_turns += 1
        content, found = await parts.parser.extract_tool_calls(output.token_ids, tools.schemas)
        found = [
            call if call.tool_call_id else replace(call, tool_call_id=f"call{data.user_turns:02d}{number:03d}")
            for number, call in enumerate(each.checked() for each in found[: parts.toolbox.max_parallel_calls])
        ]
        _add(tokens, output, parts.template.message(content, [call_message(call) for call in found]))
        return found, output

    async def _answer(
        self, tokens: TokenBuilder, tools: ToolSession, data: AgentData, calls: Sequence[FunctionCall]
    ) -> bool:
        """Carry out calls and add what came of them; False if the model has no room to answer, and nothing is added."""
        started = time.perf_counter()
        results = await tools.run(calls, agent_data=data)
        data.tools_s += time.perf_counter() - started
        data.tool_rewards += [result.reward for result in results]
        messages = [message_of(result) for result in results]
        for result, message in zip(results, messages, strict=True):
            refuse_images([message], f"the answer of the tool {result.call.name!r}")
        proposed = tokens.propose(messages)
        if tokens.num_added + proposed.num_tokens >= self.parts.settings.response_length:
            return False
        tokens.accept(proposed)
        data.user_turns += 1
        return True

    def _outputs(
        self, tokens: TokenBuilder, tools: ToolSession, data: AgentData, stop: StopReason, finish: str | None
    ) -> list[AgentLoopOutput]:
        fields: dict[str, Any] = {
            **data.extra_fields,
            "messages": tokens.messages,
            "turn_scores": data.turn_scores,
            "tool_rewards": data.tool_rewards,
            "tool_counts": tools.counts.as_dict(),
            "stopped_by": stop,
            "stop_reason": "aborted" if stop == "aborted" else "completed",
            "finish_reason": finish,
            "num_forks": tokens.num_forks,
        }
        metrics = AgentLoopMetrics(generate_sequences=data.generate_s, tool_calls=data.tools_s)
        num_turns = data.user_turns + data.assistant_turns + 1
        return [
            AgentLoopOutput.of_row(row, num_turns=num_turns, metrics=metrics, extra_fields=fields)
            for row in tokens.rows() or tokens.all_rows()[-1:]
        ]


@dataclass(frozen=True)
class RowTools:
    """What a row says about tools."""

    selection: list[str] | None
    """``extra_info.tool_selection``: the only tools it may use."""
    create_kwargs: dict[str, dict[str, Any]]
    """``extra_info.tools_kwargs[<tool>].create_kwargs``."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RowTools:
        """Read a row.

        Raises:
            ConfigError: what it says does not look as it should.
        """
        info: Mapping[str, Any] = row.get("extra_info") or {}
        selection: object = info.get("tool_selection")
        if selection is not None and not _is_list_of_texts(selection):
            raise ConfigError(f"tool_selection must be a list of names of tools, got {selection!r:.100}.")
        per_tool: object = row.get("tools_kwargs") or info.get("tools_kwargs") or {}
        if not isinstance(per_tool, Mapping) or not all(
            given is None or isinstance(given, Mapping) for given in cast("Mapping[str, object]", per_tool).values()
        ):
            raise ConfigError(f"tools_kwargs must be {{<tool>: {{create_kwargs: {{...}}}}}}, got {per_tool!r:.100}.")
        kwargs = {
            name: dict((given or {}).get("create_kwargs") or {})
            for name, given in cast("Mapping[str, Mapping[str, Any] | None]", per_tool).items()
        }
        return cls(cast("list[str] | None", selection), kwargs)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in cast("list[object]", value))


def _add(tokens: TokenBuilder, output: TokenOutputLike, message: Message | None = None) -> None:
    if output.log_probs is None:
        raise RolloutError("The engine returned no log-probs, and a trajectory cannot be trained on without them.")
    versions = output.extra_fields.get("policy_versions")
    tokens.add_sampled(
        output.token_ids,
        output.log_probs,
        message=message,
        policy_versions=versions if versions and len(versions) == len(output.token_ids) else None,
    )
