"""Reads a config file, YAML or Python, applies dotted overrides, and says what is wrong in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from xrl_lite.config.run_config import RunConfig
from xrl_lite.errors import ConfigError, did_you_mean
from xrl_lite.registry import load_object, load_plugins
from xrl_lite.settings import explain

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
    if not path.is_file():
        near = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
        raise ConfigError(f"There is no config file {path}.{did_you_mean(path.name, near)}")
    parsed = [_parse_override(override) for override in overrides]
    if path.suffix == ".py":
        return _load_python(path, parsed)
    if path.suffix in (".yaml", ".yml"):
        return _load_yaml(path, parsed)
    raise ConfigError(f"A config is a .yaml or a .py file, got {path}.")


def dump_config(config: RunConfig) -> str:
    """Return the config as YAML that `load_config` reads back as the same object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _load_yaml(path: Path, overrides: Sequence[tuple[list[str], Any]]) -> RunConfig:
    try:
        raw = cast("object", yaml.safe_load(path.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, got {type(raw).__name__}.")
    settings = cast("dict[str, Any]", raw)
    for keys, value in overrides:
        _set(settings, keys, value)
    return _validate(settings, where=str(path))


def _load_python(path: Path, overrides: Sequence[tuple[list[str], Any]]) -> RunConfig:
    config: object = load_object(f"{path}:{PYTHON_NAME}")
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{path}: {PYTHON_NAME} must be a RunConfig, got {type(config).__name__}.")
    for keys, value in overrides:
        config = cast("RunConfig", _replace(config, keys, value, ".".join(keys)))
    return config


def _validate(settings: Mapping[str, Any], *, where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise explain(error, RunConfig, where=where) from error


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"An override is written a.b=value, got {override!r}.")
    try:
        return key.strip().split("."), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"The value of {override!r} is not valid YAML: {error}") from error


def _set(settings: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    inner = settings
    for key in keys[:-1]:
        if inner.get(key) is None:
            inner[key] = {}
        if not isinstance(inner[key], dict):
            raise ConfigError(f"{'.'.join(keys)}: {key} holds the value {inner[key]!r}, it has no settings inside.")
        inner = cast("dict[str, Any]", inner[key])
    inner[keys[-1]] = value


def _replace(model: BaseModel, keys: Sequence[str], value: Any, path: str) -> BaseModel:
    """Return a copy of a settings object with one setting changed, validated again."""
    name, *rest = keys
    fields = type(model).model_fields
    if name not in fields:
        known = ", ".join(sorted(fields))
        raise ConfigError(f"{path}: unknown setting {name!r}.{did_you_mean(name, fields)} Known here: {known}.")
    current = getattr(model, name)
    if rest:
        if not isinstance(current, BaseModel):
            raise ConfigError(f"{path}: {name} holds the value {current!r}, it has no settings inside.")
        value = _replace(current, rest, value, path)
    try:
        return type(model).model_validate({**{field: getattr(model, field) for field in fields}, name: value})
    except ValidationError as error:
        raise explain(error, type(model), where=path) from error
