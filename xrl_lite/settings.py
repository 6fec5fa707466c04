"""What every settings model has in common, and errors about settings that a person can act on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from xrl_lite.errors import ConfigError, PluginError, did_you_mean

NESTED = "nested_settings"
"""Type of the pydantic error that carries the errors of a model chosen by name while validating."""


UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
"""A path in which ``~`` is the home folder."""


class Settings(BaseModel):
    """Settings are read once, checked once and never changed: unknown keys fail, fields are frozen."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        defer_build=True,  # the tree is built once, when a config is read, not once per class on import
    )

    filled_in: ClassVar[frozenset[str]] = frozenset()
    """Fields that the class derives from others where they are not given."""


def given_in(settings: BaseModel) -> dict[str, Any]:
    """Return the fields that somebody chose: those that were set, and those changed in place since."""
    filled_in = settings.filled_in if isinstance(settings, Settings) else frozenset[str]()
    return {
        name: value
        for name, field in type(settings).model_fields.items()
        for value in [getattr(settings, name)]
        if name in settings.model_fields_set
        or (
            name not in filled_in
            and value != field.get_default(call_default_factory=True, validated_data=vars(settings))
        )
    }


def chosen_by_type(
    choose: Callable[[str], type[BaseModel]],
    name_of: Callable[[type[BaseModel]], str],
    *,
    default: str | Callable[[Mapping[str, Any]], str],
) -> tuple[BeforeValidator, PlainSerializer]:
    """Return annotations for a field whose class is named by ``type`` inside its value.

    A mapping becomes the class that `choose` finds for its `type`; an object passes through. Dumps name the class in
    `type`, so that they load again as the same object.

    Args:
        choose: Finds the class of a name, or raises ConfigError or PluginError.
        name_of: Finds the name of a class.
        default: Name where there is no `type`, or what finds it by the other keys.
    """

    def validate(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        mapping = cast("Mapping[str, Any]", value)
        name = mapping.get("type", default if isinstance(default, str) else default(mapping))
        return _validate_as(partial(choose, str(name)), mapping)

    def serialize(value: BaseModel | None, info: SerializationInfo) -> dict[str, Any] | None:
        if value is None:
            return None
        values = value.model_dump(
            mode=info.mode,
            exclude_unset=info.exclude_unset,
            exclude_defaults=info.exclude_defaults,
            exclude_none=info.exclude_none,
        )
        return {"type": name_of(type(value)), **values}

    return BeforeValidator(validate), PlainSerializer(serialize)


def _validate_as(choose: Callable[[], type[BaseModel]], mapping: Mapping[str, Any]) -> BaseModel:
    """Validate a mapping as the model that `choose` finds; errors keep the path of each key."""
    try:
        model = choose()
    except (ConfigError, PluginError) as error:
        raise PydanticCustomError("config_error", "{reason}", {"reason": str(error)}) from error
    try:
        return model.model_validate({key: item for key, item in mapping.items() if key != "type"})
    except ValidationError as error:
        raise PydanticCustomError(
            NESTED, "{count} errors", {"count": error.error_count(), "errors": error.errors(), "model": model}
        ) from error


def explain(error: ValidationError, model: type[BaseModel], *, where: str = "") -> ConfigError:
    """Turn pydantic's report into sentences: the path of the key, what was given, what is allowed, the closest name."""
    lines = [f"  {line}" for line in _explain_all(error.errors(), model, ())]
    head = f"{where or model.__name__} has {len(lines)} setting{'s' if len(lines) > 1 else ''} that cannot be used:"
    return ConfigError("\n".join([head, *lines]))


def _explain_all(errors: list[ErrorDetails], model: type[BaseModel], prefix: tuple[int | str, ...]) -> Iterator[str]:
    for detail in errors:
        location = prefix + tuple(part for part in detail["loc"] if not _is_branch_label(part))
        context = detail.get("ctx", {})
        if detail["type"] == NESTED:
            yield from _explain_all(context["errors"], context["model"], location)
        else:
            yield _explain_one(detail, model, location, len(prefix))


def _explain_one(detail: ErrorDetails, model: type[BaseModel], location: tuple[int | str, ...], skip: int) -> str:
    path = ".".join(str(part) for part in location) or "(top level)"
    if detail["type"] == "extra_forbidden":
        owner = _model_at(model, location[skip:-1])
        known = sorted(owner.model_fields) if owner else []
        name = str(location[-1])
        allowed = f" Known here: {', '.join(known)}." if known else ""
        return f"{path}: unknown setting.{did_you_mean(name, known)}{allowed}"
    if detail["type"] == "missing":
        return f"{path}: required, but not given."
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] in ("value_error", "config_error"):
        return f"{path}: {message}"
    given = repr(detail["input"])
    return f"{path}: {message[0].lower()}{message[1:]}; got {given if len(given) < 120 else given[:117] + '...'}."


def _is_branch_label(part: int | str) -> bool:
    # pydantic puts the member of a union or the validator into the location: "function-before[...]", "ModelConfig"
    return isinstance(part, str) and (part.startswith("function-") or part.endswith(("]", "Config")))


def _model_at(model: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The model whose fields stand at a path; keys of dicts and positions of lists are stepped over."""
    current: type[BaseModel] | None = model
    for part in path:
        field = current.model_fields.get(str(part)) if current else None
        if field is not None:
            current = next(models_in(field.annotation), None)
    return current


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings classes that a field's type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)
