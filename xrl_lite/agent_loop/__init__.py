"""Agent loops: how an attempt at a prompt is made."""

from xrl_lite.agent_loop.base import AGENT_LOOPS, AgentLoop, AgentLoopConfig, RolloutCtl, StateJudger
from xrl_lite.agent_loop.manager import AgentLoopManager, AnyAgentLoopConfig, ProduceLimits, TaskSpecConfig
from xrl_lite.agent_loop.single_turn import SingleTurnAgentLoop, SingleTurnAgentLoopConfig

__all__ = [
    "AGENT_LOOPS",
    "AgentLoop",
    "AgentLoopConfig",
    "AgentLoopManager",
    "AnyAgentLoopConfig",
    "ProduceLimits",
    "RolloutCtl",
    "SingleTurnAgentLoop",
    "SingleTurnAgentLoopConfig",
    "StateJudger",
    "TaskSpecConfig",
]
