"""Settings of the algorithm: what an advantage is, what is minimised, how rollouts of other policies are corrected.

Names are verl's where verl has the setting. Imports no torch, so a config is checked in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from xrl_lite.algorithms.correction_config import RolloutCorrectionConfig, preset_or_mapping
from xrl_lite.algorithms.distillation import DISTILLATION_LOSSES
from xrl_lite.algorithms.estimators import ADVANTAGE_ESTIMATORS, advantage_estimator
from xrl_lite.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from xrl_lite.settings import Settings

LossAggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "session-mean-token-mean",
]
KLPenalty = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]


class _Readable(Settings):
    """Settings that user code may read as verl's: ``config.name``, ``config["name"]``, ``config.get("name", 1)``."""

    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of user code, read like the others."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting or an option, or the default where there is neither."""
        return getattr(self, name) if name in type(self).model_fields else self.options.get(name, default)

    def __getitem__(self, name: str) -> Any:
        if name in type(self).model_fields:
            return getattr(self, name)
        return self.options[name]

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        return super().__getattr__(name)  # type: ignore[misc]  # pydantic's, which says what is missing


class KLControllerConfig(Settings):
    """How the weight of the KL in the reward changes over the run."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: stays. adaptive: rises while the KL is above `target_kl`, falls while it is below (arXiv 1909.08593)."""

    kl_coef: float = Field(default=0.001, ge=0)
    """Weight; where it is adaptive, the first one."""

    horizon: int = Field(default=10_000, gt=0)
    """Trajectories over which an adaptive weight may change by its own size."""

    target_kl: float = Field(default=0.1, gt=0)
    """KL per token that an adaptive weight aims at, in nats."""


_CLIP_SIDES = ("clip_ratio_low", "clip_ratio_high")


class PolicyLossConfig(_Readable):
    """Which surrogate is minimised. In YAML also just its name."""

    filled_in = frozenset(_CLIP_SIDES)

    loss_mode: str = "vanilla"
    """Name of the policy loss, or the path of a function with verl's signature."""

    clip_ratio: float = Field(default=0.2, gt=0)
    """Range of the probability ratio on each side that is not given below; refused where neither side has it."""

    clip_ratio_low: float = Field(default=0.2, gt=0)
    """The ratio is clipped below at 1 minus this; `clip_ratio` when not given."""

    clip_ratio_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped above at 1 plus this; `clip_ratio` when not given."""

    clip_ratio_c: float | None = Field(default=3.0, gt=1)
    """vanilla: bound of the ratio where the advantage is negative (dual clip); null for none."""

    dppo_ratio_cap: float = Field(default=20.0, gt=1)
    """dppo_tv, dppo_kl: bound of the detached ratio that weighs a token."""

    tau_pos: float = Field(default=1.0, gt=0)
    """sapo: temperature of the gate where the advantage is positive."""

    tau_neg: float = Field(default=1.05, gt=0)
    """sapo: temperature of the gate elsewhere."""

    clip_cov_ratio: float = Field(default=0.0002, gt=0, le=1)
    """clip_cov: share of the trained tokens that are taken out of the gradient, at random among the candidates."""

    clip_cov_lb: float = 1.0
    """clip_cov: covariance above which a token is a candidate."""

    clip_cov_ub: float = 5.0
    """clip_cov: covariance below which a token is a candidate."""

    kl_cov_ratio: float = Field(default=0.0002, gt=0, le=1)
    """kl_cov: share of the trained tokens, those of the largest covariance, that get a KL penalty."""

    ppo_kl_coef: float = Field(default=0.1, ge=0)
    """kl_cov: weight of that penalty."""

    dro_beta: float | None = Field(default=None, gt=0)
    """dro: weight of the quadratic penalty on the log-ratio; required for it."""

    positive_loss_factor: float = Field(default=1.0, ge=0)
    """oreal: weight of the tokens with a positive advantage."""

    negative_loss_factor: float = Field(default=1.0, ge=0)
    """oreal: weight of the tokens with a negative advantage."""

    pos_sft_loss_weight: float = Field(default=1.0, ge=0)
    """oreal: share of the log-likelihood in the loss of positive tokens."""

    pos_policy_loss_weight: float = Field(default=1.0, ge=0)
    """oreal: share of the policy loss in the loss of positive tokens."""

    @model_validator(mode="before")
    @classmethod
    def _one_ratio_for_both_sides(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        items = cast("Mapping[str, Any]", data).items()
        given = {name: value for name, value in items if value is not None or name not in _CLIP_SIDES}
        sides = [given[side] for side in _CLIP_SIDES if side in given]
        unchanged = cls.model_fields["clip_ratio"].default  # older versions wrote it beside both sides
        if len(sides) == len(_CLIP_SIDES) and given.get("clip_ratio", unchanged) not in (unchanged, *sides):
            raise ValueError(
                f"clip_ratio={given['clip_ratio']} has no effect beside clip_ratio_low={sides[0]} and "
                f"clip_ratio_high={sides[1]}. Change these, or set them to null to have clip_ratio for both sides."
            )
        return given

    @model_validator(mode="after")
    def _fill_in_sides(self) -> Self:
        for side in _CLIP_SIDES:
            if side not in self.model_fields_set:
                object.__setattr__(self, side, self.clip_ratio)  # not among what was set: it goes along with clip_ratio
        return self

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what follows from the rest, so that overrides of a dump mean what they mean for the settings."""
        filled_in = set(_CLIP_SIDES) - self.model_fields_set
        unused = set[str]() if filled_in or "clip_ratio" in self.model_fields_set else {"clip_ratio"}
        values = cast("dict[str, Any]", dump(self))
        return {name: value for name, value in values.items() if name not in filled_in | unused}

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        POLICY_LOSSES.check(self.loss_mode)
        if self.loss_mode == "dro" and self.dro_beta is None:
            raise ValueError("policy_loss dro needs dro_beta above 0, for example {loss_mode: dro, dro_beta: 0.1}.")
        if self.clip_ratio_low >= 1 and self.loss_mode in ("vanilla", "gspo", "cispo", "clip_cov", "oreal"):
            raise ValueError(
                f"clip_ratio_low must be below 1 for {self.loss_mode} (a ratio is never negative), "
                f"got {self.clip_ratio_low}."
            )
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb ({self.clip_cov_lb}) must be below clip_cov_ub ({self.clip_cov_ub}), "
                "or no token is ever a candidate."
            )
        return self


class DistillationConfig(Settings):
    """On-policy distillation: the policy is trained towards a teacher on its own responses."""

    teacher: str
    """Hugging Face folder or hub id of the teacher; same vocabulary as the policy."""

    loss_mode: str = "forward_kl_topk"
    """forward_kl_topk, or an estimator against the teacher's log-probs: k1, k2, k3, abs and those with a +; or a
    registered name or path."""

    top_k: int = Field(default=32, gt=0)
    """forward_kl_topk: tokens of the teacher that are compared at each position."""

    coef: float = Field(default=1.0, gt=0)
    """Weight of the distillation term."""

    use_task_rewards: bool = True
    """Keep the policy loss of the task's rewards beside it; false trains on the teacher alone."""

    use_policy_gradient: bool = False
    """Add ``coef * (log p_teacher - log p_old)`` of each token to its advantage instead of a term to the loss."""

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        DISTILLATION_LOSSES.check(self.loss_mode)
        return self


def _name_or_mapping(key: str) -> BeforeValidator:
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class AlgorithmConfig(_Readable):
    """From rewards to the loss."""

    advantage: str = "grpo"
    """Name of the advantage estimator (verl: adv_estimator), or the path of a function with verl's signature; with an
    argument `values` that has no default, a critic is trained for it."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a token's reward for each token before it (gae, reinforce_plus_plus)."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """gae: decay of the advantage."""

    norm_adv_by_std_in_grpo: bool = True
    """grpo, gdpo, grpo_passk: divide by the standard deviation of the group; false makes grpo Dr. GRPO."""

    passk_k: int = Field(default=4, gt=0)
    """passk: attempts of which one must be right."""

    gdpo_reward_keys: list[str] | None = None
    """gdpo: parts of the reward that are normalised one by one; the score alone when not given."""

    gdpo_reward_weights: list[float] | None = None
    """gdpo: weight of each part; 1 when not given."""

    use_kl_in_reward: bool = False
    """Subtract ``kl_ctrl.kl_coef`` times the KL to the initial policy from the reward of each token."""

    kl_penalty: KLPenalty = "kl"
    """Estimator of the KL in the reward."""

    kl_ctrl: KLControllerConfig = KLControllerConfig()
    """Weight of the KL in the reward."""

    policy_loss: Annotated[PolicyLossConfig, _name_or_mapping("loss_mode")] = PolicyLossConfig()
    """The surrogate: its name, or a mapping with its settings."""

    loss_agg_mode: LossAggregation | None = None
    """How the losses of tokens become one number; token-mean, or the loss's own, when not given."""

    loss_scale_factor: float | None = Field(default=None, gt=0)
    """seq-mean-token-sum-norm: tokens a trajectory's sum is divided by; the longest response allowed when not given."""

    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which is subtracted from the loss."""

    use_kl_loss: bool = False
    """Add the KL to the initial policy to the loss; a frozen copy of it is then kept."""

    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Weight of that KL."""

    kl_loss_type: KLPenalty = "low_var_kl"
    """Estimator of that KL; with a + its gradient is that of k2 (straight through)."""

    rollout_correction: Annotated[RolloutCorrectionConfig | None, BeforeValidator(preset_or_mapping)] = None
    """What is done about rollouts sampled by other weights or kernels: the name of a preset, a mapping, or null."""

    distillation: DistillationConfig | None = None
    """Train towards a teacher; null for none."""

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the initial policy is needed."""
        return self.use_kl_in_reward or self.use_kl_loss

    @property
    def needs_rollout_logprobs(self) -> bool:
        """Whether something is computed with the log-probs that the rollout engine told."""
        return self.rollout_correction is not None or "rollout_log_probs" in self.requirements()

    @property
    def aggregation(self) -> LossAggregation:
        """How the losses of tokens become one number."""
        own = policy_loss(self.policy_loss.loss_mode).aggregation
        return self.loss_agg_mode or cast("LossAggregation | None", own) or "token-mean"

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        ADVANTAGE_ESTIMATORS.check(self.advantage)
        own = policy_loss(self.policy_loss.loss_mode).aggregation
        if own is not None and self.loss_agg_mode not in (None, own):
            raise ValueError(
                f"policy_loss {self.policy_loss.loss_mode} is defined with loss_agg_mode={own}, "
                f"got {self.loss_agg_mode}. Leave loss_agg_mode out."
            )
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if weights is not None and len(weights) != len(keys or ()):
            raise ValueError(
                f"gdpo_reward_weights needs one weight for each of gdpo_reward_keys={keys}, got {len(weights)}."
            )
        if self.advantage == "gdpo" and keys and self.use_kl_in_reward:
            raise ValueError("gdpo reads the parts of the reward, so a KL in the reward is lost. Use use_kl_loss.")
        correction = self.rollout_correction
        if correction and correction.loss_type == "reinforce" and self.policy_loss.loss_mode != "vanilla":
            raise ValueError(
                f"rollout_correction.loss_type=reinforce takes the place of the policy loss, so "
                f"policy_loss={self.policy_loss.loss_mode} would be ignored. Leave one of the two out."
            )
        return self

    def requirements(self) -> frozenset[str]:
        """What the advantage estimator needs beyond rewards, mask and groups."""
        needs = advantage_estimator(self.advantage).requires
        return needs | {"reward_parts"} if self.gdpo_reward_keys and self.advantage == "gdpo" else needs
