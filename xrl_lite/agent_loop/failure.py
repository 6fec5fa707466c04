"""Attempts that are lost, and why."""

from __future__ import annotations

import traceback
from pathlib import Path

from xrl_lite.data import RolloutState, Status


def failed(state: RolloutState, reason: str) -> RolloutState:
    """Mark a state as lost."""
    state.status = Status.FAILED
    state.error_msg = f"sample {state.rollout_id}: {reason}"
    return state


def late(state: RolloutState, timeout_s: float | None) -> RolloutState:
    """Mark a state as lost that had not ended when its group had had its time."""
    return failed(state, "it was cancelled" if timeout_s is None else f"not ended within {timeout_s:g} s")


def describe_error(error: BaseException) -> str:
    """Return type, message, file, line and function of an error in user code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    place = (own or frames)[-1] if frames else None
    where = f" at {place.filename}:{place.lineno} in {place.name}" if place else ""
    return f"{type(error).__name__}: {error}{where}"
