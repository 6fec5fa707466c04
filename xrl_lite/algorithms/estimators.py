"""The table of advantage estimators, and what each needs. Imports no torch, so a config can be checked against it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from xrl_lite.registry import Registry, load_object

if TYPE_CHECKING:
    from torch import Tensor


class AdvantageFunction(Protocol):
    """verl's signature; called with keywords, so a function names what it wants and takes the rest as ``**kwargs``."""

    def __call__(
        self, token_level_rewards: Tensor, response_mask: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns, (N, T) each.

        Args:
            token_level_rewards: (N, T) float64; NaN in a row marks a trajectory without a reward.
            response_mask: (N, T) int64, 1 where a token is trained on.
            args: Not used.
            kwargs: ``index``, (N,) array of group ids; ``config``, the `AlgorithmConfig`; and what is there of
                ``old_log_probs``, ``ref_log_prob``, ``rollout_log_probs``, ``rollout_is_weights``, ``sum_pi_squared``,
                ``values`` (N, T), ``reward_baselines`` (N,), ``reward_parts`` (name -> (N,)).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """An estimator and what it needs."""

    function: AdvantageFunction | str
    """The function, or its import path."""
    requires: frozenset[str] = frozenset()
    """Arguments beyond rewards, mask, groups and config that it cannot do without."""
    min_group_size: int = 1
    """Fewest attempts at a prompt with which it gives any signal."""


_OUTCOME = "xrl_lite.algorithms.advantages.outcome"
_TEMPORAL = "xrl_lite.algorithms.advantages.temporal"
_TOKEN_BASELINE = "xrl_lite.algorithms.advantages.token_baseline"


def _relative(name: str) -> AdvantageEstimator:
    return AdvantageEstimator(function=f"{_OUTCOME}:{name}", min_group_size=2)


def _token_baseline(name: str) -> AdvantageEstimator:
    needs = frozenset({"old_log_probs", "sum_pi_squared"})
    return AdvantageEstimator(function=f"{_TOKEN_BASELINE}:{name}", requires=needs, min_group_size=2)


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    {
        "gae": AdvantageEstimator(function=f"{_TEMPORAL}:gae", requires=frozenset({"values"})),
        "grpo": _relative("grpo"),
        "grpo_vectorized": _relative("grpo"),
        "dr_grpo": _relative("dr_grpo"),
        "rloo": _relative("rloo"),
        "rloo_vectorized": _relative("rloo"),
        "opo": _relative("opo"),
        "passk": _relative("passk"),
        "grpo_passk": _relative("grpo_passk"),
        "gdpo": _relative("gdpo"),
        "gpg": _relative("gpg"),
        "reinforce_plus_plus": AdvantageEstimator(function=f"{_TEMPORAL}:reinforce_plus_plus"),
        "reinforce_plus_plus_baseline": _relative("reinforce_plus_plus_baseline"),
        "remax": AdvantageEstimator(function=f"{_TEMPORAL}:remax", requires=frozenset({"reward_baselines"})),
        "optimal_token_baseline": _token_baseline("optimal_token_baseline"),
        "tir_optimal_token_baseline": _token_baseline("tir_optimal_token_baseline"),
    },
)

INPUTS = frozenset(
    {
        "values",
        "old_log_probs",
        "ref_log_prob",
        "rollout_log_probs",
        "sum_pi_squared",
        "rollout_is_weights",
        "reward_baselines",
        "reward_parts",
    }
)
"""What an estimator may be given beyond rewards, mask, groups and config."""

F = TypeVar("F", bound=Callable[..., Any])


def register_adv_est(name: str, *, requires: Collection[str] = (), min_group_size: int = 1) -> Callable[[F], F]:
    """Return a decorator that registers a function as an advantage estimator.

    Args:
        name: What `algorithm.advantage` calls it.
        requires: Arguments it cannot do without: any of ``values``, ``old_log_probs``, ``ref_log_prob``,
            ``sum_pi_squared``, ``rollout_is_weights``, ``reward_baselines``, ``reward_parts``. A config that does not
            produce them is refused.
        min_group_size: Fewest attempts at a prompt; a config with fewer is refused.

    Raises:
        PluginError: another function has the name already.
    """

    def decorate(function: F) -> F:
        entry = AdvantageEstimator(function=function, requires=frozenset(requires), min_group_size=min_group_size)
        ADVANTAGE_ESTIMATORS.register(name)(entry)
        return function

    return decorate


def get_adv_estimator_fn(name: str) -> AdvantageFunction:
    """Return the function of an estimator.

    Raises:
        UnknownNameError: there is none of that name.
    """
    function = advantage_estimator(name).function
    return load_object(function) if isinstance(function, str) else function


def advantage_estimator(name: str) -> AdvantageEstimator:
    """Return an estimator with what it needs.

    The function of a path is loaded. It needs what `register_adv_est` was told about it, or else the arguments of its
    own that have no default.

    Raises:
        UnknownNameError: there is none of that name.
        PluginError: the function cannot be loaded.
    """
    if name in ADVANTAGE_ESTIMATORS or ":" not in name:
        return ADVANTAGE_ESTIMATORS.resolve(name)
    function = load_object(name)
    for known in map(ADVANTAGE_ESTIMATORS.resolve, ADVANTAGE_ESTIMATORS):
        if known.function is function:
            return known
    return AdvantageEstimator(function=function, requires=_arguments_without_default(function) & INPUTS)


def _arguments_without_default(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty)
