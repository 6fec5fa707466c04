"""verl's way to configure rewards: a ``compute_score``, and a reward manager around it.

=============  =====================================================================================================
naive          the function's score
dapo           plus the penalty for responses near the length limit (`overlong_buffer_cfg`)
rate_limited   the function is asked at most so often per minute; for services
=============  =====================================================================================================

Where verl's manager returns 0.0 for a time-out or an error, the sample fails here, as `on_error` says; `rate_limit`
holds for the judger as a whole, `max_concurrency` for each worker; `request_timeout` is hard for sync functions as
well.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from functools import cache
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from xrl_lite.data import RolloutState
from xrl_lite.errors import ConfigError, DataError
from xrl_lite.judger.adapters import RewardAdapter, VerlBatchReward, VerlReward
from xrl_lite.judger.base import Judger
from xrl_lite.judger.config import JudgerConfig, RewardCode
from xrl_lite.judger.data_sources import kind_for, settings_of
from xrl_lite.judger.handler import RewardHandler, is_async, is_url
from xrl_lite.judger.native import NativeJudger, run_to_end
from xrl_lite.judger.outcome import RewardValueError
from xrl_lite.judger.presets.dapo_math import overlong_penalty
from xrl_lite.settings import Settings


class OverlongBufferConfig(Settings):
    """The stretch before the length limit in which a penalty grows; DAPO, https://arxiv.org/abs/2503.14476, 3.4."""

    enable: bool = True
    """Whether there is a penalty."""

    len: int = Field(gt=0)
    """Length of the stretch, in tokens."""

    penalty_factor: float = 1.0
    """Penalty at its end."""

    log: bool = False
    """Whether ``overlong_reward`` and ``overlong`` are parts of the reward."""


class ManagedReward(VerlReward):
    """Calls ``compute_score`` as verl's reward managers do.

    Args:
        function: ``compute_score``.
        reward_kwargs: Further arguments; they win over what the sample gives.
        max_resp_len: Longest response, in tokens.
        overlong: The penalty, if there is one.
    """

    needs = frozenset({"data_source", "columns", "num_response_tokens"})

    def __init__(
        self,
        function: RewardHandler,
        *,
        reward_kwargs: Mapping[str, Any] | None = None,
        max_resp_len: int | None = None,
        overlong: OverlongBufferConfig | None = None,
    ) -> None:
        super().__init__(function, reward_kwargs=reward_kwargs)
        self._max_resp_len = max_resp_len
        self._overlong = overlong

    def required_columns(self) -> list[str]:
        """Return the data source, where it alone chooses the scorer."""
        chooses = self.function is default_compute_score and "data_source" not in self.reward_kwargs
        return ["data_source"] if chooses else []

    def __call__(self, payload: Mapping[str, Any], extra_info: Mapping[str, Any]) -> Any:
        """Return the reward dict, or an awaitable of it."""
        result = super().__call__(payload, extra_info)
        return self._shape_later(result, payload) if inspect.isawaitable(result) else self._shape(result, payload)

    async def _shape_later(self, result: Awaitable[Any], payload: Mapping[str, Any]) -> Any:
        return self._shape(await result, payload)

    def _shape(self, reward: Any, payload: Mapping[str, Any]) -> Any:
        overlong = self._overlong
        if overlong is None or not overlong.enable:
            return reward
        assert self._max_resp_len is not None, "checked with the settings"
        num_tokens = payload["num_response_tokens"]
        if num_tokens is None:
            raise RewardValueError("overlong_buffer_cfg needs the response_ids of the sample, to know its length.")
        penalty = overlong_penalty(
            num_tokens,
            max_response_len=self._max_resp_len,
            buffer_len=overlong.len,
            factor=overlong.penalty_factor,
        )
        logged = {"overlong_reward": penalty, "overlong": penalty < 0} if overlong.log else {}
        return {**reward, **logged, "score": reward["score"] + penalty}


class ManagedBatchReward(ManagedReward, VerlBatchReward):
    """The same for the batch form of ``compute_score``."""


def default_compute_score(
    data_source: str | None, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Score by the judger that is known for a data source; see `xrl_lite.judger.data_sources.kind_for`.

    Raises:
        ConfigError: none is known; names the closest.
        DataError: the sample has no data source.
    """
    if data_source is None:
        raise DataError("The sample has no data source to choose a scorer by. Set data.data_source or reward_handler.")
    judger = _judger_of(kind_for(data_source))
    state = RolloutState(message=[], response=solution_str, reward_model={"ground_truth": ground_truth})
    payload = judger.preprocess(state)
    if isinstance(judger, NativeJudger):
        return judger.judge_payload_here(payload)
    return run_to_end(judger.judge_payload(payload))


_MANAGED: dict[type[RewardAdapter | None], type[ManagedReward]] = {
    VerlReward: ManagedReward,
    VerlBatchReward: ManagedBatchReward,
}


class VerlJudgerConfig(JudgerConfig):
    """``compute_score`` under one of verl's reward managers; see `xrl_lite.judger.presets.verl`."""

    judger_name: str = "verl"
    """Name in messages and metrics."""

    reward_handler: RewardCode = Field(default_factory=lambda: default_compute_score, exclude=True)
    """``compute_score(data_source, solution_str, ground_truth, extra_info)``; chosen by data source if not given."""

    signature: str = "verl"
    """How the reward function is called."""

    reward_manager: Literal["naive", "dapo", "rate_limited"] = "naive"
    """What is done around the function. `rate_limited` takes its limits from `rate_limit` and `max_concurrency`."""

    max_resp_len: int | None = Field(default=None, gt=0)
    """Longest response, in tokens; for `dapo`."""

    overlong_buffer_cfg: OverlongBufferConfig | None = None
    """Penalty for responses near that length; for `dapo`."""

    @model_validator(mode="after")
    def _manager_has_what_it_needs(self) -> Self:
        buffer = self.overlong_buffer_cfg
        if buffer is not None and self.reward_manager != "dapo":
            raise ConfigError("overlong_buffer_cfg has an effect with reward_manager: dapo only.")
        if buffer is not None and buffer.enable and (self.max_resp_len is None or buffer.len > self.max_resp_len):
            raise ConfigError(
                f"overlong_buffer_cfg needs max_resp_len of at least its len={buffer.len}, got {self.max_resp_len}."
            )
        if buffer is not None and buffer.enable and not isinstance(self.adapter(), ManagedReward):
            raise ConfigError(
                f"overlong_buffer_cfg goes with a function of signature verl or verl_batch; reward_handler is "
                f"{self.reward_handler!r}, called as {self.signature}. Give such a function, or leave it out."
            )
        if self.reward_manager == "rate_limited" and self.rate_limit is None and self.max_concurrency is None:
            raise ConfigError("reward_manager: rate_limited needs rate_limit ({max_rpm: 60}) or max_concurrency.")
        return self

    def adapter(self) -> RewardAdapter | None:
        """Return the reward function with the manager around it."""
        plain = super().adapter()
        managed = _MANAGED.get(type(plain))
        if plain is None or managed is None:
            return plain
        return managed(
            plain.function,
            reward_kwargs=plain.reward_kwargs,
            max_resp_len=self.max_resp_len,
            overlong=self.overlong_buffer_cfg,
        )

    def waits_rather_than_computes(self) -> bool:
        """Return whether one process may run many judgements at a time."""
        return is_url(self.reward_handler) or is_async(self.adapter())

    def build_local(self) -> Judger:
        """Return the judger."""
        return self.native(self.adapter() or self.reward_handler, self.extra_info)


@cache
def _judger_of(kind: str) -> Judger:
    return settings_of(kind, judger_name=kind).build_local()
