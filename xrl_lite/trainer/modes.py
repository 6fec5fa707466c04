"""Trainers by the name that `trainer.mode` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from xrl_lite.errors import ConfigError
from xrl_lite.registry import Registry
from xrl_lite.replay_buffer import TrainerMode

if TYPE_CHECKING:
    from xrl_lite.trainer.base import RLTrainer

T = TypeVar("T", bound="type[RLTrainer]")

TRAINERS: Registry[type[RLTrainer]] = Registry(
    "trainer mode",
    {
        "sync": "xrl_lite.trainer.sync:SyncTrainer",
        "colocate_async": "xrl_lite.trainer.colocate_async:ColocateAsyncTrainer",
        "separate_async": "xrl_lite.trainer.separate_async:SeparateAsyncTrainer",
    },
)
"""Trainer classes by name."""


def register_trainer(name: str) -> Callable[[T], T]:
    """Return a decorator that makes a subclass of `RLTrainer` known under a name.

    Raises:
        TypeError: it is no such class.
        PluginError: the name is taken.
    """

    def decorate(trainer: T) -> T:
        TRAINERS.register(name)(_checked(trainer, TypeError))
        return trainer

    return decorate


def trainer_class(mode: str) -> type[RLTrainer]:
    """Return the class of a mode.

    Raises:
        UnknownNameError: there is none of this name.
        PluginError: it cannot be loaded.
        ConfigError: it is no `RLTrainer`.
    """
    return _checked(TRAINERS.resolve(mode), ConfigError)


def layout_of(mode: str) -> TrainerMode:
    """Return which of the built-in modes a mode is a kind of; loads nothing for these."""
    return cast("TrainerMode", mode) if mode in get_args(TrainerMode) else trainer_class(mode).layout


def _checked(trainer: Any, error: type[Exception]) -> Any:
    from xrl_lite.trainer.base import RLTrainer

    if not (isinstance(trainer, type) and issubclass(trainer, RLTrainer)):
        raise error(f"A trainer must be a subclass of xrl_lite.trainer.RLTrainer, got {trainer!r}.")
    return trainer
