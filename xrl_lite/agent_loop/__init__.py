"""Agent loops: how an attempt at a prompt is made."""

from xrl_lite.agent_loop.base import AGENT_LOOPS, AgentLoop, AgentLoopConfig, RolloutCtl, StateJudger
from xrl_lite.agent_loop.manager import AgentLoopManager, GroupCounts, RunsGroups, create_agent_loop_manager
from xrl_lite.agent_loop.producer import ProduceLimits, Producer, ProducerTask
from xrl_lite.agent_loop.single_turn import SingleTurnAgentLoop, SingleTurnAgentLoopConfig
from xrl_lite.agent_loop.strategy import (
    PRODUCE_STRATEGIES,
    AgentLoopManagerConfig,
    AnyAgentLoopConfig,
    AsyncProduceStrategyConfig,
    ProduceStrategyConfig,
    SyncProduceStrategyConfig,
    TaskSpecConfig,
)

__all__ = [
    "AGENT_LOOPS",
    "PRODUCE_STRATEGIES",
    "AgentLoop",
    "AgentLoopConfig",
    "AgentLoopManager",
    "AgentLoopManagerConfig",
    "AnyAgentLoopConfig",
    "AsyncProduceStrategyConfig",
    "GroupCounts",
    "ProduceLimits",
    "ProduceStrategyConfig",
    "Producer",
    "ProducerTask",
    "RolloutCtl",
    "RunsGroups",
    "SingleTurnAgentLoop",
    "SingleTurnAgentLoopConfig",
    "StateJudger",
    "SyncProduceStrategyConfig",
    "TaskSpecConfig",
    "create_agent_loop_manager",
]
