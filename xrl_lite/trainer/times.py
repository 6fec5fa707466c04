"""Where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from xrl_lite.actors import now


class StepTimes:
    """Seconds of the parts of one step.

    Args:
        busy_s: Seconds, so far, in which anything was generated for training.
    """

    def __init__(self, busy_s: Callable[[], float]) -> None:
        self._busy_s = busy_s
        self._started, self._busy_before = now(), busy_s()
        self._overlap_s = 0.0
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Measure a part; while `train` is measured, generation overlaps with it."""
        started, busy_before = now(), self._busy_s()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + now() - started
            if name == "train":
                self._overlap_s += self._busy_s() - busy_before

    def metrics(self, num_tokens: float) -> dict[str, float]:
        """Return all parts, the rest as other, how long was generated, and the tokens generated per second.

        time/generating is how long groups were in flight during the step, time/overlap is what of it fell into
        time/train.
        """
        step = now() - self._started
        return {
            "time/step": step,
            **{f"time/{name}": value for name, value in self.parts.items()},
            "time/other": step - sum(self.parts.values()),
            "time/generating": self._busy_s() - self._busy_before,
            "time/overlap": self._overlap_s,
            "time/tokens_per_s": num_tokens / step if step else 0.0,
        }
