"""Numbers by name: where they go, what they are called elsewhere, and what the machine is doing. Needs nothing else."""

from typing import TYPE_CHECKING

from xrl_lite.lazy import lazy_exports

if TYPE_CHECKING:
    from xrl_lite.metrics.health import LoopLag, actor_metrics
    from xrl_lite.metrics.loggers import LOGGERS, MetricLogger, MetricLoggers, check_loggers, open_loggers
    from xrl_lite.metrics.names import with_verl_names
    from xrl_lite.metrics.statistics import bootstrap_interval, majority_score, pass_at_k, shares

__all__ = [
    "LOGGERS",
    "LoopLag",
    "MetricLogger",
    "MetricLoggers",
    "actor_metrics",
    "bootstrap_interval",
    "check_loggers",
    "majority_score",
    "open_loggers",
    "pass_at_k",
    "shares",
    "with_verl_names",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__)
