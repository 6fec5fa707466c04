"""What rows ask of a judger: which one they get where the settings name none, and whether they fit the one they get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from xrl_lite.data import Row
from xrl_lite.errors import ConfigError, DataError, did_you_mean
from xrl_lite.judger.choice import JUDGERS, AnyJudgerConfig
from xrl_lite.judger.config import ComposedJudgerConfig, JudgerConfig, JudgerConfigLike
from xrl_lite.judger.routing import inner_source, select_branches, select_inside

JUDGER_OF_DATA_SOURCE = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "dapo_math",
    "math_dapo_reasoning": "dapo_math",
    "math": "dapo_math",
    "aime*": "dapo_math",
    "numina_*": "math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "hiyouga/geometry3k": "geo3k",
    "searchR1_*": "search_qa",
    "sort_digits": "exact_match",
    "addition": "exact_match",
}
"""Data source -> kind of judger, as verl chooses its scorer. A star stands for any ending."""

_QUARTER_CPU = {"num_workers": 1, "num_cpus_per_worker": 0.25}
"""For what asks sympy, which may take for ever: only a process can be ended."""

_SETTINGS: dict[str, dict[str, Any]] = {
    "dapo_math": {"eos_token": ["<|im_end|>", "<|endoftext|>", "</s>"], "enable_overlong_buffer": False},
    "code": {"common_imports": True},
    "math": {"cpu_resources": _QUARTER_CPU},
    "geo3k": {"cpu_resources": _QUARTER_CPU},
}
"""What is set of these kinds where nobody else sets it."""


def kind_for(data_source: str) -> str:
    """Return the kind of judger for a data source.

    Raises:
        ConfigError: none is known; names the closest.
    """
    if data_source in JUDGER_OF_DATA_SOURCE:
        return JUDGER_OF_DATA_SOURCE[data_source]
    for pattern, kind in JUDGER_OF_DATA_SOURCE.items():
        if pattern.endswith("*") and data_source.startswith(pattern[:-1]):
            return kind
    raise ConfigError(
        f"No judger is known for data source {data_source!r}.{did_you_mean(data_source, JUDGER_OF_DATA_SOURCE)} "
        f"Known data sources: {', '.join(sorted(JUDGER_OF_DATA_SOURCE))}. "
        f"Choose a judger with task.judger_config, for example {{type: exact_match}}."
    )


def settings_of(kind: str, *, judger_name: str) -> JudgerConfig:
    """Return settings for a kind of judger that nobody has set up."""
    found = JUDGERS.resolve(kind).model_validate({"judger_name": judger_name, **_SETTINGS.get(kind, {})})
    assert isinstance(found, JudgerConfig), "composed judgers are no kind of this table"
    return found


def judger_for(data_sources: Iterable[str | dict[str, Any] | None]) -> AnyJudgerConfig:
    """Return settings of the judger for rows of these data sources: one, or a composed one with a branch for each.

    Raises:
        ConfigError: a row has no data source, or one that no judger is known for; names the closest.
    """
    branches: dict[str, Any] = {}
    for name in sorted({str(source) for source in data_sources}):
        kind = kind_for(name)
        branches[name] = settings_of(kind, judger_name=name)
    if len(branches) == 1:
        return next(iter(branches.values()))
    return ComposedJudgerConfig.model_validate({"branches": branches})


def check_rows(config: AnyJudgerConfig, rows: Sequence[Row]) -> None:
    """Check that every row finds its branch, and has what the judger takes, before anything starts.

    Raises:
        DataError: a data source is not a branch, or a column or the prompt is missing; names the row and the closest.
    """
    leaves_of: dict[str, list[JudgerConfig]] = {}
    seen: set[tuple[str, frozenset[str], bool]] = set()
    for row in rows:
        source = repr(row.data_source)
        shape = (source, frozenset(row.extra_info), bool(row.prompt))
        if shape in seen:
            continue
        seen.add(shape)
        if source not in leaves_of:
            leaves_of[source] = list(_leaves(config, row))
        for leaf in leaves_of[source]:
            _check_columns(leaf, row)
            _check_prompt(leaf, row)


def _leaves(config: JudgerConfigLike, row: Row) -> Iterator[JudgerConfig]:
    if isinstance(config, JudgerConfig):
        yield config
        return
    try:
        keys = select_branches(row.data_source, list(config.branches))
        yield from _selected(config, keys, row.data_source)
    except (KeyError, ValueError, TypeError) as error:
        known = sorted(config.branches)
        asked = row.data_source if isinstance(row.data_source, Mapping) else [row.data_source]
        unknown = [str(name) for name in asked if name not in config.branches]
        if unknown:
            raise DataError(
                f"Row {row.index} has data source {unknown[0]!r}, which is no branch of the judger."
                f"{did_you_mean(unknown[0], known)} Branches: {', '.join(known)}."
            ) from error
        raise DataError(f"Row {row.index} cannot be judged: {error.args[0] if error.args else error!r}") from error


def _selected(config: ComposedJudgerConfig, keys: Sequence[str], data_source: Any) -> Iterator[JudgerConfig]:
    if len(keys) > 1 and config.merge_fn is None and config.weights is None:
        raise ValueError(
            f"its data source selects the branches {', '.join(keys)} of judger {config.judger_name!r}, which has "
            f"neither merge_fn nor weights."
        )
    for key in keys:
        branch = config.branches[key]
        if isinstance(branch, JudgerConfig):
            yield branch
        else:
            inside = select_inside(key, data_source, list(branch.branches))
            yield from _selected(branch, inside, inner_source(key, data_source))


def _check_columns(config: JudgerConfig, row: Row) -> None:
    adapter = config.adapter()
    if adapter is None:
        return
    known = {*row.extra_info, *config.extra_info}
    has_source = row.data_source is not None
    for name in adapter.required_columns():
        if name not in known and not (name == "data_source" and has_source):
            raise DataError(
                f"judger {config.judger_name!r}: {adapter.__name__} takes the column {name!r}, which row {row.index} "
                f"does not have.{did_you_mean(name, known)} It has {', '.join(sorted(known)) or 'no further columns'}. "
                f"Give the parameter a default if it can do without, or set it in reward_kwargs."
            )


def _check_prompt(config: JudgerConfig, row: Row) -> None:
    if not row.prompt and config.reads_prompt():
        raise DataError(
            f"judger {config.judger_name!r} reads the prompt, which row {row.index} does not have."
            f"{did_you_mean('prompt', row.extra_info)} It has {', '.join(sorted(row.extra_info)) or 'no columns'}. "
            f"Name the column of the prompt with --prompt-column."
        )
