"""How old generated tokens are, and what becomes of attempts that are too old.

Versions count weight updates. A token of version v that is trained on in step t is ``t - v - 1`` versions behind: 0 if
no newer weights existed. Two bounds: on the oldest token of a sequence, and on each token (older ones are masked).
Tokens whose version is not known are never too old.
"""

from __future__ import annotations

from collections.abc import Sequence

from xrl_lite.data.rollout_state import (
    UNKNOWN_VERSION,
    RolloutState,
    Status,
    calculate_seq_staleness,
    find_uneven,
    reset_rollout_response,
)

_NEVER_TRAINED = (Status.FAILED, Status.FILTERED)
_REQUIRED = "message"


def stale_threshold(max_staleness: int, sync_weights_interval: int = 1) -> int:
    """Return the staleness at which a sequence (or a token) is too old: ``(max_staleness + 1) * interval``."""
    return (max_staleness + 1) * sync_weights_interval


def version_range(state: RolloutState) -> tuple[int, int] | None:
    """Return the oldest and the newest version of a state's tokens; None where there are none, or none is known."""
    steps = state.response_model_steps
    if not steps:
        return None
    first = steps[0]
    if steps.count(first) == len(steps):  # nearly always, and counting is much faster than comparing
        return None if first == UNKNOWN_VERSION else (first, first)
    known = [step for step in steps if step != UNKNOWN_VERSION]
    return min(known), max(known)


def refresh_seq_staleness(group: Sequence[RolloutState], current_train_step: int) -> None:
    """Set the staleness of each state from its oldest token; 0 for one without tokens, or whose age is not known."""
    for state in group:
        versions = version_range(state)
        state.seq_staleness = calculate_seq_staleness(versions[0], current_train_step) if versions else 0


def calculate_group_effective_response_masks(
    group: Sequence[RolloutState], *, current_train_step: int, token_stale_threshold: int | None
) -> list[list[int] | None]:
    """Return for each state its response mask without tokens that are too old; the states stay as they are.

    None for a state stands for "as it is": no threshold, no response, a mask of zeros, or (for the whole group) an
    agent that built the training input itself.

    Raises:
        ValueError: a response mask has not the length of its response; names the sample.
    """
    if token_stale_threshold is None or any(state.input_ids or state.labels for state in group):
        return [None] * len(group)
    return [_effective_mask(state, current_train_step, token_stale_threshold) for state in group]


def expire_stale_states(
    group: Sequence[RolloutState],
    *,
    current_train_step: int,
    stale_threshold: int | None,
    token_stale_threshold: int | None = None,
    retryable: bool = True,
) -> bool:
    """Mark what is too old as EXPIRED and return whether anything is.

    A state expires if it did before, if its oldest token has reached `stale_threshold`, or if the token bound masks
    all of it. FAILED and FILTERED ones are not trained on, so their age decides nothing.

    Args:
        group: Attempts at one prompt, none of which is being worked on.
        current_train_step: Step that would train on them.
        stale_threshold: Bound on sequences; None for none.
        token_stale_threshold: Bound on tokens; None for none.
        retryable: Expired attempts lose their response and can be made again, fresh siblings keep theirs. Otherwise the
            whole group expires.
    """
    refresh_seq_staleness(group, current_train_step)
    masks = calculate_group_effective_response_masks(
        group, current_train_step=current_train_step, token_stale_threshold=token_stale_threshold
    )
    expired = [
        state.status not in _NEVER_TRAINED
        and (
            state.status is Status.EXPIRED
            or (stale_threshold is not None and state.seq_staleness >= stale_threshold)
            or (mask is not None and not any(mask))
        )
        for state, mask in zip(group, masks, strict=True)
    ]
    for state, is_expired in zip(group, expired, strict=True):
        if any(expired) and (is_expired or not retryable):
            state.status = Status.EXPIRED
            if retryable:
                reset_rollout_response(state)
    return any(expired)


def discard_rollout_state(state: RolloutState) -> RolloutState:
    """Drop everything a state holds but its prompt messages, so that whoever still refers to it keeps little alive."""
    for name, field in RolloutState.model_fields.items():
        if name != _REQUIRED:
            setattr(state, name, field.get_default(call_default_factory=True))
    return state


def _effective_mask(state: RolloutState, train_step: int, threshold: int) -> list[int] | None:
    mask, num_tokens = state.response_mask, len(state.response_ids or ())
    if not num_tokens or (mask is not None and not any(mask)):
        return None
    if (uneven := find_uneven(state)) is not None:
        raise ValueError(f"sample {state.rollout_id}: {uneven[0]}: {uneven[1]}.")
    steps = state.response_model_steps or []
    if len(steps) != num_tokens:  # of an agent that does not tell, or not of each token
        steps = [UNKNOWN_VERSION] * num_tokens
    return [
        kept * (step == UNKNOWN_VERSION or calculate_seq_staleness(step, train_step) < threshold)
        for kept, step in zip(mask or [1] * num_tokens, steps, strict=True)
    ]
