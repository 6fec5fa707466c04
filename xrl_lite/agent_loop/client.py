"""How agents generate: a request id, token ids and a dict of sampling parameters; token ids come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from xrl_lite.agent_loop.base import RolloutCtl
from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.data.sampling_params import merge_sampling_params
from xrl_lite.errors import RolloutError

_BLANK = RolloutState(message=[])


class TokenOutputLike(Protocol):
    """One response."""

    token_ids: list[int]
    """Sampled tokens."""
    log_probs: list[float] | None
    """One per token."""
    stop_reason: str | None
    """completed or aborted."""
    extra_fields: dict[str, Any]
    """``policy_versions`` per token and ``finish_reason``, where the client tells them."""


class LLMClient(Protocol):
    """Generates for agents, as verl's server client does."""

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> TokenOutputLike:
        """Return the response to a prompt. Requests of one id are served by one replica.

        Raises:
            RolloutError: the response could not be generated.
        """
        ...


@dataclass(kw_only=True)
class TokenOutput:
    """One response; see `TokenOutputLike`."""

    token_ids: list[int]
    """Sampled tokens."""
    log_probs: list[float] | None = None
    """One per token."""
    stop_reason: str | None = "completed"
    """completed or aborted."""
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """``policy_versions`` per token and ``finish_reason``."""


def request_state(
    turn_id: str, prompt_ids: Sequence[int], *, session_id: str, task_name: str | None, sample_params: SampleParams
) -> RolloutState:
    """Return a state to generate from. It is not validated: for a long prompt that costs more than all the rest."""
    return _BLANK.model_copy(
        update={
            "message": [],
            "prompt_ids": list(prompt_ids),
            "rollout_id": turn_id,
            "uid": turn_id,
            "session_id": session_id,
            "task_name": task_name,
            "sample_params": sample_params,
            "extra_fields": {},
        }
    )


class StateClient:
    """An `LLMClient` over whatever generates states.

    Args:
        rollout_ctl: Generates.
        sample_params: What the parameters of a request do not say.
        task_name: Goes into the seeds, as that of the states.
    """

    def __init__(self, rollout_ctl: RolloutCtl, *, sample_params: SampleParams, task_name: str | None = None) -> None:
        self._rollout_ctl = rollout_ctl
        self._sample_params = sample_params
        self._task_name = task_name
        self._known: tuple[dict[str, Any], SampleParams] = ({}, sample_params)
        self.was_aborted = False
        """Whether a response was cut short from outside, as all are when generation is paused."""

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> TokenOutput:
        """Return the response to a prompt; its seed follows from request id and length of the prompt.

        Raises:
            ConfigError: a sampling parameter is unknown or out of range.
            RolloutError: the response could not be generated.
        """
        # the turn belongs to the id, since equal ids have equal seeds
        turn_id = f"{request_id}/{len(prompt_ids)}"
        state = request_state(
            turn_id,
            prompt_ids,
            session_id=request_id,
            task_name=self._task_name,
            sample_params=self._merge(sampling_params),
        )
        state = await self._rollout_ctl.generate(state)
        if state.status is Status.FAILED:
            raise RolloutError(state.error_msg or f"request {request_id} failed")
        self.was_aborted = self.was_aborted or state.status is Status.ABORTED
        return TokenOutput(
            token_ids=list(state.response_ids or []),
            log_probs=list(state.logprobs or []),
            stop_reason="aborted" if state.status is Status.ABORTED else "completed",
            extra_fields={
                "policy_versions": list(state.response_model_steps or []),
                "finish_reason": state.finish_reason,
            },
        )

    def _merge(self, given: Mapping[str, Any]) -> SampleParams:
        """Return the parameters of a request; those of one session mostly differ in `max_tokens` alone."""
        rest = {name: value for name, value in given.items() if name != "max_tokens"}
        if rest != self._known[0]:
            self._known = (rest, merge_sampling_params(self._sample_params, rest))
        limit = given.get("max_tokens")
        if isinstance(limit, int) and limit > 0:
            return self._known[1].model_copy(update={"max_tokens": limit})
        return merge_sampling_params(self._sample_params, given) if "max_tokens" in given else self._known[1]
