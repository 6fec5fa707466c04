"""Judger settings inside other settings: an instance, or a mapping whose ``type`` names the kind of judger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, PlainSerializer, SerializationInfo

from xrl_lite.errors import ConfigError, PluginError, UnknownNameError
from xrl_lite.registry import Registry
from xrl_lite.settings import validate_chosen

if TYPE_CHECKING:
    from typing import TypeAlias

    from xrl_lite.judger.config import ComposedJudgerConfig, JudgerConfig

    AnyJudgerConfig: TypeAlias = JudgerConfig | ComposedJudgerConfig

DEFAULT_TYPE = "native"

JUDGERS: Registry[type[BaseModel]] = Registry(
    "judger",
    {
        "native": "xrl_lite.judger.config:JudgerConfig",
        "composed": "xrl_lite.judger.config:ComposedJudgerConfig",
        "exact_match": "xrl_lite.judger.presets.exact_match:ExactMatchJudgerConfig",
        "gsm8k": "xrl_lite.judger.presets.gsm8k:GSM8KJudgerConfig",
        "math": "xrl_lite.judger.presets.math:MathJudgerConfig",
        "dapo_math": "xrl_lite.judger.presets.dapo_math:DapoMathJudgerConfig",
        "geo3k": "xrl_lite.judger.presets.geo3k:GEO3KJudgerConfig",
        "compass_verifier_v2": "xrl_lite.judger.presets.compass_verifier_v2:CompassVerifierV2Config",
    },
)
"""Kinds of judgers by the name in ``type``. User code adds its own with ``@JUDGERS.register("name")``."""


def _choose(given: Mapping[str, Any]) -> type[BaseModel]:
    name = given.get("type", "composed" if "branches" in given else DEFAULT_TYPE)
    if not isinstance(name, str):
        raise UnknownNameError(f"type must be the name of a judger, got {name!r}. Known: {', '.join(JUDGERS)}.")
    try:
        kind = JUDGERS.resolve(name)
    except PluginError as error:
        raise ConfigError(str(error)) from error
    if not _is_judger_settings(kind):
        raise ConfigError(f"{name!r} is not a JudgerConfig or ComposedJudgerConfig.")
    return kind


def _validate(value: Any) -> Any:
    chosen = validate_chosen(_choose, value)
    if not _is_judger_settings(type(cast("object", chosen))):
        raise ValueError(
            f"must be a judger: a JudgerConfig, a ComposedJudgerConfig, or a mapping with type: one of "
            f"{', '.join(JUDGERS)}; got {value!r}."
        )
    return chosen


def _is_judger_settings(kind: object) -> bool:
    from xrl_lite.judger.config import ComposedJudgerConfig, JudgerConfig  # the settings have fields of this type

    return isinstance(kind, type) and issubclass(kind, JudgerConfig | ComposedJudgerConfig)


def _dump(config: Any, info: SerializationInfo) -> Any:
    values = config.model_dump(
        mode=info.mode,
        exclude_unset=info.exclude_unset,
        exclude_defaults=info.exclude_defaults,
        exclude_none=info.exclude_none,
    )
    return {"type": JUDGERS.name_of(cast("type[BaseModel]", type(config))), **values}


if not TYPE_CHECKING:
    AnyJudgerConfig = Annotated[Any, BeforeValidator(_validate), PlainSerializer(_dump)]
