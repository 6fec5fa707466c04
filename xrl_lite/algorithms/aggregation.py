"""From the losses of tokens to one number, the same however an update is split.

Every mode is a weighted sum whose weights hold the counts of the *whole* update, over all micro-batches and ranks. So
the losses of micro-batches simply add up, and so do their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xrl_lite.algorithms.masked import select
from xrl_lite.algorithms.rows import pad_rows
from xrl_lite.errors import ConfigError, did_you_mean

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "session-mean-token-mean",
)


@dataclass(frozen=True, kw_only=True)
class BatchInfo:
    """Counts of a whole update. A rank gets them beside its share of the rows."""

    dp_size: int = 1
    """Ranks whose gradients are averaged; the loss is multiplied by it to make up for that."""
    batch_num_tokens: int
    """Trained tokens."""
    global_batch_size: int
    """Rows with at least one trained token."""
    num_sessions: int
    """Sessions with at least one trained token."""
    num_positive_tokens: int = 0
    """Trained tokens with an advantage above 0."""
    num_negative_tokens: int = 0
    """Trained tokens with an advantage below 0."""
    loss_scale_factor: float | None = None
    """Tokens that seq-mean-token-sum-norm divides by."""

    @classmethod
    def of(
        cls,
        masks: Sequence[Sequence[int]],
        sessions: Sequence[int],
        advantages: Sequence[Sequence[float]] = (),
        *,
        dp_size: int = 1,
        loss_scale_factor: float | None = None,
    ) -> BatchInfo:
        """Count the rows of an update."""
        mask = pad_rows(masks).bool()
        signs = pad_rows(advantages)[mask].sign() if advantages else torch.zeros(0)
        return cls(
            dp_size=dp_size,
            batch_num_tokens=int(mask.sum()),
            global_batch_size=int(mask.any(dim=1).sum()),
            num_sessions=len(session_num_tokens(masks, sessions)),
            num_positive_tokens=int((signs > 0).sum()),
            num_negative_tokens=int((signs < 0).sum()),
            loss_scale_factor=loss_scale_factor,
        )


def session_num_tokens(masks: Iterable[Sequence[int]], sessions: Iterable[int]) -> dict[int, int]:
    """Trained tokens of each session that has any."""
    counts: dict[int, int] = {}
    for mask, session in zip(masks, sessions, strict=True):
        counts[session] = counts.get(session, 0) + sum(mask)
    return {session: count for session, count in counts.items() if count}


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
    num_sessions: int | None = None,
    session_num_tokens: Tensor | None = None,
) -> Tensor:
    """Return the aggregated loss, scalar; values where the mask is 0 do not matter, NaN included.

    token-mean: every token counts the same (DAPO). token-sum: undivided. seq-mean-token-mean: every row the same, its
    tokens share (GRPO as published). seq-mean-token-sum: longer rows count more. seq-mean-token-sum-norm: that, over a
    constant (Dr. GRPO). session-mean-token-mean: every session the same, the tokens of all its rows share. Rows without
    a trained token count nowhere.

    Args:
        loss_mat: (N, T).
        loss_mask: (N, T).
        loss_agg_mode: One of `MODES`.
        dp_size: Ranks whose gradients are averaged.
        batch_num_tokens: Trained tokens of the whole update; those given here if there is one rank.
        global_batch_size: Rows of the whole update with a trained token; likewise.
        loss_scale_factor: Tokens for seq-mean-token-sum-norm; T when not given.
        num_sessions: Sessions of the whole update with a trained token; rows when not given.
        session_num_tokens: (N,) trained tokens of the whole session of each row; of the row when not given.

    Raises:
        ConfigError: no such mode, or several ranks without the counts of the whole update.
    """
    mask = loss_mask.bool()
    lengths = mask.sum(dim=1)
    match loss_agg_mode:
        case "token-sum":
            per_row = torch.ones_like(lengths, dtype=loss_mat.dtype)
        case "token-mean":
            per_row = 1.0 / _count("batch_num_tokens", batch_num_tokens, lengths.sum(), dp_size).expand(len(lengths))
        case "session-mean-token-mean":
            tokens = lengths if session_num_tokens is None else session_num_tokens
            sessions = _count("num_sessions", num_sessions, (lengths > 0).sum(), dp_size)
            per_row = 1.0 / (tokens.clamp(min=1) * sessions)
        case "seq-mean-token-sum" | "seq-mean-token-sum-norm" | "seq-mean-token-mean":
            rows = _count("global_batch_size", global_batch_size, (lengths > 0).sum(), dp_size)
            tokens = {
                "seq-mean-token-sum": torch.ones_like(lengths),
                "seq-mean-token-sum-norm": torch.full_like(
                    lengths, loss_scale_factor or mask.shape[1], dtype=rows.dtype
                ),
                "seq-mean-token-mean": lengths.clamp(min=1),
            }[loss_agg_mode]
            per_row = 1.0 / (tokens * rows)
        case _:
            raise ConfigError(
                f"Unknown loss_agg_mode {loss_agg_mode!r}.{did_you_mean(loss_agg_mode, MODES)} "
                f"Known: {', '.join(MODES)}."
            )
    return (select(loss_mat, mask) * per_row.to(loss_mat.dtype).unsqueeze(1)).sum() * dp_size


def _count(name: str, whole: int | None, here: Tensor, dp_size: int) -> Tensor:
    if whole is None and dp_size > 1:
        raise ConfigError(f"With {dp_size} ranks {name} must be given: the count of all ranks, not only of this one.")
    count = here if whole is None else here.new_tensor(whole)
    return count.double().clamp(min=1)
