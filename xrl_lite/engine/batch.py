"""What one optimizer step is made of. Plain lists, so that it can be made and sent without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """N trajectories, those of one group next to each other."""

    prompts: list[list[int]]
    """Prompt tokens."""
    responses: list[list[int]]
    """Response tokens, as sampled."""
    response_masks: list[list[int]]
    """1 where a response token is trained on; as long as the response."""
    rollout_logprobs: list[list[float]]
    """Log-probability of each response token when it was sampled; as long as the response."""
    advantages: list[float]
    """One per trajectory; its tokens share it."""
    groups: list[int]
    """Group of each trajectory."""
    temperature: float = 1.0
    """Temperature the tokens were sampled at: the trainer's logits are divided by it too."""

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, indices: list[int]) -> TrainBatch:
        """Return the trajectories at `indices`, in that order."""
        return TrainBatch(
            prompts=[self.prompts[i] for i in indices],
            responses=[self.responses[i] for i in indices],
            response_masks=[self.response_masks[i] for i in indices],
            rollout_logprobs=[self.rollout_logprobs[i] for i in indices],
            advantages=[self.advantages[i] for i in indices],
            groups=[self.groups[i] for i in indices],
            temperature=self.temperature,
        )
