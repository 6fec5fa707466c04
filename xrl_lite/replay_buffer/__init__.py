"""Prompt groups between generation and training: their states, their age, and what outlives a kill. Needs no torch."""

from typing import TYPE_CHECKING

from xrl_lite.lazy import lazy_exports

if TYPE_CHECKING:
    from xrl_lite.replay_buffer.blocking import BlockingReplayBuffer
    from xrl_lite.replay_buffer.buffer import Metrics, RefillFn, ReplayBuffer
    from xrl_lite.replay_buffer.build import build_replay_buffer, load_buffer_class
    from xrl_lite.replay_buffer.config import (
        CustomSamplerConfig,
        FilterGroupsConfig,
        ReplayBufferConfig,
        StorageConfig,
    )
    from xrl_lite.replay_buffer.eviction import TRAIN, VAL, EvictionPolicy, TrainerMode, max_admitted
    from xrl_lite.replay_buffer.groups import GroupStatus, Lease, PromptGroup
    from xrl_lite.replay_buffer.pools import TaskPools
    from xrl_lite.replay_buffer.sqlite_store import SQLiteStore
    from xrl_lite.replay_buffer.store import GroupStore, MemoryStore

__all__ = [
    "TRAIN",
    "VAL",
    "BlockingReplayBuffer",
    "CustomSamplerConfig",
    "EvictionPolicy",
    "FilterGroupsConfig",
    "GroupStatus",
    "GroupStore",
    "Lease",
    "MemoryStore",
    "Metrics",
    "PromptGroup",
    "RefillFn",
    "ReplayBuffer",
    "ReplayBufferConfig",
    "SQLiteStore",
    "StorageConfig",
    "TaskPools",
    "TrainerMode",
    "build_replay_buffer",
    "load_buffer_class",
    "max_admitted",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__)
