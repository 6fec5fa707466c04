"""What metrics are called in verl, so that dashboards carry over."""

from __future__ import annotations

import re
from collections.abc import Mapping

VERL_NAMES = {
    "reward": "critic/score/mean",
    "reward_max": "critic/score/max",
    "reward_min": "critic/score/min",
    "advantages/mean": "critic/advantages/mean",
    "advantages/max": "critic/advantages/max",
    "advantages/min": "critic/advantages/min",
    "prompts/mean_length": "prompt_length/mean",
    "completions/min_length": "response_length/min",
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


_OF_ATTEMPTS = re.compile(r"eval/(.+)/(mean|pass|maj)@(\d+)")
_VERL_METRIC = {"mean": "mean@{}", "pass": "best@{}/mean", "maj": "maj@{}/mean"}
"""The best of k right-or-wrong answers is right as often as pass@k says."""


def verl_name(name: str) -> str | None:
    """Return what verl calls a metric; None if it has none of the kind.

    ``eval/<way>/<data source>/pass@8`` is ``val-core/<way>/<data source>/acc/best@8/mean`` there.
    """
    found = _OF_ATTEMPTS.fullmatch(name)
    if found is None:
        return VERL_NAMES.get(name)
    where, kind, k = found.groups()
    return f"val-core/{where}/acc/{_VERL_METRIC[kind].format(k)}"


def with_verl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics, and those that verl has once more under its names."""
    return {**metrics, **{verl: value for name, value in metrics.items() if (verl := verl_name(name)) is not None}}
