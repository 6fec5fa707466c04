"""A scripted `RolloutCtl`: no engine. Ships for tests of agent loops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from xrl_lite.data import RolloutState, Status
from xrl_lite.rollout.replica import GenerateResult

Script = Callable[[RolloutState], Sequence[int] | BaseException | None]
"""Returns the tokens of a response, an exception to raise, or None for an abort."""


class ScriptedRolloutCtl:
    """Answers with what a script says, cut at the limit of the request.

    Args:
        script: Called with every request.
        policy_version: Stamped on every token.
    """

    def __init__(self, script: Script, *, policy_version: int = 0) -> None:
        self._script = script
        self.policy_version = policy_version
        self.requests: list[RolloutState] = []
        """What was asked for."""

    @classmethod
    def of_texts(cls, texts: Sequence[str], encode: Callable[[str], list[int]], **kwargs: Any) -> ScriptedRolloutCtl:
        """Answer with these texts one after the other, whoever asks."""
        remaining = iter([encode(text) for text in texts])
        return cls(lambda _: next(remaining), **kwargs)

    async def generate(self, state: RolloutState) -> RolloutState:
        """Answer a request; log-probs are -1, -2, ... so that each is known again."""
        self.requests.append(state.model_copy())
        answer = self._script(state)
        if isinstance(answer, BaseException):
            raise answer
        whole = list(answer or [])
        tokens = whole[: state.sample_params.max_tokens]
        state.response_ids = tokens
        state.logprobs = [-float(place + 1) for place in range(len(tokens))]
        state.response_mask = [1] * len(tokens)
        state.response_model_steps = [self.policy_version] * len(tokens)
        state.finish_reason = "abort" if answer is None else "stop" if len(tokens) == len(whole) else "length"
        state.status = Status.ABORTED if answer is None else Status.COMPLETED
        state.response = ""
        return state

    @asynccontextmanager
    async def streaming(self, state: RolloutState) -> AsyncGenerator[AsyncIterator[GenerateResult]]:
        """Answer a request; yields its tokens one by one."""

        async def one_by_one() -> AsyncIterator[GenerateResult]:
            answered = await self.generate(state)
            for token, logprob in zip(answered.response_ids or [], answered.logprobs or [], strict=True):
                yield GenerateResult(token_ids=[token], logprobs=[logprob])

        yield one_by_one()
