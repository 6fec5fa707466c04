"""Training engines of which one rank fails, in a way that `EngineConfig.backend` names."""

from __future__ import annotations

import os
import threading
from typing import Any

from xrl_lite.engine.base import EngineRegistry
from xrl_lite.engine.language_model import LanguageModelEngine


@EngineRegistry.register("language_model", ["raises", "dies", "hangs"], "cpu")
class Failing(LanguageModelEngine):
    """Rank 1 fails in the backward passes of the second update, while the others wait for its gradients."""

    def forward_backward_batch(self, batch: Any, loss_function: Any, **options: Any) -> Any:
        if loss_function is not None and self._update == 1 and self.get_data_parallel_rank() == 1:
            match self._config.backend:
                case "raises":
                    raise ZeroDivisionError("rank 1 has had enough")
                case "dies":
                    os._exit(3)
                case _:
                    threading.Event().wait()
        return super().forward_backward_batch(batch, loss_function, **options)
