"""Settings of generation. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from xrl_lite.settings import Settings


class RolloutConfig(Settings):
    """Which engine generates, and how many copies of it."""

    engine: str = "torch"
    """Name of the rollout engine: torch (embedded) or fake (scripted, for tests)."""

    engine_options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Options that only this engine knows."""

    num_replicas: int = Field(default=1, gt=0)
    """Copies of the engine; requests go to the least loaded."""

    num_cpus: float = Field(default=0.5, gt=0)
    """CPU slots of a replica."""

    num_threads: int | None = Field(default=None, gt=0)
    """Compute threads of a replica; all CPUs of the machine when not given."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and arithmetic. Other than the trainer's, log-probs of the two drift apart."""

    max_batch_size: int = Field(default=512, gt=0)
    """Sequences a replica generates at once."""

    max_model_len: int | None = Field(default=None, gt=0)
    """Longest prompt and response together, in tokens; the model's own limit when not given."""

    request_timeout_s: float = Field(default=1200.0, gt=0)
    """Limit for one response, queueing included; a request beyond it is FAILED."""

    start_timeout_s: float = Field(default=300.0, gt=0)
    """Limit for loading the model."""

    sync_timeout_s: float = Field(default=600.0, gt=0)
    """Limit for each phase of a weight sync."""
