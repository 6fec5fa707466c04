"""The settings as a list for people: key, type, default, description. Made from the schema, so never out of date."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from xrl_lite.registry import load_object


@dataclass(frozen=True)
class Setting:
    """One setting."""

    key: str
    """Dotted path."""
    kind: str
    """Type, as a person writes it."""
    default: str
    """Default, or "required"."""
    description: str
    """What it does."""


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Yield every setting below a model, depth first."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner = _model_of(field.annotation) or _named_model(field)
        if inner is None:
            yield Setting(key, _kind(field.annotation), _default(field), " ".join((field.description or "").split()))
        else:
            yield from describe(inner, f"{key}.")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = [_model_of(argument) for argument in get_args(annotation) if argument is not type(None)]
    return inner[0] if len(inner) == 1 else None


def _named_model(field: FieldInfo) -> type[BaseModel] | None:
    """The class that a field names as its usual settings, where its type does not tell."""
    extra: Any = field.json_schema_extra
    return load_object(extra["settings"]) if extra else None


def _kind(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    for noise in ("typing.", "pathlib.", "xrl_lite.data.rollout_state."):
        text = text.replace(noise, "")
    return text.replace("NoneType", "null").replace("None", "null")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    return "null" if value is None else str(value)
