"""Settings of rollout correction, and verl's presets of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from xrl_lite.errors import ConfigError, did_you_mean
from xrl_lite.settings import Settings

REJECTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k1", "seq_max_k2", "seq_max_k3"),
)
"""What is compared with a threshold: level and divergence. seq_max_k1 is XTuner's veto: one token rejects its row."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """One condition that tokens or trajectories must meet."""

    option: str
    """One of `REJECTIONS`."""
    lower: float | None
    """k1: smallest ratio that is kept; None for k2 and k3, which are never negative."""
    upper: float
    """k1: largest ratio that is kept; k2 and k3: largest divergence."""


Threshold = float | str


class RolloutCorrectionConfig(Settings):
    """What is done about tokens that the trained policy would have sampled with another probability.

    With r = pi_old(trainer) / pi_rollout of a token. Liu et al. 2025, When Speed Kills Stability (rollout-training
    mismatch); IcePop: Ling team 2025 (arXiv 2510.18855).
    """

    rollout_is: Literal["token", "sequence", "geometric"] | None = None
    """Importance weights: r of each token; the product of its row; the geometric mean of its row; or null for none."""

    rollout_is_threshold: Threshold = 2.0
    """A number: larger weights are cut to it (truncation). "lower_upper" in quotes, or [lower, upper]: weights outside
    become 0 (IcePop)."""

    rollout_is_floor: float | None = Field(default=None, gt=0)
    """Smaller weights are raised to this (XTuner's two-sided truncation); null leaves them."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""

    rollout_rs: str | None = None
    """Conditions of rejection, separated by commas; a token stays only if it meets all of them."""

    rollout_rs_threshold: Threshold | None = None
    """Thresholds of the conditions: one for all, or one for each, separated by commas. k1: "lower_upper" as ratios, or
    U for 1/U..U; k2, k3: the upper bound."""

    bypass_mode: bool = False
    """Take the rollout engine's log-probs as those of the old policy: no forward pass for them, two policies instead of
    three. Weights and rejection then follow the policy as it is trained."""

    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """bypass_mode: ppo_clip is the policy loss without importance weights, its ratio being one already; reinforce is
    ``-A w log p``."""

    @property
    def is_bounds(self) -> tuple[float | None, float]:
        """Bounds of importance weights; without a lower one they are cut, with one they are dropped."""
        return _bounds("rollout_is_threshold", self.rollout_is_threshold)

    @property
    def rejections(self) -> list[Rejection]:
        """The conditions with their thresholds."""
        if self.rollout_rs is None:
            return []
        options = [option.strip() for option in self.rollout_rs.split(",")]
        if self.rollout_rs_threshold is None:
            raise ValueError(f"rollout_rs={self.rollout_rs!r} needs rollout_rs_threshold.")
        thresholds = [self.rollout_rs_threshold]
        if isinstance(self.rollout_rs_threshold, str):
            thresholds = [part.strip() for part in self.rollout_rs_threshold.split(",")]
        if len(thresholds) not in (1, len(options)):
            raise ValueError(
                f"rollout_rs_threshold must be one threshold or one for each of {options}, got {len(thresholds)}."
            )
        if len(thresholds) == 1:
            thresholds *= len(options)
        return [_rejection(option, threshold) for option, threshold in zip(options, thresholds, strict=True)]

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a preset by verl's name, with some settings changed.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in PRESETS:
            known = ", ".join(sorted(PRESETS))
            raise ConfigError(f"Unknown rollout correction {name!r}.{did_you_mean(name, PRESETS)} Known: {known}.")
        return cls(**(PRESETS[name] | changes))

    @model_validator(mode="before")
    @classmethod
    def _read_thresholds(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = dict(cast("Mapping[str, Any]", data))
        for name in ("rollout_is_threshold", "rollout_rs_threshold"):
            value = given.get(name)
            if isinstance(value, bool):
                raise ValueError(f"{name} must be a number or 'lower_upper', got a bool.")
            if isinstance(value, list | tuple):
                given[name] = "_".join(map(str, cast("list[object]", value)))
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        lower, upper = self.is_bounds
        if self.rollout_is_floor is not None and (lower is not None or self.rollout_is_floor >= upper):
            raise ValueError(
                f"rollout_is_floor goes with a threshold that is one number above it, got rollout_is_floor="
                f"{self.rollout_is_floor} and rollout_is_threshold={self.rollout_is_threshold!r}."
            )
        _ = self.rejections  # raises
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type=reinforce is a loss of bypass_mode. Set bypass_mode: true.")
        if self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is is not None:
            raise ValueError(
                "with bypass_mode and loss_type=ppo_clip the ratio of the loss is the importance weight already, so "
                "rollout_is would be ignored. Leave rollout_is out, or use loss_type=reinforce."
            )
        return self


def preset_or_mapping(value: object) -> object:
    """Turn the name of a preset, or a mapping with a `preset` in it, into settings; pass the rest through."""
    if isinstance(value, str):
        return _preset(value, {})
    if isinstance(value, Mapping) and "preset" in value:
        given = dict(cast("Mapping[str, Any]", value))
        return _preset(str(given.pop("preset")), given)
    return cast("object", value)


def _preset(name: str, changes: Mapping[str, Any]) -> dict[str, Any] | None:
    if name == "disabled" and not changes:
        return None
    if name not in PRESETS:
        known = ", ".join(sorted(PRESETS))
        raise ValueError(f"unknown rollout correction {name!r}.{did_you_mean(name, PRESETS)} Known: {known}.")
    return PRESETS[name] | dict(changes)


def _rejection(option: str, threshold: float | str) -> Rejection:
    if option not in REJECTIONS:
        raise ValueError(f"unknown rollout_rs {option!r}.{did_you_mean(option, REJECTIONS)} Known: {REJECTIONS}.")
    lower, upper = _bounds(f"rollout_rs_threshold of {option}", threshold)
    if option.endswith("k1"):
        if lower is None:
            lower, upper = min(upper, 1 / upper), max(upper, 1 / upper)
    elif lower is not None:
        raise ValueError(f"rollout_rs_threshold of {option} is one upper bound, got {threshold!r}.")
    return Rejection(option=option, lower=lower, upper=upper)


def _bounds(what: str, threshold: float | str) -> tuple[float | None, float]:
    try:
        numbers = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or any(not 0 < number < float("inf") for number in numbers):
        raise ValueError(f"{what} must be a number above 0, or 'lower_upper', got {threshold!r}.")
    if len(numbers) == 1:
        return None, numbers[0]
    if numbers[0] >= numbers[1]:
        raise ValueError(f"{what}: lower must be below upper, got {threshold!r}.")
    return numbers[0], numbers[1]


_TOKEN, _SEQUENCE = {"rollout_is": "token"}, {"rollout_is": "sequence"}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_BYPASS = {"bypass_mode": True}
_GRADIENT = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: dict[str, dict[str, Any]] = {
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": _SEQUENCE | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": _GEO | _SEQUENCE,
    "decoupled_geo_rs_token_tis": _GEO | _TOKEN,
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": _K3 | _SEQUENCE,
    "decoupled_k3_rs_token_tis": _K3 | _TOKEN,
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": _BYPASS | _GEO,
    "bypass_ppo_clip_k3_rs": _BYPASS | _K3,
    "bypass_pg_is": _GRADIENT | _SEQUENCE,
    "bypass_pg_token_icepop": _GRADIENT | _ICEPOP,
    "bypass_pg_geo_rs": _GRADIENT | _GEO,
    "bypass_pg_geo_rs_seq_tis": _GRADIENT | _GEO | _SEQUENCE,
    "bypass_pg_geo_rs_token_tis": _GRADIENT | _GEO | _TOKEN,
    "disabled": {},
}
"""verl's presets by name."""
