"""The table of policy losses, and how each may be computed. Imports no torch, so a config can be checked against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from xrl_lite.registry import Registry, load_object

if TYPE_CHECKING:
    from torch import Tensor


class PolicyLossFunction(Protocol):
    """verl's signature."""

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss (scalar) and metrics, each a mean over the trained tokens given.

        Args:
            old_log_prob: (N, T) under the policy the ratio is taken to.
            log_prob: (N, T) under the policy being trained; the only argument with a gradient.
            advantages: (N, T).
            response_mask: (N, T) int64, 1 where a token is trained on.
            loss_agg_mode: How the losses of tokens become one number, for `agg_loss`.
            config: A `LossConfig`: the settings of the loss, and ``global_batch_info`` with the counts of the whole
                update, to be passed on as ``agg_loss(..., **config.global_batch_info)``.
            rollout_is_weights: (N, T) importance weights of rollout correction, or None.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A loss and what the engine may do with it."""

    function: PolicyLossFunction | str
    """The function, or its import path."""
    aggregation: str | None = None
    """The only aggregation it is defined with; None for any."""
    selection: Callable[..., Tensor] | str | None = None
    """Chooses tokens by statistics of the whole update: ``(old_log_prob, log_prob, advantages, response_mask, config,
    seed)`` -> (N, T) bool. Its choice is passed to the function as ``selected``, so that the loss does not depend on
    micro-batches. None: each row stands for itself."""
    skips_zero_advantage: bool = False
    """A trajectory of advantage 0 has no gradient, so it need not be computed."""


_RATIO = "xrl_lite.algorithms.losses.ratio"
_DIVERGENCE = "xrl_lite.algorithms.losses.divergence"
_LIKELIHOOD = "xrl_lite.algorithms.losses.likelihood"
_COVARIANCE = "xrl_lite.algorithms.losses.covariance"
_SEQUENCES = "seq-mean-token-mean"


def _plain(module: str, name: str, aggregation: str | None = None) -> PolicyLoss:
    return PolicyLoss(function=f"{module}:{name}", aggregation=aggregation, skips_zero_advantage=True)


def _by_covariance(name: str) -> PolicyLoss:
    return PolicyLoss(function=f"{_COVARIANCE}:{name}", selection=f"{_COVARIANCE}:{name}_selection")


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss",
    {
        "vanilla": _plain(_RATIO, "vanilla"),
        "gspo": _plain(_RATIO, "gspo", _SEQUENCES),
        "sapo": _plain(_RATIO, "sapo", _SEQUENCES),
        "cispo": _plain(_RATIO, "cispo"),
        "geo_mean": _plain(_RATIO, "geo_mean", _SEQUENCES),
        "dppo_tv": _plain(_DIVERGENCE, "dppo_tv"),
        "dppo_kl": _plain(_DIVERGENCE, "dppo_kl"),
        "gpg": _plain(_LIKELIHOOD, "gpg"),
        "reinforce": _plain(_LIKELIHOOD, "reinforce"),
        "dro": PolicyLoss(function=f"{_LIKELIHOOD}:dro"),
        "oreal": _plain(_LIKELIHOOD, "oreal", "token-mean"),
        "clip_cov": _by_covariance("clip_cov"),
        "kl_cov": _by_covariance("kl_cov"),
    },
)

F = TypeVar("F", bound=Callable[..., Any])


def register_policy_loss(
    name: str, *, aggregation: str | None = None, skips_zero_advantage: bool = False
) -> Callable[[F], F]:
    """Return a decorator that registers a function as a policy loss.

    Args:
        name: What `algorithm.policy_loss` calls it.
        aggregation: The only `loss_agg_mode` it is defined with; another in a config is refused.
        skips_zero_advantage: A trajectory of advantage 0 has no gradient, so it need not be computed.

    Raises:
        PluginError: another function has the name already.
    """

    def decorate(function: F) -> F:
        entry = PolicyLoss(function=function, aggregation=aggregation, skips_zero_advantage=skips_zero_advantage)
        POLICY_LOSSES.register(name)(entry)
        return function

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFunction:
    """Return the function of a loss.

    Raises:
        UnknownNameError: there is none of that name.
    """
    function = policy_loss(name).function
    return load_object(function) if isinstance(function, str) else function


def policy_loss(name: str) -> PolicyLoss:
    """Return a loss with its properties; the function of a path is not loaded, and has none."""
    if name not in POLICY_LOSSES and ":" in name:
        return PolicyLoss(function=name)
    return POLICY_LOSSES.resolve(name)
