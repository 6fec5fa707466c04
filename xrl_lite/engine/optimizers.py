# pyright: basic
"""The optimizer that the settings name, and the learning rate at each update."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from xrl_lite.engine.config import OWN_SCHEDULES, OptimizerConfig
from xrl_lite.errors import ConfigError, did_you_mean
from xrl_lite.registry import load_object


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of these parameters.

    Raises:
        ConfigError: there is no such class, or it does not take the options.
    """
    cls = _class_of(config.type)
    known = inspect.signature(cls).parameters
    offered: dict[str, Any] = {"betas": config.betas, "weight_decay": config.weight_decay}
    if config.type in ("Adam", "AdamW"):
        offered["fused"] = True  # one kernel for all weights
    given = {name: value for name, value in offered.items() if name in known}
    try:
        return cls(list(parameters), lr=config.learning_rate, **{**given, **config.options})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.type={config.type} with optimizer.options={config.options}: {error}") from error


def hyperparameters_of(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return what the settings decide in each group of a new optimizer; its class may have given them other values."""
    decided = ("lr", "betas", "weight_decay", *config.options)
    return [{name: group[name] for name in decided if name in group} for group in optimizer.param_groups]


def _class_of(name: str) -> Any:
    if ":" in name or "." in name:
        return load_object(name)
    classes = [each for each, found in vars(torch.optim).items() if isinstance(found, type)]
    if name not in classes or name == "Optimizer":
        raise ConfigError(f"optimizer.type: torch.optim has no {name!r}.{did_you_mean(name, classes)} Or give a path.")
    return getattr(torch.optim, name)


def learning_rate_factors(config: OptimizerConfig, num_updates: int) -> Callable[[int], float]:
    """Return the share of the peak learning rate as a function of the update, counted from 0.

    Raises:
        ConfigError: the schedule does not take the options.
    """
    if config.schedule in OWN_SCHEDULES:
        return lambda update: _own_factor(update, num_updates, config)
    from transformers import get_scheduler

    stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    try:
        scheduler: Any = get_scheduler(
            config.schedule,
            stand_in,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=num_updates,
            scheduler_specific_kwargs=config.schedule_options,
        )
    except (TypeError, ValueError) as error:
        given = f"optimizer.schedule={config.schedule} with optimizer.schedule_options={config.schedule_options}"
        raise ConfigError(f"{given}: {error}") from error
    return scheduler.lr_lambdas[0]


def _own_factor(update: int, num_updates: int, config: OptimizerConfig) -> float:
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min((update - config.warmup_steps) / max(num_updates - config.warmup_steps, 1), 1.0)
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.final_fraction + (1 - config.final_fraction) * share
