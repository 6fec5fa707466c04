"""Sessions without a server, and an engine that notes what it is asked."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel

from tests.chat_templates import make_tokenizer
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import RolloutState, SampleParams
from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.tokenizer import Message, Tokenizer
from xrl_lite.gateway import GatewayConfig, Trajectory
from xrl_lite.gateway.session import Session, SessionParts
from xrl_lite.gateway.turn import TurnRequest, TurnResult
from xrl_lite.rollout.replica import GenerateResult
from xrl_lite.tools import ToolParser

QWEN3 = Tokenizer(make_tokenizer("qwen3"))
TEMPLATE = ChatTemplate(QWEN3)
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+4"}}\n</tool_call><|im_end|>'
TOOL: Message = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(result: TurnResult) -> Message:
    """A turn as a client sends it back."""
    calls = [
        {"id": call.tool_call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in result.calls
    ]
    return {"role": "assistant", "content": result.text, **({"tool_calls": calls} if calls else {})}


def answering(*texts: str) -> ScriptedRolloutCtl:
    """An engine that says these one after the other, and then numbers."""
    later = (f"{number}{END}" for number in itertools.count(1))
    script = itertools.chain(texts, later)
    return ScriptedRolloutCtl(lambda _: QWEN3.encode_text(next(script)), policy_version=3)


class HeldRolloutCtl(ScriptedRolloutCtl):
    """An engine that answers each request once it is let go."""

    def __init__(self, script: Callable[[RolloutState], Any]) -> None:
        super().__init__(script)
        self.let_go = anyio.Event()
        self.num_begun = 0
        self.num_ended = 0
        self.changed = anyio.Event()

    async def generate(self, state: RolloutState) -> RolloutState:
        self.num_begun += 1
        self._tell()
        try:
            await self.let_go.wait()
            return await super().generate(state)
        finally:
            self.num_ended += 1
            self._tell()

    async def begun(self, number: int) -> None:
        while self.num_begun < number:
            await self.changed.wait()

    async def ended(self, number: int) -> None:
        while self.num_ended < number:
            await self.changed.wait()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


class HaltingRolloutCtl(ScriptedRolloutCtl):
    """An engine that tells the tokens of a first text, and those of the rest once it is let go."""

    def __init__(self, first: str, rest: str) -> None:
        super().__init__(lambda _: QWEN3.encode_text(first + rest))
        self.let_go = anyio.Event()
        self.was_left = anyio.Event()
        self._num_first = len(QWEN3.encode_text(first))

    @asynccontextmanager
    async def streaming(self, state: RolloutState) -> AsyncGenerator[AsyncIterator[GenerateResult]]:
        async with super().streaming(state) as tokens:

            async def halting() -> AsyncIterator[GenerateResult]:
                number = 0
                async for token in tokens:
                    number += 1
                    yield token
                    if number == self._num_first:
                        await self.let_go.wait()

            try:
                yield halting()
            finally:
                self.was_left.set()


def held(*texts: str) -> HeldRolloutCtl:
    script = iter([*texts])
    return HeldRolloutCtl(lambda _: QWEN3.encode_text(next(script, f"Yes.{END}")))


@asynccontextmanager
async def open_session(
    rollout: Any,
    *,
    limit: int | None = None,
    resume_aborted: bool = True,
    template: ChatTemplate = TEMPLATE,
    **settings: Any,
) -> AsyncIterator[Session]:
    config = GatewayConfig(**settings)
    async with anyio.create_task_group() as tasks:
        parts = SessionParts(
            rollout_ctl=rollout,
            tokenizer=QWEN3,
            template=template,
            parser=ToolParser.get_tool_parser(config.tool_format, QWEN3),
            config=config,
            max_trajectory_tokens=limit,
            tasks=tasks,
            resume_aborted=resume_aborted,
        )
        yield Session("session", parts, sample_params=SampleParams(max_tokens=200))
        tasks.cancel_scope.cancel()


async def ask(session: Session, messages: list[Message], *, tools: list[Message] | None = None) -> TurnResult:
    return await session.submit(TurnRequest(messages=messages, tools=tools), digest=digest(messages)).wait()


async def until(holds: Callable[[], bool]) -> None:
    """Let the others run until something holds."""
    while not holds():
        await anyio.lowlevel.checkpoint()


def digest(messages: Any) -> bytes:
    return json.dumps(messages).encode()


def trained(trajectory: Trajectory) -> str:
    """The text that is trained on."""
    pairs = zip(trajectory.response_ids, trajectory.response_mask, strict=True)
    return QWEN3.decode([token for token, mask in pairs if mask], False)


def whole(trajectory: Trajectory) -> list[int]:
    return [*trajectory.prompt_ids, *trajectory.response_ids]
