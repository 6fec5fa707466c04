"""Settings of generation. Imports no torch."""

from __future__ import annotations

from math import prod
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from xrl_lite.data import SampleParams
from xrl_lite.errors import ConfigError, did_you_mean
from xrl_lite.settings import Settings


class RolloutConfig(Settings):
    """Which engine generates, how many copies of it, and when a copy counts as broken."""

    engine: str = "torch"
    """Name of the rollout engine: torch (embedded), vllm, openai (a running server) or fake (scripted, for tests)."""

    engine_options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Options that only this engine knows."""

    num_replicas: int = Field(default=1, gt=0)
    """Copies of the engine; requests go to the least loaded."""

    num_cpus: float = Field(default=0.5, gt=0)
    """CPU slots of a replica."""

    num_threads: int | None = Field(default=None, gt=0)
    """Compute threads of a replica; all CPUs of the machine when not given."""

    num_accelerators: int | None = Field(default=None, ge=0)
    """Accelerators of a replica; when not given, on a machine that has some, as many as vLLM's parallel sizes need, and
    none for the other engines. In the modes in which generation and training take turns they are the trainer's."""

    device_memory_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of a device's memory that a replica of vLLM takes; when not given, half of it where the trainer computes on
    the same device, else what vLLM takes by itself."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and arithmetic; the trainer hands weights over in it, whatever its own type. Other than what the
    trainer computes in, log-probs of the two drift apart."""

    max_batch_size: int = Field(default=512, gt=0)
    """Sequences a replica generates at once."""

    max_in_flight: int | None = Field(default=None, gt=0)
    """Requests a replica is given at once, four batches when not given; the others wait for their turn."""

    max_model_len: int | None = Field(default=None, gt=0)
    """Longest prompt and response together, in tokens; the model's own limit when not given."""

    sleep_level: Literal[0, 1, 2] | None = None
    """What replicas give up while the trainer computes, in the modes in which the two take turns on the same devices:
    0 nothing; 1 the device memory, weights are kept in the machine's; 2 weights are forgotten, for the next sync brings
    them. When not given, 1 where they share a device. On a CPU nothing sleeps."""

    partial_rollout: bool = False
    """A sample that was aborted goes on from the tokens it has; without this it starts over."""

    max_retries: int = Field(default=1, ge=0)
    """How often a response that cannot be used (no tokens, wrong number of log-probs) is asked for again."""

    max_sessions: int = Field(default=10_000, gt=0)
    """Sessions whose replica is remembered."""

    request_timeout_s: float = Field(default=1200.0, gt=0)
    """Limit for one response, queueing included; a request beyond it is FAILED, and ended in the engine."""

    start_timeout_s: float = Field(default=300.0, gt=0)
    """Limit for loading the model."""

    sync_timeout_s: float = Field(default=600.0, gt=0)
    """Limit for each phase of a weight sync."""

    health_interval_s: float = Field(default=5.0, gt=0)
    """A busy replica tells so often what it has; what it told is not lost when it dies."""

    health_timeout_s: float = Field(default=60.0, gt=0)
    """A replica that does not answer for so long is replaced."""

    stall_timeout_s: float = Field(default=600.0, gt=0)
    """A replica that has requests and makes no token for so long is replaced."""

    max_restarts: int = Field(default=3, ge=0)
    """How often a replica that died is replaced within `restart_window_s`; then the others go on without it."""

    restart_window_s: float = Field(default=600.0, gt=0)
    """Seconds after which a death is forgotten."""

    max_resends: int = Field(default=2, ge=0)
    """How often a request is sent again because its replica died; then it is FAILED: it may be what kills them."""

    weight_transport: Literal["auto", "shared_memory", "cuda_ipc", "process_group", "folder"] = "auto"
    """How weights reach the replicas; auto decides by where both sides are."""

    weight_folder: str | None = None
    """Where the folder transport writes; the machine's shared memory when not given."""

    weight_bucket_bytes: int = Field(default=512 << 20, gt=0)
    """Weights are handed over in pieces of about this size."""

    adapter_sync: Literal["alone", "merged"] = "alone"
    """How a LoRA adapter reaches the replicas: by itself, where the engine takes it so (torch merges it, vLLM computes
    with it), or always merged into the weights it changes."""

    adapter_rank: int | None = Field(default=None, gt=0)
    """Rank of the LoRA adapter that is sent by itself. A run fills it in from `engine.lora`."""

    max_unchanged_syncs: int = Field(default=3, gt=0)
    """After so many syncs in a row that changed nothing although the optimizer made updates, a warning is given."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.health_timeout_s <= self.health_interval_s:
            raise ValueError(
                f"health_timeout_s ({self.health_timeout_s:g}) must be longer than health_interval_s "
                f"({self.health_interval_s:g}): a replica cannot answer sooner than it is asked."
            )
        return self

    @property
    def in_flight_limit(self) -> int:
        """Requests a replica is given at once."""
        return self.max_in_flight or 4 * self.max_batch_size

    def accelerators_of(self, available: int) -> int:
        """Return how many accelerators a replica claims where the machine has `available`."""
        if self.num_accelerators is not None:
            return self.num_accelerators
        if self.engine != "vllm" or not available:
            return 0
        return prod(self.engine_options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))

    def options_of(self, engine: str, **defaults: Any) -> dict[str, Any]:
        """Return the engine's options with defaults.

        Raises:
            ConfigError: an option that the engine does not know.
        """
        for name in self.engine_options:
            if name not in defaults:
                raise ConfigError(
                    f"rollout.engine_options.{name}: the {engine} engine has no such option."
                    f"{did_you_mean(name, defaults)} Known: {', '.join(sorted(defaults))}."
                )
        return defaults | self.engine_options


def truncation_warning(params: SampleParams) -> str | None:
    """Say what is wrong with training on samples of a changed distribution; None if it is the model's own."""
    changed = [
        f"{name}={getattr(params, name)}"
        for name, neutral in (
            ("top_p", (1.0,)),
            ("top_k", (0, -1)),
            ("min_tokens", (0,)),
            ("repetition_penalty", (1.0,)),
            ("presence_penalty", (0.0,)),
            ("frequency_penalty", (0.0,)),
        )
        if getattr(params, name) not in neutral
    ]
    if not changed:
        return None
    return (
        f"training samples are drawn with {', '.join(changed)}, so from another distribution than the one whose "
        f"log-probs the trainer computes: the two will not agree, and the gradient is biased. Use temperature alone."
    )
