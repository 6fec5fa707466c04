"""How agents generate: a request id, token ids and a dict of sampling parameters; token ids come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from xrl_lite.agent_loop.base import RolloutCtl
from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.data.sampling_params import merge_sampling_params
from xrl_lite.errors import RolloutError

_BLANK = RolloutState(message=[])

_SHAPE_THE_DISTRIBUTION = (
    *("temperature", "top_p", "top_k", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


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
    """The `LLMClient` of one attempt, over whatever generates states.

    Args:
        rollout_ctl: Generates.
        attempt: Names the attempt; goes into the seeds.
        sample_params: What the parameters of a request do not say.
        task_name: Goes into the seeds, as that of the states.
    """

    def __init__(
        self, rollout_ctl: RolloutCtl, *, attempt: str, sample_params: SampleParams, task_name: str | None = None
    ) -> None:
        self._rollout_ctl = rollout_ctl
        self._attempt = attempt
        self._sample_params = sample_params
        self._task_name = task_name
        self._known: tuple[dict[str, Any], SampleParams] = ({}, sample_params)
        self._asked: Counter[int] = Counter()
        """Requests by the length of their prompt."""
        self._num_own = 0
        self._foreign = ""
        self.was_aborted = False
        """Whether a response was cut short from outside, as all are when generation is paused."""

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> TokenOutput:
        """Return the response to a prompt.

        Its seed follows from the attempt, the length of the prompt, and how many prompts of that length came before.

        Raises:
            ConfigError: a sampling parameter is unknown or out of range.
            RolloutError: the response could not be generated.
        """
        # the turn belongs to the id, since equal ids have equal seeds; agents may choose request ids as they like
        num_before = self._asked[len(prompt_ids)]
        self._asked[len(prompt_ids)] += 1
        sample_params = self._merge(sampling_params)
        state = request_state(
            f"{self._attempt}/{len(prompt_ids)}/{num_before}",
            prompt_ids,
            session_id=request_id,
            task_name=self._task_name,
            sample_params=sample_params,
        )
        state = await self._rollout_ctl.generate(state)
        self._note(sample_params, len(state.response_ids or ()))
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

    def check_trained(self, num_tokens: int) -> None:
        """Check that so many tokens can be trained on: not more than were sampled with the loop's own parameters.

        Raises:
            RolloutError: some were sampled otherwise; says how.
        """
        if self._foreign and num_tokens > self._num_own:
            raise RolloutError(
                f"{num_tokens} tokens are to be trained on, and only {self._num_own} were sampled with the loop's "
                f"sample_params: the agent asked for {self._foreign}. Log-probs of others do not fit. Change "
                f"sample_params of the loop instead, or give such tokens a response_mask of 0."
            )

    def _note(self, used: SampleParams, num_tokens: int) -> None:
        own = self._sample_params
        changed = [name for name in _SHAPE_THE_DISTRIBUTION if getattr(used, name) != getattr(own, name)]
        if changed:
            self._foreign = ", ".join(f"{name}={getattr(used, name)} (not {getattr(own, name)})" for name in changed)
        else:
            self._num_own += num_tokens

    def _merge(self, given: Mapping[str, Any]) -> SampleParams:
        """Return the parameters of a request; those of one session mostly differ in `max_tokens` alone."""
        rest = {name: value for name, value in given.items() if name != "max_tokens"}
        if rest != self._known[0]:
            self._known = (rest, merge_sampling_params(self._sample_params, rest))
        limit = given.get("max_tokens")
        if isinstance(limit, int) and limit > 0:
            return self._known[1].model_copy(update={"max_tokens": limit})
        return merge_sampling_params(self._sample_params, given) if "max_tokens" in given else self._known[1]
