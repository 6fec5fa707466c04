"""Accuracy on held-out rows: every row, in order, always with the same seeds.

Each way of sampling has its own parameters and its own number of attempts per row. A sample that failed counts as
wrong, and is counted; it is not replaced by another.

Reported below ``eval/<way>``, and below ``eval/<way>/<data source>`` where there are several sources::

    accuracy, score, mean_length, failed       over all samples
    mean@k        share of right samples, of k per row
    pass@n        at least one of n is right, without bias, n = 1, 2, 4, ... k      (arXiv:2107.03374)
    maj@k         the answer given most often is right; where rewards have `pred`
    .../low, .../high                          95 % bootstrap interval over the rows
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from xrl_lite.agent_loop.manager import AgentLoopManager
from xrl_lite.data import EncodeRow, RolloutState, Row, SampleParams, Status, each_row_once, split_sessions
from xrl_lite.data.json_text import split_lines
from xrl_lite.errors import RunError
from xrl_lite.metrics import bootstrap_interval, majority_score, pass_at_k

PRED = "pred"
"""Key of a reward that holds the answer as the judger read it."""
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """What is kept of one attempt."""

    score: float
    """Its score; 0.0 if it failed."""
    num_tokens: int
    """Length of its response."""
    failed: bool
    """Whether it was neither answered nor judged."""
    pred: Hashable = None
    """The answer, where the judger says it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """All attempts at one row."""

    source: str
    """Data source of the row."""
    samples: tuple[Sample, ...]
    """One per attempt."""


class EvaluationRecord:
    """Keeps what was answered in a file, a line per row, so that an evaluation that was stopped goes on.

    Args:
        path: The file; made if it does not exist.
        about: What is evaluated, as values that JSON can hold. A file about something else is refused.

    Raises:
        RunError: the file is of another evaluation; says what differs.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._answered: dict[tuple[str, int], Answered] = {}
        lines = _lines(path)
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"about": about}) + "\n", encoding="utf-8")
        elif differing := list(_differences(lines[0].get("about"), json.loads(json.dumps(about)))):
            more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
            raise RunError(
                f"{path} holds an evaluation of something else: {'; '.join(differing[:_SHOWN])}{more}. Name another "
                f"file, or remove it."
            )
        for line in lines[1:]:
            samples = tuple(Sample(*sample) for sample in line["samples"])
            self._answered[line["way"], line["position"]] = Answered(line["source"], samples)

    def get(self, way: str, position: int) -> Answered | None:
        """Return what is known of a row."""
        return self._answered.get((way, position))

    def add(self, way: str, position: int, answered: Answered) -> None:
        """Keep a row."""
        samples = [[sample.score, sample.num_tokens, sample.failed, sample.pred] for sample in answered.samples]
        line = {"way": way, "position": position, "source": answered.source, "samples": samples}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


class Evaluator:
    """Runs the held-out rows through the agent loop of the task.

    Args:
        manager: Runs groups.
        rows: Held-out rows.
        encode: Renders and encodes the prompt of a row.
        sample_params: Ways of sampling, by name.
        success_score: A score above this counts as right.
        num_samples: Attempts per row, by way of sampling; one where there is none.
    """

    def __init__(
        self,
        manager: AgentLoopManager,
        *,
        rows: Sequence[Row],
        encode: EncodeRow,
        sample_params: dict[str, SampleParams],
        success_score: float,
        num_samples: Mapping[str, int] | None = None,
    ) -> None:
        self._manager = manager
        self._rows = rows
        self._encode = encode
        self._sample_params = sample_params
        self._success_score = success_score
        self._num_samples = num_samples or {}

    async def evaluate(self, record: EvaluationRecord | None = None) -> dict[str, float]:
        """Return the metrics of each way of sampling.

        Args:
            record: Rows that it knows are not run again; the others are added to it as they end.
        """
        metrics: dict[str, float] = {}
        for way, params in self._sample_params.items():
            answered = await self._run(way, params, record)
            metrics |= self._summarise(f"eval/{way}", answered)
            sources = sorted({row.source for row in answered})
            for source in sources if len(sources) > 1 else ():
                metrics |= self._summarise(f"eval/{way}/{source}", [row for row in answered if row.source == source])
        return metrics

    async def _run(self, way: str, params: SampleParams, record: EvaluationRecord | None) -> list[Answered]:
        # rollout seeds are made of the task name and the row, so each evaluation draws the same numbers
        size = self._num_samples.get(way, 1)
        groups = list(each_row_once(self._rows, encode=self._encode, group_size=size, task_name=f"eval/{way}"))
        answered = {
            position: known
            for position in range(len(groups))
            if record is not None and (known := record.get(way, position)) is not None
        }
        todo = [position for position in range(len(groups)) if position not in answered]

        def keep(index: int, states: list[RolloutState]) -> None:
            position = todo[index]
            answered[position] = Answered(
                str(self._rows[position].data_source), tuple(map(_sample, split_sessions(states)))
            )
            if record is not None:
                record.add(way, position, answered[position])

        await self._manager.evaluate([groups[position] for position in todo], on_group=keep, sample_params=params)
        return [answered[position] for position in range(len(groups))]

    def _summarise(self, prefix: str, answered: Sequence[Answered]) -> dict[str, float]:
        samples = [sample for row in answered for sample in row.samples]
        right = [sample.score > self._success_score for sample in samples]
        metrics = {
            f"{prefix}/accuracy": sum(right) / len(right),
            f"{prefix}/score": sum(sample.score for sample in samples) / len(samples),
            f"{prefix}/mean_length": sum(sample.num_tokens for sample in samples) / len(samples),
            f"{prefix}/failed": float(sum(sample.failed for sample in samples)),
        }
        return metrics | self._at_k(prefix, answered)

    def _at_k(self, prefix: str, answered: Sequence[Answered]) -> dict[str, float]:
        k = min(len(row.samples) for row in answered)
        right = [[sample.score > self._success_score for sample in row.samples] for row in answered]
        per_row: dict[str, list[float]] = {f"mean@{k}": [sum(row) / len(row) for row in right]}
        for n in _powers_of_two(k) if k > 1 else ():
            per_row[f"pass@{n}"] = [pass_at_k(len(row), sum(row), n) for row in right]
        if k > 1 and all(sample.pred is not None or sample.failed for row in answered for sample in row.samples):
            per_row[f"maj@{k}"] = [
                majority_score([sample.pred for sample in row.samples], list(map(float, hits)))
                for row, hits in zip(answered, right, strict=True)
            ]
        metrics: dict[str, float] = {}
        for name, values in per_row.items():
            low, high = bootstrap_interval(values)
            metrics |= {
                f"{prefix}/{name}": sum(values) / len(values),
                f"{prefix}/{name}/low": low,
                f"{prefix}/{name}/high": high,
            }
        return metrics


def code_in(settings: object) -> dict[str, str]:
    """Return path -> hash of the Python files that settings name, as in "rewards.py:score"."""
    if isinstance(settings, Mapping):
        parts = list(cast("Mapping[str, object]", settings).values())
    elif isinstance(settings, list):
        parts = cast("list[object]", settings)
    else:
        file = Path(settings.partition(":")[0]).expanduser() if isinstance(settings, str) else Path()
        is_code = file.suffix == ".py" and file.is_file()
        return {str(file): hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()} if is_code else {}
    return {path: digest for part in parts for path, digest in code_in(part).items()}


def _differences(then: object, now: object, place: str = "") -> Iterator[str]:
    """Say which values are others, innermost ones by their dotted names."""
    if isinstance(then, dict) and isinstance(now, dict):
        before, after = cast("dict[str, object]", then), cast("dict[str, object]", now)
        for name in {**before, **after}:
            yield from _differences(before.get(name), after.get(name), f"{place}.{name}" if place else name)
    elif then != now:
        yield f"{place or 'all of it'} was {then!r} and is {now!r}"


def _sample(session: Sequence[RolloutState]) -> Sample:
    *_, state = session
    reward = state.reward or {}
    pred = reward.get(PRED)
    return Sample(
        score=float(reward.get("score", 0.0)),
        num_tokens=sum(len(each.response_ids or []) for each in session),
        failed=state.status is not Status.COMPLETED,
        pred=cast("Hashable", pred) if isinstance(pred, str | int | float | bool | None) else str(pred),
    )


def _powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself."""
    powers = [1 << n for n in range(limit.bit_length()) if 1 << n < limit]
    return [*powers, limit]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a torn last one is cut off, so that the next does not continue it."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in split_lines(whole)]
