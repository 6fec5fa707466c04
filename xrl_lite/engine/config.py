"""Settings of the training engine. Imports no torch."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from xrl_lite.algorithms.config import LossAggregation
from xrl_lite.settings import Settings

Decay = Annotated[float, Field(ge=0, lt=1)]


OWN_SCHEDULES = ("constant", "linear", "cosine")


class OptimizerConfig(Settings):
    """The optimizer and its schedule."""

    type: str = "AdamW"
    """A class of torch.optim by its name, or one of yours by its path (``package.module:Name``, ``file.py:Name``).
    Groups that it makes of the weights keep settings of their own, and the schedule scales the `lr` of each."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of that class, such as ``{momentum: 0.9}``."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the running averages of the gradient and of its square, where the class takes such."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay, decoupled in AdamW."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""

    schedule: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = "constant"
    """How the learning rate goes over the run. constant, linear and cosine go from its peak to `final_fraction` of it;
    the others are those of transformers' ``get_scheduler``."""

    schedule_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a schedule of transformers, such as ``{num_cycles: 3}``; steps in them are updates too."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer updates over which the learning rate rises to its peak, as in transformers and TRL. A step of the
    trainer makes `num_mini_batches` times `num_epochs` of them, and so many in each of its parts where
    `trainer.parameter_sync_step` makes parts. verl's schedule goes on once a step instead: multiply its
    `lr_warmup_steps` by these."""

    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak learning rate that is left at the end (linear and cosine)."""

    @model_validator(mode="after")
    def _schedule_takes_options(self) -> Self:
        if self.schedule_options and self.schedule in OWN_SCHEDULES:
            raise ValueError(
                f"schedule={self.schedule} takes no schedule_options, but warmup_steps and final_fraction."
            )
        return self


class LoraConfig(Settings):
    """A low-rank adapter (arXiv 2106.09685) that is trained in place of the weights. Needs the extra ``lora``."""

    rank: int = Field(default=16, gt=0)
    """Rank of each change of a weight."""

    alpha: float = Field(default=32.0, gt=0)
    """The change is scaled by ``alpha / rank``."""

    use_rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` instead (arXiv 2312.03732)."""

    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter, by the ends of their names such as ``q_proj``; all but the output layer."""

    path: Annotated[str, AfterValidator(os.path.expanduser)] | None = None
    """Adapter of the same rank to go on from, a folder of peft or a hub id; its own alpha and layers take the place of
    those here. The reference policy is the model without it."""


class EngineConfig(Settings):
    """Where and how the policy is trained."""

    backend: str = "fsdp2"
    """Name of the training engine."""

    num_ranks: int = Field(default=1, gt=0)
    """Processes that train together, each with a share of every batch and, with ``fsdp2``, of the weights."""

    num_cpus: float = Field(default=0.5, gt=0)
    """CPU slots a rank takes. Rollout and training take turns on a CPU, so together they need one machine, not two."""

    num_threads: int | None = Field(default=None, gt=0)
    """Compute threads of a rank; when not given, all CPUs of the machine, divided by the ranks."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and, unless `compute_dtype` says otherwise, of the arithmetic. In bfloat16 small updates are
    rounded away, since no finer copy of the weights is kept: at a learning rate of 1e-6 none above 0.0005 moves. It is
    for an adapter (`lora`), whose weights are float32 whatever this says. Otherwise leave float32 here, and set
    `compute_dtype` and `rollout.dtype` to bfloat16."""

    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type the layers compute in while weights and optimizer keep `dtype` (mixed precision); None is `dtype`."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over the ranks, where it differs from `compute_dtype`."""

    reshard_after_forward: bool = True
    """Let go of a layer's weights after its forward pass and gather them again for its backward pass. False needs more
    memory and less communication."""

    export_bucket_bytes: int = Field(default=256 << 20, gt=0)
    """Weights that are gathered from all ranks at once, to be handed over."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""

    lora: LoraConfig | None = None
    """Train an adapter and leave the weights as they are; null trains all weights. Without it the model is the
    reference policy, so no copy of the weights is kept for that."""

    activation_checkpointing: bool = False
    """Keep only what goes into each layer, and compute the layer again in the backward pass: less memory, about a
    third more computation."""

    compile: bool = False
    """Compile the layers with torch.compile: a slow first step, faster ones after it."""

    param_offload: bool = False
    """Keep the weights in CPU memory while nothing is computed."""

    optimizer_offload: bool = False
    """Keep the state of the optimizer in CPU memory except for updates."""

    max_logits_tokens: int = Field(default=4096, gt=0)
    """Trained tokens whose logits exist at once, forward and backward; bounds their memory to so many rows of the
    vocabulary in float32. A micro-batch with more of them computes its logits twice."""

    num_mini_batches: int = Field(default=1, gt=0)
    """Optimizer updates the groups of one step are split into."""

    num_epochs: int = Field(default=1, gt=0)
    """Times each step's groups are trained on."""

    max_tokens_per_row: int = Field(default=4096, gt=0)
    """Attempts at one prompt stand behind one copy of it up to this length."""

    max_tokens_per_micro_batch: int = Field(default=16384, gt=0)
    """Tokens, padding included, that go through the model at once; bounds the memory. No trajectory may be longer."""

    start_timeout_s: float = Field(default=300.0, gt=0)
    """Limit for loading the model and building the optimizer."""

    step_timeout_s: float = Field(default=3600.0, gt=0)
    """Limit for one optimizer step, one export of weights, or one checkpoint."""

    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait of a rank for the others inside a step. Whose process ended or raised is known at once, without
    it."""

    @property
    def always_shards(self) -> bool:
        """Whether a single rank goes the way of several too: mixed precision is theirs."""
        return self.compute_dtype not in (None, self.dtype)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer updates that the groups of one step, or of one part of it, are used for."""
        return self.num_mini_batches * self.num_epochs

    @property
    def produces(self) -> frozenset[str]:
        """What the engine can give an advantage estimator."""
        return frozenset({"old_log_probs", "ref_log_prob", "sum_pi_squared"})

    @model_validator(mode="after")
    def _row_fits(self) -> Self:
        if self.max_tokens_per_row > self.max_tokens_per_micro_batch:
            raise ValueError(
                f"max_tokens_per_row ({self.max_tokens_per_row}) must not exceed max_tokens_per_micro_batch "
                f"({self.max_tokens_per_micro_batch})."
            )
        return self


class CriticOptimizerConfig(OptimizerConfig):
    """The optimizer and its schedule, for a critic."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""


class CriticConfig(EngineConfig):
    """The critic of estimators that need values (gae): a model of its own, trained beside the policy.

    Its settings are those of `engine`, and some more. Unused where the estimator needs no values.
    """

    path: Annotated[str, AfterValidator(os.path.expanduser)] | None = None
    """Hugging Face folder or hub id: a language model, whose output layer is replaced by a value that begins at 0, or a
    classifier or reward model with one label. The model that the policy starts from when not given."""

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    """The optimizer."""

    cliprange_value: float = Field(default=0.5, gt=0)
    """How far a value may move from its old one in a step before the error stops counting."""

    loss_agg_mode: LossAggregation = "token-mean"
    """How the errors of tokens become one number."""

    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Tokens by which seq-mean-token-sum-norm divides; that of the algorithm when not given."""
