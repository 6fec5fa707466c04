"""A chip, a training engine and a rollout engine that write down what happens to them. Every process loads this module.

The chip computes on the CPU; ``NOTES_FILE`` names the file.
"""

from __future__ import annotations

import os
from typing import Any

from xrl_lite.engine.base import EngineRegistry
from xrl_lite.engine.language_model import LanguageModelEngine
from xrl_lite.platforms import PlatformRegistry
from xrl_lite.platforms.cpu import CpuPlatform
from xrl_lite.rollout.replica import RolloutReplicaRegistry
from xrl_lite.rollout.torch_engine import TorchReplica


def note(text: str) -> None:
    with open(os.environ["NOTES_FILE"], "a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def visible() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all")


@PlatformRegistry.register
class NotingPlatform(CpuPlatform):
    vendor_name = "noting"

    def empty_cache(self) -> None:
        note("trainer: cache emptied")


@EngineRegistry.register("language_model", "fsdp2", device="cpu", vendor="noting")
class NotingEngine(LanguageModelEngine):
    def initialize(self) -> None:
        super().initialize()
        note(f"trainer: sees {visible()}")

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        note("trainer: begins")
        done = super().train_batch(*args, **kwargs)
        note("trainer: ends")
        return done


class NotingReplica(TorchReplica):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        note(f"replica: sees {visible()}")

    async def sleep(self, level: int) -> None:
        note(f"replica: sleeps, level {level}")

    async def wake_up(self, tags: list[str]) -> None:
        note(f"replica: wakes {', '.join(tags)}")

    async def finish_weights(self) -> int:
        version = await super().finish_weights()
        note(f"replica: has weights {version}")
        return version


RolloutReplicaRegistry.register("noting", lambda: NotingReplica)
