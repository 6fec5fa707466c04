"""What metrics are called in verl, so that dashboards carry over."""

from __future__ import annotations

from collections.abc import Mapping

VERL_NAMES = {
    "reward": "critic/score/mean",
    "completions/mean_length": "response_length/mean",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "num_turns/mean": "training/num_turns/mean",
    "num_turns/max": "training/num_turns/max",
    "num_turns/min": "training/num_turns/min",
    "num_tokens": "perf/total_num_tokens",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "learning_rate": "actor/lr",
    "kl": "actor/ppo_kl",
    "logprob_gap/mean": "training/rollout_probs_diff_mean",
    "logprob_gap/max": "training/rollout_probs_diff_max",
    "step": "training/global_step",
    "time/step": "timing_s/step",
    "time/generate": "timing_s/gen",
    "time/judge": "timing_s/reward",
    "time/train": "timing_s/update_actor",
    "time/sync": "timing_s/update_weights",
    "time/evaluation": "timing_s/testing",
    "time/tokens_per_s": "perf/throughput",
}
"""Our name -> verl's. Eviction and staleness have verl's names already."""


def with_verl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics, and those that verl has once more under its names."""
    return {**metrics, **{VERL_NAMES[name]: value for name, value in metrics.items() if name in VERL_NAMES}}
