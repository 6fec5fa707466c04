"""Settings of producing: which tasks, how many groups ahead, and what becomes of those that are cut short."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from xrl_lite.agent_loop.base import AGENT_LOOPS, AgentLoopConfig, check_batch_judge
from xrl_lite.agent_loop.single_turn import SingleTurnAgentLoopConfig
from xrl_lite.data import RolloutState, SamplerConfig, stale_threshold
from xrl_lite.judger import AnyJudgerConfig
from xrl_lite.registry import Registry, load_object
from xrl_lite.settings import Settings, chosen_by_type

IsValidSampleFn = Callable[[Sequence[RolloutState]], bool]
"""Whether a completed group is to be trained on."""

ShouldContinueFn = Callable[..., bool]
"""``(completed_count, batch_size, **kwargs) -> bool``: whether a batch needs further groups."""


def all_are_valid(samples: Sequence[RolloutState]) -> bool:
    """Keep every group."""
    return True


def until_complete(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
    """Go on until as many groups are complete as the batch has."""
    return completed_count < batch_size


class ProduceStrategyConfig(Settings, ABC):
    """What all ways of producing have."""

    is_valid_sample_fn: str | None = None
    """Path of ``(samples) -> bool``, "package.module:name" or "file.py:name": completed groups for which it is false
    are replaced. All are kept when not given."""

    should_continue_fn: str | None = None
    """Path of ``(completed_count, batch_size, **kwargs) -> bool``: whether to go on producing for a batch. Until it is
    complete when not given."""

    over_sample_threshold: float = Field(default=0.0, ge=0.0)
    """Groups generated beyond those of the batch, as a share of it."""

    enable_partial_rollout: bool = False
    """What is cut short goes on from its tokens; otherwise it is generated anew."""

    max_staleness: int = Field(default=0, ge=0)
    """Weight syncs by which a sequence may be behind when it is trained on."""

    max_token_staleness: int | None = Field(default=None, ge=0)
    """Weight syncs by which a token may be behind; older ones are masked. None looks at sequences only."""

    tail_batch_trigger_size: int = Field(default=-1, ge=-1)
    """Groups that became too old are collected, and made again once there are so many, without over-sampling; 0 makes
    them again as soon as there is one; -1 replaces them by others."""

    @property
    def is_valid(self) -> IsValidSampleFn:
        """The validity filter."""
        return load_object(self.is_valid_sample_fn) if self.is_valid_sample_fn else all_are_valid

    @property
    def should_continue(self) -> ShouldContinueFn:
        """The stop rule."""
        return load_object(self.should_continue_fn) if self.should_continue_fn else until_complete

    @property
    def expired_groups_retryable(self) -> bool:
        """Whether groups that became too old are made again."""
        return self.tail_batch_trigger_size >= 0

    def stale_threshold(self, sync_weights_interval: int = 1) -> int:
        """Return the staleness at which a sequence is too old, in steps."""
        return stale_threshold(self.max_staleness, sync_weights_interval)

    def token_stale_threshold(self, sync_weights_interval: int = 1) -> int | None:
        """Return the staleness at which a token is too old, in steps."""
        if self.max_token_staleness is None:
            return None
        return stale_threshold(self.max_token_staleness, sync_weights_interval)


class SyncProduceStrategyConfig(ProduceStrategyConfig):
    """A batch at a time, of the newest weights."""

    @model_validator(mode="after")
    def _is_on_policy(self) -> Self:
        changed = [
            name
            for name in ("over_sample_threshold", "enable_partial_rollout", "max_staleness", "max_token_staleness")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if changed:
            raise ValueError(
                f"{', '.join(changed)} need(s) produce_strategy_config.type=async: nothing is carried over."
            )
        return self


class AsyncProduceStrategyConfig(ProduceStrategyConfig):
    """More than a batch at a time; what is left over, or cut short, is used in later steps."""

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        tokens = self.max_token_staleness
        if tokens is not None and tokens > self.max_staleness:
            raise ValueError(
                f"max_token_staleness ({tokens}) can never be reached with max_staleness={self.max_staleness}: the "
                f"sequence is too old before. Raise max_staleness, or leave max_token_staleness out."
            )
        return self


PRODUCE_STRATEGIES: Registry[type[ProduceStrategyConfig]] = Registry(
    "produce strategy",
    {
        "sync": "xrl_lite.agent_loop.strategy:SyncProduceStrategyConfig",
        "async": "xrl_lite.agent_loop.strategy:AsyncProduceStrategyConfig",
    },
)
"""Settings classes of the ways of producing, by name."""

AnyAgentLoopConfig = Annotated[
    AgentLoopConfig, *chosen_by_type(AGENT_LOOPS.resolve, AGENT_LOOPS.name_of, default="single_turn")
]
"""Settings of any agent loop: an object, or a mapping whose `type` names it (single_turn when not given)."""

AnyProduceStrategyConfig = Annotated[
    ProduceStrategyConfig, *chosen_by_type(PRODUCE_STRATEGIES.resolve, PRODUCE_STRATEGIES.name_of, default="sync")
]
"""Settings of any way of producing: an object, or a mapping whose `type` names it (sync when not given)."""


class TaskSpecConfig(Settings):
    """One thing to train on: its rows, how attempts are made, how they are judged."""

    task_name: str
    """Name of the task in metrics and logs."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the groups among several tasks, relative to the weights of the others."""

    sampler_config: SamplerConfig
    """Rows, and attempts per prompt."""

    agent_loop_config: AnyAgentLoopConfig = Field(default_factory=SingleTurnAgentLoopConfig)
    """How an attempt is made."""

    judger_config: AnyJudgerConfig | None = Field(
        default=None, json_schema_extra={"settings": "xrl_lite.judger:JudgerConfig"}
    )
    """How an attempt is judged; by the data source of the rows when not given."""

    produce_strategy_config: AnyProduceStrategyConfig = Field(
        default_factory=SyncProduceStrategyConfig,
        json_schema_extra={"settings": "xrl_lite.agent_loop:AsyncProduceStrategyConfig"},
    )
    """How far generation runs ahead."""

    @model_validator(mode="after")
    def _check_batch_judge(self) -> Self:
        if self.judger_config is not None:
            check_batch_judge(self.agent_loop_config, self.judger_config)
        return self


class AgentLoopManagerConfig(Settings):
    """How groups are run."""

    tasks: list[TaskSpecConfig] = Field(default_factory=list[TaskSpecConfig])
    """Further tasks beside the run's `task`, mixed in by their weights."""

    agent_loop_manager_class: str | None = None
    """Path of a class that runs groups instead of `AgentLoopManager`: "package.module:Class" or "file.py:Class". It has
    ``async create(...)`` and ``generate_sequences(prompts)``, which returns at once."""

    group_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest time for a group, in training and in evaluations. Then it closes with the attempts that have ended."""

    pause_timeout_s: float = Field(default=300.0, gt=0)
    """When generation is paused, groups that are about to end (being judged, say) get so long."""

    abort_interval_s: float = Field(default=5.0, gt=0)
    """While pausing, requests in flight are ended anew after so long: attempts with several turns make new ones."""

    backoff_s: float = Field(default=0.5, gt=0)
    """Wait before groups are drawn again after nothing but failures; doubled each time."""

    max_backoff_s: float = Field(default=30.0, gt=0)
    """Longest such wait."""
