"""Settings of the replay buffer."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from xrl_lite.replay_buffer.eviction import EvictionPolicy, TrainerMode
from xrl_lite.settings import Settings


class CustomSamplerConfig(Settings):
    """A subclass of `ReplayBuffer` of the user's, named as verl names it."""

    path: str | None = None
    """File or module that holds the class: "my_file.py", "file:///home/me/my_file.py", "my.module" or
    "pkg://my.module"."""

    name: str | None = None
    """Name of the class. It is built with `trainer_mode`, `trainer_config`, `max_off_policy_threshold`,
    `max_off_policy_strategy`, `sampler_kwargs` and `refill_fn`."""

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.path is None) != (self.name is None):
            raise ValueError("give both path (a file or module) and name (a class in it), or none of them.")
        return self

    @property
    def object_path(self) -> str | None:
        """The class as "module:name" or "file.py:name"."""
        if self.path is None:
            return None
        return f"{self.path.removeprefix('file://').removeprefix('pkg://')}:{self.name}"


class FilterGroupsConfig(Settings):
    """Dynamic sampling (DAPO, arXiv:2503.14476): groups whose attempts all got the same are replaced."""

    enable: bool = False
    """Filter groups."""

    metric: str | None = None
    """Key of the reward that must differ within a group, for example score or acc."""

    max_inflight_gen_batches: int = Field(default=2, gt=0)
    """In the sync mode no more than this many batches are generated at the same time."""

    max_filtered_batches: int = Field(default=10, gt=0)
    """Starved once so many batches' worth of groups were filtered, or too old, for one batch to train on."""

    @model_validator(mode="after")
    def _has_a_metric(self) -> Self:
        if self.enable and self.metric is None:
            raise ValueError("filter_groups.enable needs filter_groups.metric: a key of the reward, such as score.")
        return self


class StorageConfig(Settings):
    """What is kept of everything that was generated."""

    durable: bool = True
    """Keep it in buffer.sqlite in the run's folder, so that it survives a kill. False keeps it in memory only."""

    compression_level: int = Field(default=1, ge=0, le=3)
    """How much to compress; 0 only packs numbers tightly."""

    max_memory_bytes: int = Field(default=2 << 30, gt=0)
    """Finished groups beyond this wait on the disk only, until they are trained on (estimated from their tokens)."""

    keep_steps: int | None = Field(default=50, ge=0)
    """Steps before the oldest kept checkpoint whose trajectories are still kept, to look at; None keeps all."""


class ReplayBufferConfig(Settings):
    """Which groups are trained on, when, and which are not."""

    max_off_policy_threshold: int = Field(default=8, gt=0)
    """Most steps from the dispatch of a group to the step that trains on it, both counted; 1 is on-policy. Only the
    async modes look at it."""

    max_off_policy_strategy: Literal["drop", "wait"] = "drop"
    """What happens at the threshold: drop replaces groups that are older, wait holds sampling back until the old ones
    have ended."""

    stragglers: Literal["wait", "pass"] | None = None
    """wait trains on groups strictly in the order of their admission. pass lets finished ones go before unfinished
    older ones, as long as none of these then becomes older than the threshold. When not given: pass in
    colocate_async, which is for that, and wait in the other modes."""

    sync_refill_failed_groups: bool = True
    """In the sync mode, replace groups of which nothing came. False trains on fewer."""

    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Dynamic sampling."""

    min_sessions: int = Field(default=1, gt=0)
    """A group counts as finished with so many good attempts, whatever became of the others."""

    on_starvation: Literal["error", "train_partial", "continue"] = "error"
    """When filters and failures eat every group: stop, train on the groups there are, or go on for ever."""

    replay_policy: Literal["fifo", "staleness"] = "fifo"
    """Which of several finished, aborted or expired groups of a task is handed out first: the one that came first, or
    the one with the oldest tokens."""

    report_wait_s: float = Field(default=30.0, gt=0)
    """While a batch is waited for, the log says so often what for."""

    custom_sampler: CustomSamplerConfig = CustomSamplerConfig()
    """A buffer of the user's own."""

    sampler_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Handed to the custom sampler."""

    storage: StorageConfig = StorageConfig()
    """What is kept."""

    def eviction_policy(self, mode: TrainerMode) -> EvictionPolicy:
        """Return what decides about groups in a mode."""
        return EvictionPolicy(
            mode=mode,
            max_off_policy_threshold=self.max_off_policy_threshold,
            max_off_policy_strategy=self.max_off_policy_strategy,
            filter_metric=self.filter_groups.metric if self.filter_groups.enable else None,
            sync_refill_failed_groups=self.sync_refill_failed_groups,
            stragglers=self.stragglers or ("pass" if mode == "colocate_async" else "wait"),
        )
