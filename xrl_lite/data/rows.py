"""Rows of a data set: where they come from, what shapes are understood, and errors that name the row.

Understood without being told (by the columns of each row):

====================  ==========================================================================================
verl                  ``prompt`` (messages), ``reward_model.ground_truth``, ``data_source``, ``extra_info``
raw GSM8K             ``question``, ``answer`` whose last line is ``#### <number>``
TRL prompt-only       ``prompt`` (text or messages) and one of ``ground_truth``, ``solution``, ``answer``, ``label``
====================  ==========================================================================================

Anything else is described by `DataConfig.columns`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from xrl_lite.data.json_text import JsonTextError, read_json, split_lines
from xrl_lite.errors import ConfigError, DataError, did_you_mean
from xrl_lite.lazy import is_installed
from xrl_lite.settings import Settings, UserPath

GROUND_TRUTH_COLUMNS = ("ground_truth", "solution", "answer", "label")
GSM8K_SOURCE = "openai/gsm8k"
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet")


class DataConfig(Settings):
    """Where rows come from and how their columns are read. Give exactly one of `path`, `dataset` and `task`."""

    path: UserPath | None = None
    """File of rows: .jsonl, .json (a list) or .parquet."""

    dataset: str | None = None
    """Name of a data set for `datasets.load_dataset`, for example "openai/gsm8k" (needs xrl-lite[train])."""

    dataset_config: str | None = None
    """Configuration of that data set, for example "main"."""

    task: str | None = None
    """Name of a built-in synthetic task: sort_digits or addition."""

    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Options of the synthetic task, for example {num_digits: 4}."""

    split: str = "train"
    """Split of a named data set, or "train" or "eval" of a synthetic task."""

    num_rows: int | None = Field(default=None, gt=0)
    """Use so many rows from the start; all when not given (a synthetic task makes 4096)."""

    columns: dict[Literal["prompt", "ground_truth", "data_source", "agent_name"], str] = Field(
        default_factory=dict[Literal["prompt", "ground_truth", "data_source", "agent_name"], str]
    )
    """Column that holds each part of a row, where the names are not one of the understood forms. Reward functions that
    take columns get these by their own names, too."""

    data_source: str | None = None
    """Data source of rows that do not name one; picks the judger branch."""

    system_prompt: str | None = None
    """System message put before prompts that have none."""

    question_suffix: str = ""
    """Text put behind the last message, for example how to write the answer."""

    seed: int = 0
    """Seed of a synthetic task."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        given = [name for name in ("path", "dataset", "task") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of path, dataset and task, got {' and '.join(given) if given else 'none'}."
            )
        if self.path is not None and self.path.suffix not in _FILE_SUFFIXES:
            raise ValueError(f"path must end in {', '.join(_FILE_SUFFIXES)}, got {str(self.path)!r}.")
        return self

    @property
    def label(self) -> str:
        """What to call this data in messages."""
        return str(self.path or self.dataset or f"task {self.task}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt with what is needed to judge answers to it."""

    index: int
    """Position in the data set, counted from 0."""
    prompt: list[dict[str, Any]]
    """Chat messages."""
    ground_truth: Any
    """The right answer, as the judger expects it."""
    data_source: str | dict[str, Any] | None = None
    """Routes answers to a judger branch."""
    agent_name: str | None = None
    """Agent loop that the row asks for; handed on in the state's extra_fields."""
    extra_info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Every other column, those that `DataConfig.columns` names, and what verl keeps in ``extra_info``."""


RESERVED_FIELDS = frozenset(
    {
        *("trajectory", "num_turns", "stop_reason", "stopped_by", "was_truncated", "tool_counts", "reward_info"),
        *("train_prompt_ids", "timing", "judgement", "row", "sample_index"),
    }
)
"""Names in a state's ``extra_fields`` by which loops, judgers and trainer tell one another how an attempt went."""


def copy_containers(value: Any) -> Any:
    """Return a value with dicts and lists of its own, all the way down; what else is in them is shared."""
    if type(value) is dict:
        return {key: copy_containers(each) for key, each in cast("dict[Any, Any]", value).items()}
    if type(value) is list:
        return [copy_containers(each) for each in cast("list[Any]", value)]
    return value


def load_rows(config: DataConfig) -> list[Row]:
    """Read and check every row.

    Raises:
        DataError: the file is missing or broken, there is no row, or a row lacks a part; names row and column.
    """
    rows: list[Row] = []
    columns: dict[str, None] = {}
    for index, raw in enumerate(read_raw_rows(config)):
        columns |= dict.fromkeys(raw)
        rows.append(parse_row(raw, index, config))
        if taken := RESERVED_FIELDS & rows[-1].extra_info.keys():
            raise DataError(
                f"{config.label}, row {index}: what an attempt comes to is kept under the names "
                f"{', '.join(sorted(RESERVED_FIELDS))}, so no column may be called {', '.join(sorted(taken))}. "
                f"Rename or drop it."
            )
    if not rows:
        raise DataError(f"{config.label} has no rows. Give a data set with at least one.")
    for part in ("data_source", "agent_name"):  # a row may do without, so that none has it is a slip of the pen
        if (named := config.columns.get(part)) is not None and named not in columns:
            raise DataError(
                f"{config.label}: no row has the column {named!r}, which columns.{part} names."
                f"{did_you_mean(named, columns)} There are {', '.join(columns)}."
            )
    return rows


def hash_rows(rows: Iterable[Row]) -> str:
    """Return a hash of prompts, right answers and data sources, in their order (0.3 s for 100 000 rows)."""
    encode = json.JSONEncoder(skipkeys=True, default=_type_name).encode
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(encode([row.index, row.prompt, row.ground_truth, row.data_source]).encode())
    return digest.hexdigest()


def _type_name(value: object) -> str:
    return type(value).__qualname__


def parse_row(raw: Mapping[str, Any], index: int, config: DataConfig) -> Row:
    """Read one row by the columns it has, or by `config.columns`.

    Raises:
        DataError: a part is missing or has the wrong shape.
    """
    place = f"{config.label}, row {index}"
    prompt_column = config.columns.get("prompt") or ("prompt" if "prompt" in raw else "question")
    prompt = _messages(_column(raw, prompt_column, place, "the prompt"), place, prompt_column)
    truth, used = _ground_truth(raw, place, config)
    source = _without_none(raw.get(config.columns.get("data_source", "data_source"))) or config.data_source
    if source is None and {"question", "answer"} <= raw.keys() and "####" in str(raw["answer"]):
        source = GSM8K_SOURCE
    agent = raw.get(config.columns.get("agent_name", "agent_name"))
    understood = {prompt_column, used, "extra_info"} - _own_names(config)
    extra = {name: value for name, value in raw.items() if name not in understood}
    info: object = raw.get("extra_info") or {}
    if not isinstance(info, Mapping):
        raise DataError(f"{place}: extra_info must be a mapping, got {repr(info)[:100]}.")
    extra |= cast("Mapping[str, Any]", info)
    if agent is not None:
        extra["agent_name"] = agent
    if source is not None and not isinstance(source, str | dict):
        raise DataError(f"{place}: data_source must be a name or a mapping of names, got {source!r}.")
    return Row(
        index=index,
        prompt=_dress(prompt, config),
        ground_truth=truth,
        data_source=cast("str | dict[str, Any] | None", source),
        agent_name=agent,
        extra_info=extra,
    )


def _own_names(config: DataConfig) -> set[str]:
    """Names of the user's own for prompt and ground truth, by which reward functions may ask for these columns."""
    columns = config.columns
    return {columns[part] for part in ("prompt", "ground_truth") if part in columns and columns[part] != part}


def _ground_truth(raw: Mapping[str, Any], place: str, config: DataConfig) -> tuple[Any, str | None]:
    """Return the ground truth, and the column that is just that; a column that holds more stays one of the others."""
    named = config.columns.get("ground_truth")
    if named is not None:
        return _present(_column(raw, named, place, "the ground truth"), place, named), named
    reward_model = raw.get("reward_model")
    if isinstance(reward_model, Mapping):
        truth = cast("Mapping[str, Any]", reward_model).get("ground_truth")
        return _present(truth, place, "reward_model.ground_truth"), "reward_model"
    for column in GROUND_TRUTH_COLUMNS:
        if column in raw:
            value = _present(raw[column], place, column)
            if column == "answer" and isinstance(value, str) and "####" in value:
                number = value.rsplit("####", 1)[1].strip().replace(",", "")
                return _present(number, place, "answer (behind ####)"), None
            return value, column
    raise DataError(
        f"{place}: there is no ground truth. Looked for reward_model.ground_truth and the columns "
        f"{', '.join(GROUND_TRUTH_COLUMNS)}; the row has {', '.join(raw)}. "
        f"Name the column with columns.ground_truth."
    )


def _without_none(source: Any) -> Any:
    """Return a data source without branches of None: Parquet gives every row the keys of all rows."""
    if not isinstance(source, dict):
        return source
    named = cast("dict[str, Any]", source).items()
    return {name: _without_none(value) for name, value in named if value is not None}


def _present(value: Any, place: str, column: str) -> Any:
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        what = "empty" if value is None or value == "" else "NaN, which equals nothing"
        raise DataError(f"{place}: {column} is {what}, so no answer can be judged. Fill it in or drop the row.")
    _check_text(value, place, column)
    return value


def _check_text(value: object, place: str, column: str) -> None:
    """Refuse strings, however deep inside, that are no text: no tokenizer takes them."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: {column} has half a surrogate pair ({value[error.start]!r} at character {error.start}), "
                f"which is no text. Repair it or drop the row."
            ) from error
    elif isinstance(value, Mapping):
        for name, each in cast("Mapping[Any, object]", value).items():
            _check_text(each, place, f"{column}.{name}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(cast("Sequence[object]", value)):
            _check_text(each, place, f"{column}.{number}")


def _column(raw: Mapping[str, Any], column: str, place: str, what: str) -> Any:
    if column not in raw:
        raise DataError(
            f"{place}: there is no column {column!r} for {what}.{did_you_mean(column, raw)} "
            f"The row has {', '.join(raw)}."
        )
    return raw[column]


def _messages(prompt: Any, place: str, column: str) -> list[dict[str, Any]]:
    _check_text(prompt, place, column)
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes | Mapping):
        messages = list(cast("Iterable[object]", prompt))
        if messages and all(_is_message(message) for message in messages):
            return [_complete(dict(cast("Mapping[str, Any]", message)), place, column) for message in messages]
    given = str(cast("object", prompt))[:100]
    raise DataError(f"{place}: {column} must be a text or a list of messages with role and content, got {given}.")


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def _complete(message: dict[str, Any], place: str, column: str) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if not isinstance(role, str):
        raise DataError(
            f"{place}: {column} has a message whose role is {role!r:.100}. A role is a text, such as 'user'."
        )
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        raise DataError(
            f"{place}: {column} has a message of role {role} whose content is {content!r:.100}. Content is a text or a "
            f"list of parts; it may be null only beside tool_calls."
        )
    return message


def _dress(messages: list[dict[str, Any]], config: DataConfig) -> list[dict[str, Any]]:
    if config.question_suffix:
        *before, last = messages
        messages = [*before, {**last, "content": _followed_by(config.question_suffix, last["content"])}]
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return messages


def _followed_by(suffix: str, content: object) -> str | list[Any]:
    """Return the content of a message with a text behind it: behind its last text, where it has several parts."""
    if not isinstance(content, list):
        return f"{content or ''}{suffix}"
    parts = cast("list[dict[str, Any] | str]", content)
    texts = [(place, part) for place, part in enumerate(parts) if isinstance(part, dict) and "text" in part]
    if not texts:
        return [*parts, {"type": "text", "text": suffix}]
    place, last = texts[-1]
    return [*parts[:place], {**last, "text": f"{last['text']}{suffix}"}, *parts[place + 1 :]]


def read_raw_rows(config: DataConfig) -> Iterator[Mapping[str, Any]]:
    """Yield every row as it is.

    Raises:
        DataError: the file is missing or broken.
    """
    if config.task is not None:
        from xrl_lite.data.tasks import make_rows  # only synthetic runs need it

        yield from make_rows(
            config.task,
            split=_task_split(config.split),
            num_rows=config.num_rows or 4096,
            seed=config.seed,
            options=config.options,
        )
        return
    rows = _read_dataset(config) if config.path is None else _read_file(config.path)
    for index, row in enumerate(rows):
        if config.num_rows is not None and index >= config.num_rows:
            return
        yield row


def _task_split(split: str) -> Literal["train", "eval"]:
    if split not in ("train", "eval"):
        raise DataError(f"A synthetic task has the splits 'train' and 'eval', got {split!r}.")
    return split


def _read_file(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        near = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
        raise DataError(f"There is no file {path} (looked for {path.resolve()}).{did_you_mean(path.name, near)}")
    if path.suffix == ".parquet":
        parquet = _optional("pyarrow.parquet", f"reading {path}")
        try:
            yield from parquet.read_table(path).to_pylist()
        except Exception as error:
            raise DataError(f"{path} is not a parquet file that can be read: {error}") from error
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix == ".json":
        for index, row in enumerate(_json(text, f"{path}", list)):
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {index}: expected a JSON object, got {repr(cast('object', row))[:60]}.")
            yield cast("dict[str, Any]", row)
        return
    for number, line in enumerate(split_lines(text), start=1):
        if line.strip():
            yield _json(line, f"{path}, line {number}", dict)


def _json(text: str, place: str, kind: type) -> Any:
    try:
        value = read_json(text)
    except JsonTextError as error:
        raise DataError(f"{place}: not valid JSON ({error}).") from error
    if not isinstance(value, kind):
        raise DataError(f"{place}: expected a JSON {'list' if kind is list else 'object'}, got {text[:60]!r}.")
    return value


def _read_dataset(config: DataConfig) -> Iterator[Mapping[str, Any]]:
    datasets = _optional("datasets", f"loading {config.dataset}")
    try:
        yield from datasets.load_dataset(config.dataset, config.dataset_config, split=config.split)
    except Exception as error:
        raise DataError(
            f"datasets.load_dataset({config.dataset!r}, {config.dataset_config!r}, split={config.split!r}) "
            f"failed: {error}. Check the name and the network, or give a file with path."
        ) from error


def _optional(module: str, purpose: str) -> Any:
    library = module.partition(".")[0]
    if not is_installed(library):
        raise ConfigError(f"{purpose} needs {library}. Install it with: pip install 'xrl-lite[train]'")
    return import_module(module)
