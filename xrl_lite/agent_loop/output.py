"""What an agent's loop returns: one trainable trajectory, in verl's fields."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from xrl_lite.data.token_builder import TokenRow


class AgentLoopMetrics(BaseModel):
    """Where the time of a trajectory went."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, defer_build=True)

    generate_sequences: float = 0.0
    """Seconds spent generating."""
    tool_calls: float = 0.0
    """Seconds spent in tools."""
    compute_score: float = 0.0
    """Seconds spent judging."""
    num_preempted: int = -1
    """How often the engine preempted it; -1 where it does not count."""


class AgentLoopOutput(BaseModel):
    """One trajectory."""

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True, defer_build=True
    )

    prompt_ids: list[int]
    """What the model saw first."""
    response_ids: list[int]
    """Tokens of the model, and between them those of tools and users."""
    response_mask: list[int]
    """1 on tokens of the model, 0 on others; as long as `response_ids`."""
    response_logprobs: list[float] | None = None
    """Log-probability of each response token; 0.0 on others' tokens. None where they are not known: the old policy is
    computed by the trainer, as ever, and the attempt fails only where the algorithm weighs by these."""
    routed_experts: Any = None
    """Experts each token was routed to."""
    multi_modal_data: dict[str, Any] | None = None
    """Images, videos and audio that the trajectory holds."""
    reward_score: float | None = Field(default=None, allow_inf_nan=False)
    """Reward, a finite number; where it is given no judger is asked."""
    num_turns: int = 0
    """Turns of user, model and tools together."""
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    """Where the time went."""
    extra_fields: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Whatever else; ``reward_extra_info``, ``policy_versions``, ``finish_reason``, ``stop_reason`` are understood."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Arguments of the image processor."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lengths = {"response_ids": len(self.response_ids), "response_mask": len(self.response_mask)}
        if self.response_logprobs is not None:
            lengths["response_logprobs"] = len(self.response_logprobs)
        if len(set(lengths.values())) > 1:
            given = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"one entry per response token is needed, got {given}.")
        return self

    @classmethod
    def of_row(cls, row: TokenRow, **fields: Any) -> Self:
        """Make it of a row of the token builder; further fields by name."""
        extra = {"policy_versions": list(row.policy_versions), **fields.pop("extra_fields", {})}
        return cls(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.response_mask,
            response_logprobs=row.response_logprobs,
            extra_fields=extra,
            **fields,
        )

    @classmethod
    def aborted(cls, prompt_ids: list[int]) -> Self:
        """Make the empty trajectory of an attempt that was cut short and is to be made again."""
        return cls(
            prompt_ids=prompt_ids,
            response_ids=[],
            response_mask=[],
            response_logprobs=[],
            extra_fields={"stop_reason": "aborted", "policy_versions": []},
        )

    def as_dict(self) -> dict[str, Any]:
        """Return what was set, under verl's names of batch columns; the reward stands on the last token."""
        given = self.model_dump(exclude_unset=True)
        names = {"prompt_ids": "prompts", "response_ids": "responses", "response_logprobs": "rollout_log_probs"}
        renamed = {names.get(name, name): value for name, value in given.items() if name != "reward_score"}
        if self.reward_score is not None:
            last = max((place for place, mask in enumerate(self.response_mask) if mask), default=-1)
            scores = [0.0] * len(self.response_ids)
            scores[last : last + 1] = [self.reward_score]
            renamed["rm_scores"] = scores
        return renamed
