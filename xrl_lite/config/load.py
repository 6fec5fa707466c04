"""Reads a config file, YAML or Python, applies dotted overrides, and says what is wrong in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isabstract
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from xrl_lite.config.run_config import RunConfig
from xrl_lite.errors import ConfigError, PluginError, did_you_mean
from xrl_lite.judger import JUDGERS, AnyJudgerConfig, JudgerConfigLike
from xrl_lite.registry import load_file, load_object, load_plugins
from xrl_lite.settings import Settings, explain, given_in, models_in

PYTHON_NAME = "config"
"""What a Python config file calls its `RunConfig`."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config.

    Args:
        path: A .yaml file, or a .py file that defines ``config = RunConfig(...)``.
        overrides: ``a.b=value`` each; the value is read as YAML.

    Raises:
        ConfigError: the file is missing or broken, or settings cannot be used; all of them are listed.
    """
    load_plugins()
    _check_exists(path)
    parsed = [parse_override(override) for override in overrides]
    if path.suffix == ".py":
        return _load_python(path, parsed)
    if path.suffix in (".yaml", ".yml"):
        return _load_yaml(path, parsed)
    raise ConfigError(f"A config is a .yaml or a .py file, got {path}.")


def load_judger(spec: str, overrides: Sequence[str] = ()) -> JudgerConfigLike:
    """Return the settings of a judger.

    Args:
        spec: A .yaml file with settings of a judger, or of a run; the name of a kind (gsm8k); or reward code
            (``package.module:name``, ``file.py:name``, a URL).
        overrides: ``a.b=value`` each, inside the settings of the judger.

    Raises:
        ConfigError: there is no such thing, or settings cannot be used; all of them are listed.
    """
    load_plugins()
    if spec.endswith((".yaml", ".yml")):
        settings = _judger_settings(read_yaml(Path(spec)), spec)
    elif spec in JUDGERS:
        settings = {"type": spec}
    elif ":" in spec:
        settings = {"judger_name": "score", "reward_handler": spec}
    else:
        raise ConfigError(
            f"There is no judger {spec!r}.{did_you_mean(spec, JUDGERS)} Give one of {', '.join(JUDGERS)}; a .yaml "
            f"file; or reward code as file.py:name, package.module:name or a URL."
        )
    return _read_judger(settings, overrides, where=spec)


def change_judger(config: JudgerConfigLike, overrides: Sequence[str]) -> JudgerConfigLike:
    """Return the settings of a judger with some of them changed.

    Args:
        config: The settings.
        overrides: As in `load_judger`.

    Raises:
        ConfigError: settings cannot be used; all of them are listed.
    """
    settings = _JudgerAlone(judger=config).model_dump(mode="json", exclude_unset=True)["judger"]
    return _read_judger(settings, overrides, where=f"judger {config.judger_name!r}")


def _read_judger(settings: dict[str, Any], overrides: Sequence[str], *, where: str) -> JudgerConfigLike:
    for override in overrides:
        set_value(settings, *parse_override(override))
    try:
        return _JudgerAlone.model_validate({"judger": settings}).judger
    except ValidationError as error:
        raise explain(error, _JudgerAlone, where=where) from error


def dump_config(config: RunConfig) -> str:
    """Return the config as YAML that `load_config` reads back as the same object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _JudgerAlone(Settings):
    judger: AnyJudgerConfig
    """The judger."""


def _judger_settings(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Look for the judger in the settings of a run, of a task, or of the judger itself."""
    for name in ("task", "judger_config"):
        inner = settings.get(name, settings)
        if not isinstance(inner, dict):
            raise ConfigError(f"{where}: {name} must hold settings, got {inner!r:.100}.")
        settings = cast("dict[str, Any]", inner)
    if "sampler_config" in settings:
        raise ConfigError(f"{where} names no judger. Give one by --judger, or none to go by the data sources.")
    return settings


def _load_yaml(path: Path, overrides: Sequence[tuple[list[str], Any]]) -> RunConfig:
    settings = read_yaml(path)
    for keys, value in overrides:
        set_value(settings, keys, value)
    return _validate(settings, where=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings in a file.

    Raises:
        ConfigError: it is missing, broken, or holds no mapping.
    """
    _check_exists(path)
    try:
        raw = cast("object", yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, got {type(raw).__name__}.")
    return cast("dict[str, Any]", raw)


def _check_exists(path: Path) -> None:
    if not path.is_file():
        near = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
        raise ConfigError(f"There is no config file {path}.{did_you_mean(path.name, near)}")


def _load_python(path: Path, overrides: Sequence[tuple[list[str], Any]]) -> RunConfig:
    import cloudpickle  # a YAML config does without

    try:
        config: object = load_object(f"{path}:{PYTHON_NAME}")
        # what is defined in it goes to other processes as it is, which would have to run the file to know it by name
        cloudpickle.register_pickle_by_value(load_file(path))  # pyright: ignore[reportUnknownMemberType]
    except PluginError as error:
        if isinstance(error.__cause__, ValidationError):
            raise explain(error.__cause__, RunConfig, where=str(path)) from error
        raise ConfigError(str(error)) from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{path}: {PYTHON_NAME} must be a RunConfig, got {type(config).__name__}.")
    if not overrides:
        return config
    opened: Any = config
    for keys, value in overrides:
        opened = _replaced(opened, keys, value, ".".join(keys))
    return _validate(opened, where=str(path))


def _validate(settings: Mapping[str, Any], *, where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise explain(error, RunConfig, where=where) from error


def parse_override(override: str) -> tuple[list[str], Any]:
    """Return the path and the value of an override.

    Raises:
        ConfigError: it is none.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"An override is written a.b=value, got {override!r}.")
    try:
        return key.strip().split("."), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"The value of {override!r} is not valid YAML: {error}") from error


def set_value(settings: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Change one setting; those above it are made where they are missing.

    Raises:
        ConfigError: one above it holds a value.
    """
    inner = settings
    for key in keys[:-1]:
        if inner.get(key) is None:
            inner[key] = {}
        if not isinstance(inner[key], dict):
            raise ConfigError(f"{'.'.join(keys)}: {key} holds the value {inner[key]!r}, it has no settings inside.")
        inner = cast("dict[str, Any]", inner[key])
    inner[keys[-1]] = value


def _replaced(value: Any, keys: Sequence[str], new: Any, path: str) -> Any:
    """Return a copy of settings in which one is changed.

    Settings on the way to it are opened to mappings, so that everything is validated together afterwards.
    """
    if not keys:
        return new
    name, *rest = keys
    if isinstance(value, BaseModel):
        _check_known(name, type(value).model_fields, path)
        opened = given_in(value)
        # an object of a class that was chosen by name must be found again under that name
        opened["type"] = f"{type(value).__module__}:{type(value).__qualname__}"
        if isinstance(value, RunConfig) or type(value) in _fixed_classes():
            del opened["type"]
    elif value is None or isinstance(value, Mapping):
        opened = dict(cast("Mapping[str, Any]", value or {}))
    else:
        raise ConfigError(f"{path}: the setting above {name} holds the value {value!r}, it has no settings inside.")
    return {**opened, name: _replaced(opened.get(name), rest, new, path)}


def _check_known(name: str, known: Mapping[str, Any], path: str) -> None:
    if name not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"{path}: unknown setting {name!r}.{did_you_mean(name, known)} Known here: {names}.")


def _fixed_classes() -> set[type[BaseModel]]:
    """Classes of settings that stand in the tree as themselves, not as one choice of several."""
    found: set[type[BaseModel]] = set()
    frontier: list[type[BaseModel]] = [RunConfig]
    while frontier:
        model = frontier.pop()
        inner = [cls for field in model.model_fields.values() for cls in models_in(field.annotation)]
        frontier += [cls for cls in inner if cls not in found and not isabstract(cls)]
        found.update(cls for cls in inner if not isabstract(cls))
    return found
