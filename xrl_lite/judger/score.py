"""Judging responses that lie in a file, without any model.

::

    rows --> samples --> judge, so many at the same time --> records, in the order of the file --> output
      waits for    the oldest judgement under way, once enough are
      is woken by  the judger, whose time limit holds for each of them

A record is a line of JSON: the columns of the row, and ``row``, ``sample``, ``reward``, ``judgement``, the data source
and ``judged_by``, a digest of the judger's settings, the label and the prompt. As records keep the order of the file,
what is there already is its beginning, and a run that was ended goes on behind it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO, cast

from xrl_lite.actors import ActorSystem, CPUResourceManager, clear_cpu_resource_manager, set_cpu_resource_manager
from xrl_lite.data import DataConfig, RolloutState, Row, Status, parse_row, read_raw_rows
from xrl_lite.data.json_text import JsonTextError, read_json
from xrl_lite.errors import ConfigError, DataError, did_you_mean, errors_as_themselves
from xrl_lite.judger.adapters import RewardAdapter, content_text
from xrl_lite.judger.base import BaseJudger
from xrl_lite.judger.build import build_judger
from xrl_lite.judger.config import ComposedJudgerConfig, JudgerConfig, JudgerConfigLike
from xrl_lite.judger.data_sources import check_rows
from xrl_lite.judger.handler import code_file, handler_name, is_url, load_handler
from xrl_lite.judger.outcome import Judgement, Outcome, RewardValueError
from xrl_lite.judger.proof import self_test, summarize
from xrl_lite.judger.reward_check import check_reward
from xrl_lite.judger.whereabouts import is_user_code

RESPONSE_COLUMNS = ("response", "responses", "completion", "completions", "output", "prediction", "solution_str")
"""Columns that are looked at for the response, in this order."""

DEFAULT_AT_ONCE = 256

_OURS = ("data_source", "row", "sample", "reward", "judgement", "judged_by")
_ANY_PROMPT = "-"
_NOT_ABOUT_SCORES = {
    *("cpu_resources", "gold_template", "http_backoff_s", "http_retries", "max_concurrency", "max_initial_failures"),
    *("max_pending", "max_retries", "rate_limit", "request_timeout", "retry_wait_s", "sync_in"),
}
"""Settings of judgers that say where, when and how long, and may be changed when a run goes on."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A response to be judged."""

    row: Row
    """Prompt, label and columns."""
    number: int
    """Which of the row's responses it is."""
    response: str
    """The text."""
    columns: Mapping[str, Any]
    """The row as it was read, with this response alone."""
    response_ids: list[int] | None = None
    """Its tokens, where the row has them."""

    def state(self, position: int) -> RolloutState:
        """Return the state that a judger sees."""
        return RolloutState(
            message=self.row.prompt,
            response=self.response,
            response_ids=self.response_ids,
            rollout_id=position,
            data_source=self.row.data_source,
            reward_model={"ground_truth": self.row.ground_truth},
            status=Status.COMPLETED,
            extra_fields={**self.row.extra_info, "row": self.row.index},
        )


def read_samples(config: DataConfig, *, response_column: str | None = None) -> list[Sample]:
    """Read every response of a file; a row may hold one, or a list. Rows may do without a prompt.

    Raises:
        DataError: a row has no response or no label, or `response_ids` that do not fit; names row, columns present and
            the closest name.
    """
    samples: list[Sample] = []
    for index, raw in enumerate(read_raw_rows(config)):
        column = _response_column(raw, index, config, response_column)
        has_prompt = "prompt" in raw or "question" in raw or "prompt" in config.columns
        given = raw if has_prompt else {**raw, "prompt": _ANY_PROMPT}
        row = parse_row({name: value for name, value in given.items() if name != column}, index, config)
        if not has_prompt:
            row = replace(row, prompt=[])
        place = f"{config.label}, row {index}"
        responses = list(_responses(raw[column], f"{place}: {column}"))
        for number, response in enumerate(responses):
            columns = {**raw, column: response}
            ids = _response_ids(raw.get("response_ids"), number, len(responses), place)
            if ids is not None:
                columns["response_ids"] = ids
            samples.append(Sample(row=row, number=number, response=response, columns=columns, response_ids=ids))
    if not samples:
        raise DataError(f"{config.label} has no responses.")
    return samples


def open_output(
    path: Path, samples: Sequence[Sample], config: JudgerConfigLike, *, resume: bool
) -> list[dict[str, Any]]:
    """Return the records that are in the output already, all of them whole; none if the file is new.

    Raises:
        ConfigError: there is a file and nobody said to resume it, or it holds other samples, or other judgements.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return []
    if not resume:
        raise ConfigError(f"{path} exists. Go on with it by --resume, or name another file.")
    content = path.read_bytes()
    records = _read_records(content, path)
    judged_by = _Digest(config)
    for position, record in enumerate(records):
        sample = samples[position] if position < len(samples) else None
        if sample is None or not _is_record_of(record, sample):
            raise ConfigError(
                f"{path}, line {position + 1} is not about the sample that stands there in the data, so this is "
                f"another run's file. Name another output."
            )
        if "judged_by" not in record:
            raise ConfigError(
                f"{path}, line {position + 1} does not say by which settings it was judged (judged_by): an older "
                f"version of xrl-lite wrote it. Name another output, and all samples are judged again."
            )
        if record["judged_by"] != judged_by(sample):
            raise ConfigError(
                f"{path}, line {position + 1} was judged by a judger with other settings or code, with another label "
                f"or prompt, or by another version of xrl-lite. Go on with those, or name another output."
            )
    os.truncate(path, content.rfind(b"\n") + 1)  # a line that was being written when the run ended is written again
    return records


async def score_file(
    config: JudgerConfigLike,
    samples: Sequence[Sample],
    output: Path,
    *,
    start: int = 0,
    at_once: int = DEFAULT_AT_ONCE,
    num_cpus: float | None = None,
    is_self_tested: bool = True,
    on_note: Callable[[str], None] = lambda _: None,
    on_record: Callable[[dict[str, Any]], None],
) -> None:
    """Build the judger, let it prove itself, and append a record for each sample from `start` on to the output.

    Raises:
        DataError: a row lacks what the judger takes.
        ResourceError: there are not enough CPU slots.
        JudgerError: the self-test failed, or judging cannot go on.
    """
    check_rows(config, [sample.row for sample in samples])
    with errors_as_themselves():
        async with ActorSystem(num_cpus=num_cpus) as system:
            set_cpu_resource_manager(CPUResourceManager(capacity=system))
            try:
                async with build_judger(config, system=system) as judger:
                    if is_self_tested:
                        first_of_source = {repr(sample.row.data_source): sample for sample in reversed(samples)}
                        results = [await self_test(judger, sample.state(0)) for sample in first_of_source.values()]
                        for line in summarize(result for part in results for result in part):
                            on_note(line)
                    # half of a surrogate pair is no UTF-8, and its escape is what JSON has for it
                    with output.open("a", encoding="utf-8", errors="backslashreplace") as file:
                        await score_samples(
                            judger,
                            samples,
                            file,
                            judged_by=_Digest(config),
                            start=start,
                            at_once=at_once,
                            on_record=on_record,
                        )
            finally:
                clear_cpu_resource_manager()


async def score_samples(
    judger: BaseJudger,
    samples: Sequence[Sample],
    output: TextIO,
    *,
    judged_by: Callable[[Sample], str],
    start: int = 0,
    at_once: int = DEFAULT_AT_ONCE,
    on_record: Callable[[dict[str, Any]], None],
) -> None:
    """Judge the samples from `start` on, and write a record for each, in order.

    Args:
        judger: The judger.
        samples: All samples.
        output: Open for writing.
        judged_by: Tells judgements from those of other settings, labels and prompts.
        start: How many are done already.
        at_once: Most judgements under way.
        on_record: Called with each record when it is written.

    Raises:
        JudgerError: the first judgements all failed, or no worker is left. What was judged before is written.
    """
    under_way: deque[tuple[Sample, asyncio.Task[RolloutState]]] = deque()

    async def write_oldest() -> None:
        sample, task = under_way.popleft()
        record = make_record(sample, await task, judged_by=judged_by(sample))
        output.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        output.flush()
        on_record(record)

    async with asyncio.TaskGroup() as judging:
        for position in range(start, len(samples)):
            sample = samples[position]
            under_way.append((sample, judging.create_task(_judge(judger, sample.state(position)))))
            if len(under_way) >= at_once:
                await write_oldest()
        while under_way:
            await write_oldest()


def make_record(sample: Sample, state: RolloutState, *, judged_by: str) -> dict[str, Any]:
    """Return what the output keeps of a sample."""
    return {
        **sample.columns,
        "data_source": sample.row.data_source,
        "row": sample.row.index,
        "sample": sample.number,
        "reward": state.reward,
        "judgement": state.extra_fields["judgement"],
        "judged_by": judged_by,
    }


async def _judge(judger: BaseJudger, state: RolloutState) -> RolloutState:
    """Judge, and say how that ended where the judger, as one that owns the whole flow, does not."""
    began = perf_counter()
    judged = await judger.judge(state)
    if "judgement" in judged.extra_fields:
        return judged
    name = judger.get_judger_name()
    judgement = Judgement(judger=name, outcome=Outcome.OK, run_s=perf_counter() - began, queue_s=0.0)
    try:
        judged.reward = check_reward(judged.reward, judger=name, sample=state.rollout_id)
    except RewardValueError as error:
        judged.reward, judgement = None, replace(judgement, outcome=Outcome.RAISED, error=error)
    judged.extra_fields = {**judged.extra_fields, "judgement": judgement.record(state.rollout_id)}
    return judged


class _Digest:
    """Names judgements by what their scores come from: the judger's settings, the label and the prompt."""

    def __init__(self, config: JudgerConfigLike) -> None:
        self._settings = _to_json(_what_scores(config))

    def __call__(self, sample: Sample) -> str:
        text = self._settings + _to_json([sample.row.ground_truth, sample.row.data_source, sample.row.prompt])
        return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()


@dataclass
class Tally:
    """Outcomes and scores of one judger on one data source."""

    outcomes: dict[str, int] = field(default_factory=lambda: {outcome.value: 0 for outcome in Outcome})
    """Count of each outcome."""
    scores: list[float] = field(default_factory=list[float])
    """Scores of those that have one."""
    first_errors: dict[str, str] = field(default_factory=dict[str, str])
    """What the first of each kind of failure says."""
    run_s: list[float] = field(default_factory=list[float])
    """Seconds that each ran."""

    @property
    def total(self) -> int:
        """Samples."""
        return sum(self.outcomes.values())

    @property
    def num_failed(self) -> int:
        """Samples that should have got a score and did not; skipping is a choice."""
        return self.total - self.outcomes[Outcome.OK] - self.outcomes[Outcome.SKIPPED]

    @property
    def mean_score(self) -> float:
        """Mean over the samples with a score; NaN without any."""
        return statistics.fmean(self.scores) if self.scores else math.nan

    def run_quantile_s(self, share: float) -> float:
        """Return the run time that this share of the judgements keep to, in seconds."""
        ordered = sorted(self.run_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Tallies:
    """Counts records by judger and data source."""

    def __init__(self) -> None:
        self.by_source: dict[tuple[str, str], Tally] = {}
        """Judger and data source, in the order they came."""
        self.together = Tally()
        """All of them."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a record."""
        judgement = record["judgement"]
        source = _source_name(record.get("data_source"))
        mine = self.by_source.setdefault((str(judgement["judger"]), source), Tally())
        for tally in (mine, self.together):
            tally.outcomes[judgement["outcome"]] += 1
            tally.run_s.append(float(judgement["run_s"]))
            if judgement["error"] is not None and judgement["outcome"] != Outcome.SKIPPED:
                tally.first_errors.setdefault(_kind_of(judgement["error"]), judgement["error"])
            if record["reward"] is not None:
                tally.scores.append(float(record["reward"]["score"]))


def _kind_of(error: str) -> str:
    """Return what an error that names judger, sample, outcome, type and message has in common with its like."""
    return ": ".join(error.split(": ")[1:3])


def _source_name(source: Any) -> str:
    if isinstance(source, Mapping):
        return " + ".join(cast("Mapping[str, Any]", source))
    return "-" if source is None else str(source)


def _response_column(raw: Mapping[str, Any], index: int, config: DataConfig, named: str | None) -> str:
    looked_for = (named,) if named is not None else RESPONSE_COLUMNS
    for column in looked_for:
        if raw.get(column) is not None:
            return column
    raise DataError(
        f"{config.label}, row {index}: there is no response. Looked for {', '.join(looked_for)}."
        f"{did_you_mean(looked_for[0], raw)} The row has {', '.join(raw)}. Name the column with --response-column."
    )


def _responses(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        return
    if isinstance(value, list):
        parts = cast("list[Any]", value)
        if parts and all(isinstance(part, Mapping) and "content" in part for part in parts):
            yield "\n".join(content_text(part["content"]) for part in parts)
            return
        if all(isinstance(part, str | list) for part in parts):
            for part in parts:
                yield from _responses(part, place)
            return
    raise DataError(f"{place} must be a text, a list of texts, or messages, got {value!r:.100}.")


def _response_ids(ids: Any, number: int, count: int, place: str) -> list[int] | None:
    """Return the tokens of one of a row's responses: the row's, or those at its place in a list for each of them."""
    if ids is None:
        return None
    given = cast("list[Any]", ids) if isinstance(ids, list) else [ids]
    lists = cast("list[list[Any]]", given) if all(isinstance(each, list) for each in given) and given else [given]
    if len(lists) != count or not all(isinstance(token, int) for each in lists for token in each):
        raise DataError(
            f"{place}: response_ids must hold the tokens of {count} response(s), as a list of whole numbers for each, "
            f"got {ids!r:.100}."
        )
    return lists[number]


def _read_records(content: bytes, path: Path) -> list[dict[str, Any]]:
    """Return the records of all whole lines; what stands behind the last one may be the beginning of another."""
    *lines, rest = content.split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = read_json(line)
        except JsonTextError as error:
            raise _no_record(path, number) from error
        if not isinstance(record, dict):
            raise _no_record(path, number)
        records.append(cast("dict[str, Any]", record))
    if rest and not rest.startswith(b"{"):
        raise _no_record(path, len(lines) + 1)
    return records


def _no_record(path: Path, number: int) -> ConfigError:
    return ConfigError(f"{path}, line {number} is no record of a judgement. Name another output.")


def _code_of(config: JudgerConfig) -> list[str]:
    """Return the names of the reward code, and a digest of each file of the user's that it stands in."""
    handler: object = config.reward_handler
    handlers = cast("Sequence[object]", handler) if isinstance(handler, list) else [handler]
    names = [handler_name(one) for one in handlers]
    loaded = [load_handler(one, judger=config.judger_name) for one in handlers if one is not None and not is_url(one)]
    functions = [each for one in loaded for each in (one.functions if isinstance(one, RewardAdapter) else [one])]
    files = {file for file in map(code_file, functions) if file is not None and is_user_code(file)}
    present = [path for path in map(Path, sorted(files)) if path.is_file()]  # code typed into a prompt has no file
    return [*names, *(hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() for path in present)]


def _what_scores(config: JudgerConfigLike) -> list[Any]:
    """Return kind, settings and code of a judger, without its own settings that are not about scores."""
    settings = config.model_dump(mode="json")
    settings = {name: value for name, value in settings.items() if name not in _NOT_ABOUT_SCORES}
    if isinstance(config, ComposedJudgerConfig):
        settings["branches"] = {name: _what_scores(branch) for name, branch in config.branches.items()}
        return [type(config).__qualname__, settings]
    return [type(config).__qualname__, settings, *_code_of(config)]


def _to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _is_record_of(record: Mapping[str, Any], sample: Sample) -> bool:
    return (record.get("row"), record.get("sample")) == (sample.row.index, sample.number) and all(
        _to_json(record.get(name)) == _to_json(_as_written(value))
        for name, value in sample.columns.items()
        if name not in _OURS
    )


def _as_written(value: Any) -> Any:
    """Return what a record has in place of a value."""
    return json.loads(json.dumps(value, default=str))
