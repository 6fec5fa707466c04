"""Judger settings inside other settings: an instance, or a mapping whose ``type`` names the kind of judger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import AfterValidator, BaseModel

from xrl_lite.errors import ConfigError
from xrl_lite.registry import Registry
from xrl_lite.settings import chosen_by_type

if TYPE_CHECKING:
    from typing import TypeAlias

    from xrl_lite.judger.config import ComposedJudgerConfig, JudgerConfig

    AnyJudgerConfig: TypeAlias = JudgerConfig | ComposedJudgerConfig

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
        "code": "xrl_lite.judger.presets.code:CodeJudgerConfig",
        "search_qa": "xrl_lite.judger.presets.search_qa:SearchQAJudgerConfig",
        "verl": "xrl_lite.judger.presets.verl:VerlJudgerConfig",
        "llm_judge": "xrl_lite.judger.presets.llm_judge:LlmJudgerConfig",
        "reward_model": "xrl_lite.judger.presets.reward_model:RewardModelJudgerConfig",
        "reward_model_http": "xrl_lite.judger.presets.reward_model:ClassifyJudgerConfig",
        "compass_verifier_v2": "xrl_lite.judger.presets.compass_verifier_v2:CompassVerifierV2Config",
    },
)
"""Kinds of judgers by the name in ``type``. User code adds its own with ``@JUDGERS.register("name")``."""


def _choose(name: str) -> type[BaseModel]:
    kind = JUDGERS.resolve(name)
    if not _is_judger_settings(kind):
        raise ConfigError(f"{name!r} is not a JudgerConfig or ComposedJudgerConfig.")
    return kind


def _default_type(mapping: Mapping[str, Any]) -> str:
    return "composed" if "branches" in mapping else "native"


def _must_be_judger(value: Any) -> Any:
    if not _is_judger_settings(type(cast("object", value))):
        raise ValueError(
            f"must be a judger: a JudgerConfig, a ComposedJudgerConfig, or a mapping with type: one of "
            f"{', '.join(JUDGERS)}; got {value!r}."
        )
    return value


def _is_judger_settings(kind: object) -> bool:
    from xrl_lite.judger.config import ComposedJudgerConfig, JudgerConfig  # the settings have fields of this type

    return isinstance(kind, type) and issubclass(kind, JudgerConfig | ComposedJudgerConfig)


if not TYPE_CHECKING:
    AnyJudgerConfig = Annotated[
        Any,
        *chosen_by_type(_choose, JUDGERS.name_of, default=_default_type),
        AfterValidator(_must_be_judger),
    ]
