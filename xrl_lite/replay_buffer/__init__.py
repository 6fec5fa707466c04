"""Prompt groups between generation and training."""

from xrl_lite.replay_buffer.buffer import GroupStatus, PromptGroup, ReplayBuffer

__all__ = ["GroupStatus", "PromptGroup", "ReplayBuffer"]
