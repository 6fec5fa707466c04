"""Which judger a data source gets where the settings name none, as verl chooses its scorer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xrl_lite.errors import ConfigError, DataError, did_you_mean
from xrl_lite.judger.choice import JUDGERS, AnyJudgerConfig
from xrl_lite.judger.config import ComposedJudgerConfig

JUDGER_OF_DATA_SOURCE = {
    "openai/gsm8k": "gsm8k",
    "hiyouga/geometry3k": "geo3k",
    "sort_digits": "exact_match",
    "addition": "exact_match",
}
"""Data source -> kind of judger."""


def judger_for(data_sources: Iterable[str | dict[str, Any] | None]) -> AnyJudgerConfig:
    """Return settings of the judger for rows of these data sources: one, or a composed one with a branch for each.

    Raises:
        ConfigError: a row has no data source, or one that no judger is known for; names the closest.
    """
    names = sorted({str(source) for source in data_sources})
    for name in names:
        if name not in JUDGER_OF_DATA_SOURCE:
            raise ConfigError(
                f"No judger is known for data source {name!r}.{did_you_mean(name, JUDGER_OF_DATA_SOURCE)} "
                f"Known data sources: {', '.join(sorted(JUDGER_OF_DATA_SOURCE))}. "
                f"Choose a judger with task.judger_config, for example {{type: exact_match}}."
            )
    branches = {name: JUDGERS.resolve(JUDGER_OF_DATA_SOURCE[name])(judger_name=name) for name in names}
    if len(branches) == 1:
        return next(iter(branches.values()))  # type: ignore[return-value]
    return ComposedJudgerConfig.model_validate({"branches": branches})


def check_routes(config: AnyJudgerConfig, data_sources: Iterable[str | dict[str, Any] | None]) -> None:
    """Check that every row finds its branch, before anything costly starts.

    Raises:
        DataError: a data source is not a branch; names the row and the closest branch.
    """
    if not isinstance(config, ComposedJudgerConfig):
        return
    known = sorted(config.branches)
    for index, source in enumerate(data_sources):
        for name in source if isinstance(source, dict) else [source]:
            if name not in config.branches:
                raise DataError(
                    f"Row {index} has data source {name!r}, which is no branch of the judger."
                    f"{did_you_mean(str(name), known)} Branches: {', '.join(known)}."
                )
