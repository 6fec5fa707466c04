"""Summaries of samples, in plain Python."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from math import comb

DRAWS = 1000
SEED = 42


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that at least one of k samples is right, estimated without bias.

    ``1 - C(n - c, k) / C(n, k)`` for c right ones among n (Chen et al. 2021, arXiv:2107.03374).

    Args:
        num_samples: n.
        num_right: c.
        k: At most n.
    """
    assert 0 < k <= num_samples, f"pass@{k} needs {k} samples, there are {num_samples}"
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def majority_score(answers: Sequence[Hashable], scores: Sequence[float]) -> float:
    """Return the score of the answer that is given most often; of several, of the one that was given first."""
    counts = Counter(answers)
    most = max(counts.values())
    return next(score for answer, score in zip(answers, scores, strict=True) if counts[answer] == most)


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, draws: int = DRAWS, seed: int = SEED
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean (Efron 1979).

    Args:
        values: One per prompt: samples of one prompt are not independent.
        confidence: Share of the resampled means inside.
        draws: Resamples.
        seed: Same values and seed, same interval.
    """
    number = len(values)
    if number == 1 or min(values) == max(values):
        return values[0], values[0]
    generator = random.Random(seed)
    means = sorted(sum(generator.choices(values, k=number)) / number for _ in range(draws))
    outside = (1.0 - confidence) / 2
    return means[int(outside * draws)], means[min(draws - 1, int((1.0 - outside) * draws))]


def shares(items: Iterable[str | None], prefix: str) -> dict[str, float]:
    """Return the share of each kind among items, as metrics below a prefix."""
    counts = Counter(item or "none" for item in items)
    total = counts.total()
    return {f"{prefix}/{name}": count / total for name, count in sorted(counts.items())}
