"""Optimizers and schedules are those of torch and transformers, by their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import get_scheduler

from xrl_lite.engine.config import OptimizerConfig
from xrl_lite.engine.optimizers import learning_rate_factors, make_optimizer
from xrl_lite.errors import ConfigError


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("settings", "cls", "holds"),
    [
        ({}, torch.optim.AdamW, {"betas": (0.9, 0.999), "weight_decay": 0.0, "fused": True}),
        ({"type": "SGD", "options": {"momentum": 0.9}}, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.0}),
        ({"type": "torch.optim:Adafactor", "weight_decay": 0.1}, torch.optim.Adafactor, {"weight_decay": 0.1}),
    ],
)
def test_an_optimizer_is_a_class_of_torch_or_a_path(settings: dict[str, Any], cls: type, holds: dict[str, Any]) -> None:
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.5, **settings), parameters())
    assert type(optimizer) is cls
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in ("lr", *holds)} == {"lr": 0.5, **holds}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"type": "AdmW"}, "torch.optim has no 'AdmW'. Did you mean 'AdamW'?"),
        ({"type": "SGD", "options": {"momentun": 0.9}}, r"type=SGD with optimizer.options=\{'momentun': 0.9\}"),
    ],
)
def test_what_is_no_optimizer_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_optimizer(OptimizerConfig(**settings), parameters())


def test_own_schedules_go_from_the_peak_to_the_rest() -> None:
    factor = learning_rate_factors(OptimizerConfig(schedule="linear", warmup_steps=2, final_fraction=0.5), 10)
    assert [factor(update) for update in (0, 1, 2, 6, 10, 99)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "options"),
    [("cosine_with_restarts", {"num_cycles": 2}), ("inverse_sqrt", {}), ("cosine_with_min_lr", {"min_lr": 0.01})],
)
def test_other_schedules_are_those_of_transformers(name: Any, options: dict[str, Any]) -> None:
    config = OptimizerConfig(learning_rate=0.5, schedule=name, schedule_options=options, warmup_steps=3)
    factor = learning_rate_factors(config, 20)
    optimizer = torch.optim.SGD(parameters(), lr=0.5)
    scheduler = get_scheduler(name, optimizer, 3, 20, scheduler_specific_kwargs=options)
    for update in range(20):
        assert 0.5 * factor(update) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()


def test_options_that_a_schedule_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule=polynomial with optimizer.schedule_options=\{'cycles': 2\}"):
        learning_rate_factors(OptimizerConfig(schedule="polynomial", schedule_options={"cycles": 2}), 10)
    with pytest.raises(ValidationError, match="takes no schedule_options"):
        OptimizerConfig(schedule="cosine", schedule_options={"num_cycles": 2})
