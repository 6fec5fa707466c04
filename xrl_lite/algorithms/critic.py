"""The loss of a critic, and how well it predicts. Its targets are the returns of `gae`."""

from __future__ import annotations

import torch
from torch import Tensor

from xrl_lite.algorithms.aggregation import agg_loss
from xrl_lite.algorithms.masked import masked_mean, select


def value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    **global_batch_info: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error: ``0.5 agg(max((v - G)^2, (clip(v, v_old - c, v_old + c) - G)^2))``.

    Schulman et al. 2017 (arXiv 1707.06347) as commonly implemented.

    Args:
        vpreds: (N, T) values of the critic being trained; the only argument with a gradient.
        returns: (N, T) targets G.
        values: (N, T) values of the critic before the update.
        response_mask: (N, T).
        cliprange_value: c.
        loss_agg_mode: How the losses of tokens become one number.
        global_batch_info: Counts of the whole update, for `agg_loss`.

    Returns:
        The loss, and ``vf_clipfrac``, ``vpred_mean``.
    """
    mask = response_mask.bool()
    vpreds, returns, values = select(vpreds, mask), select(returns.to(vpreds.dtype), mask), select(values, mask)
    clipped = torch.maximum(torch.minimum(vpreds, values + cliprange_value), values - cliprange_value)
    error, clipped_error = (vpreds - returns).square(), (clipped - returns).square()
    loss = 0.5 * agg_loss(torch.maximum(error, clipped_error), mask, loss_agg_mode, **global_batch_info)  # type: ignore[arg-type]
    with torch.no_grad():
        metrics = {
            "vf_clipfrac": masked_mean((clipped_error > error).double(), mask),
            "vpred_mean": masked_mean(vpreds, mask),
        }
    return loss, metrics


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> float:
    """``1 - var(G - V) / var(G)`` over the trained tokens: 1 is perfect, 0 as good as the mean, NaN without spread."""
    mask = response_mask.bool()
    returns, values = returns[mask].double(), values[mask].double()
    return (1 - (returns - values).var(correction=0) / returns.var(correction=0)).item()
