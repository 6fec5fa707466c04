"""Makes the buffer that the settings name."""

from __future__ import annotations

from typing import Any

from xrl_lite.errors import ConfigError
from xrl_lite.registry import load_object
from xrl_lite.replay_buffer.buffer import ReplayBuffer
from xrl_lite.replay_buffer.config import ReplayBufferConfig
from xrl_lite.replay_buffer.events import Events
from xrl_lite.replay_buffer.eviction import TrainerMode
from xrl_lite.replay_buffer.store import GroupStore


def build_replay_buffer(
    config: ReplayBufferConfig,
    *,
    trainer_mode: TrainerMode = "sync",
    trainer_config: Any = None,
    store: GroupStore | None = None,
    max_failed_groups: int | None = None,
    events: Events | None = None,
) -> ReplayBuffer:
    """Make the built-in buffer, or the user's.

    Args:
        config: Settings.
        trainer_mode: Layout of generation and training.
        trainer_config: Settings of that mode, handed to a custom buffer.
        store: Where groups are kept; in memory only when not given.
        max_failed_groups: See `ReplayBuffer.configure`.
        events: Is told what happens.

    Raises:
        PluginError: the custom class cannot be loaded.
        ConfigError: it is no `ReplayBuffer`, or does not take what such a class is built with.
    """
    cls = load_buffer_class(config)
    try:
        buffer = cls(
            trainer_mode=trainer_mode,
            trainer_config=trainer_config,
            max_off_policy_threshold=config.max_off_policy_threshold,
            max_off_policy_strategy=config.max_off_policy_strategy,
            sampler_kwargs=config.sampler_kwargs,
            refill_fn=None,
        )
    except TypeError as error:
        raise ConfigError(
            f"{cls.__module__}.{cls.__qualname__} cannot be built: {error}. A custom sampler is built with "
            f"trainer_mode, trainer_config, max_off_policy_threshold, max_off_policy_strategy, sampler_kwargs and "
            f"refill_fn."
        ) from error
    return buffer.configure(config, store=store, max_failed_groups=max_failed_groups, events=events)


def load_buffer_class(config: ReplayBufferConfig) -> type[ReplayBuffer]:
    """Return the class of the buffer.

    Raises:
        PluginError: the custom one cannot be loaded.
        ConfigError: it is no `ReplayBuffer`.
    """
    path = config.custom_sampler.object_path
    if path is None:
        return ReplayBuffer
    cls = load_object(path)
    if not (isinstance(cls, type) and issubclass(cls, ReplayBuffer)):
        raise ConfigError(f"replay_buffer.custom_sampler: {path} must be a subclass of ReplayBuffer, got {cls!r}.")
    return cls
