"""What one step is made of. Plain lists, so that it can be made and sent without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, cast


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """N trajectories, those of one group next to each other; of a session too, in the order they were made.

    Every list has one entry per trajectory; entries that are lists have one value per response token.
    """

    prompts: list[list[int]]
    """Prompt tokens."""
    responses: list[list[int]]
    """Response tokens, as sampled."""
    response_masks: list[list[int]]
    """1 where a response token is trained on."""
    rollout_logprobs: list[list[float]]
    """Log-probability of each response token when it was sampled; NaN where an agent does not tell."""
    groups: list[int]
    """Group of each trajectory."""
    sessions: list[int]
    """Session (one attempt) of each trajectory; most have one trajectory."""
    policy_versions: list[list[int]] | None = None
    """Version of the weights that sampled each response token, -1 where it is not known; None if all were sampled by
    the weights before the step, whose version is ``step - 1``."""
    advantages: list[list[float]]
    """0 where a token is not trained on."""
    rewards: list[float] | None = None
    """Reward of the session of each trajectory; NaN where there is none."""
    reward_parts: dict[str, list[float]] | None = None
    """Numeric parts of the rewards by name, NaN where a reward lacks one."""
    reward_baselines: list[float] | None = None
    """Reward of a greedy response to each prompt; NaN where there is none."""
    old_logprobs: list[list[float]] | None = None
    """Under the weights before the step, by the trainer; None lets the engine compute them where it must."""
    ref_logprobs: list[list[float]] | None = None
    """Under the initial policy."""
    teacher_logprobs: list[list[float]] | None = None
    """Under the teacher."""
    values: list[list[float]] | None = None
    """Of a critic."""
    returns: list[list[float]] | None = None
    """What the critic is trained towards; there where `values` are."""
    sum_pi_squared: list[list[float]] | None = None
    """Sum of the squared probabilities of all tokens at each position."""
    rollout_is_weights: list[list[float]] | None = None
    """Importance weights of rollout correction."""
    temperature: float = 1.0
    """Temperature the tokens were sampled at: the trainer's logits are divided by it too."""
    step: int = 0
    """Number of the step; it seeds what is random in the update, on all ranks alike."""
    part: int = 0
    """Number of the part of the step, where it is trained in several."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                num_entries = len(cast("list[object]", value))
                assert num_entries == len(self.prompts), f"{name} has {num_entries} entries for {len(self.prompts)}"

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens with mask 1."""
        return sum(map(sum, self.response_masks))

    def select(self, indices: list[int]) -> TrainBatch:
        """Return the trajectories at `indices`, in that order."""
        chosen: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                chosen[field.name] = [value[i] for i in indices]
        if self.reward_parts is not None:
            chosen["reward_parts"] = {key: [part[i] for i in indices] for key, part in self.reward_parts.items()}
        return replace(self, **chosen)
