"""Generation as verl's agent loops ask for it: a request id, token ids and a dict of sampling parameters."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.data.sampling_params import merge_sampling_params
from xrl_lite.errors import ConfigError, RolloutError
from xrl_lite.rollout.controller import RolloutController
from xrl_lite.rollout.replica import GenerateResult

_LISTS = {"stop", "stops", "stop_token_ids"}

STOP_REASONS = {Status.COMPLETED: "completed", Status.ABORTED: "aborted"}


@dataclass(kw_only=True)
class TokenOutput:
    """What verl's rollout servers answer."""

    token_ids: list[int]
    """Sampled tokens."""
    log_probs: list[float] | None = None
    """One per token."""
    routed_experts: Any = None
    """Experts of each token, where the engine knows."""
    stop_reason: str | None = None
    """completed or aborted."""
    num_preempted: int | None = None
    """How often the engine computed it anew, where it counts."""
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """`global_steps`: version of the weights of the last token; `min_global_steps`, `max_global_steps`; and
    `policy_versions`, one per token; `finish_reason`."""


class LLMClient:
    """Generates for verl-style agent loops. Requests with one id go to one replica.

    Args:
        controller: Generates.
        max_tokens: Longest response where the sampling parameters do not say.
        resume_aborted: Go on after an abort, with the weights there are then, instead of returning what there is.
    """

    def __init__(self, controller: RolloutController, *, max_tokens: int = 2048, resume_aborted: bool = False) -> None:
        self._controller = controller
        self._max_tokens = max_tokens
        self._resume_aborted = resume_aborted

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Return the response to a prompt.

        Args:
            request_id: Sticks to a replica; also the source of the seed, next to the number of prompt tokens.
            prompt_ids: Everything the model sees before the response.
            sampling_params: As verl gives them: temperature, top_p, top_k, max_tokens, stop, ...
            image_data: Must be None, as the three below: there is no engine for them yet.
            video_data: See `image_data`.
            audio_data: See `image_data`.
            mm_processor_kwargs: See `image_data`.
            priority: Taken and not used: requests are served in order.

        Raises:
            ConfigError: a sampling parameter is unknown or out of range.
            RolloutError: the response could not be generated.
        """
        if any(item is not None for item in (image_data, video_data, audio_data, mm_processor_kwargs)):
            raise ConfigError("Images, video and audio cannot be generated from: there is no engine for them yet.")
        state = self._state(request_id, prompt_ids, sampling_params)
        while True:
            state = await self._controller.generate(state, resume=self._resume_aborted)
            if state.status is Status.FAILED:
                raise RolloutError(state.error_msg or f"request {request_id} failed")
            if state.status is not Status.ABORTED or not self._resume_aborted:
                return _output(state)

    @asynccontextmanager
    async def streaming(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> AsyncGenerator[AsyncIterator[TokenOutput]]:
        """Yield an iterator over new tokens as they come, whose last item has no tokens and a stop reason.

        Leaving the context early ends the request.

        Raises:
            ConfigError, RolloutError: as `generate`.
        """
        state = self._state(request_id, prompt_ids, sampling_params)

        async def outputs(chunks: AsyncIterator[GenerateResult]) -> AsyncIterator[TokenOutput]:
            async for chunk in chunks:
                yield TokenOutput(token_ids=chunk.token_ids, log_probs=chunk.logprobs)
            if state.status is Status.FAILED:
                raise RolloutError(state.error_msg or f"request {request_id} failed")
            whole = _output(state)
            yield TokenOutput(
                token_ids=[], log_probs=[], stop_reason=whole.stop_reason, extra_fields=whole.extra_fields
            )

        async with self._controller.streaming(state) as chunks:
            yield outputs(chunks)

    def _state(self, request_id: str, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> RolloutState:
        return RolloutState(
            message=[],
            prompt_ids=list(prompt_ids),
            rollout_id=request_id,
            session_id=request_id,
            sample_params=read_sampling_params(params, max_tokens=self._max_tokens),
        )


def read_sampling_params(params: Mapping[str, Any], *, max_tokens: int) -> SampleParams:
    """Make sample parameters of a dict as verl's agent loops pass it.

    Raises:
        ConfigError: one is unknown or out of range.
    """
    if params.get("n", 1) != 1:
        raise ConfigError(f"sampling parameter n={params['n']}: one request gives one response. Send {params['n']}.")
    given: dict[str, Any] = {name: [] if value is None and name in _LISTS else value for name, value in params.items()}
    return merge_sampling_params(SampleParams(), {"max_tokens": max_tokens, **given})


def _output(state: RolloutState) -> TokenOutput:
    versions = state.response_model_steps or []
    return TokenOutput(
        token_ids=state.response_ids or [],
        log_probs=state.logprobs,
        routed_experts=state.routed_experts,
        stop_reason=STOP_REASONS.get(state.status),
        extra_fields={
            "global_steps": versions[-1] if versions else None,
            "min_global_steps": min(versions, default=None),
            "max_global_steps": max(versions, default=None),
            "policy_versions": versions,
            "finish_reason": state.finish_reason,
        },
    )
