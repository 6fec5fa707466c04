"""Agent loops: how an attempt at a prompt is made."""

from typing import TYPE_CHECKING

from xrl_lite.lazy import lazy_exports

if TYPE_CHECKING:
    from xrl_lite.agent_loop.agents import AGENTS, AgentLoopBase, AgentParts, AgentSettings, register
    from xrl_lite.agent_loop.base import AGENT_LOOPS, AgentLoop, AgentLoopConfig, RolloutCtl, StateJudger
    from xrl_lite.agent_loop.client import LLMClient, StateClient, TokenOutput
    from xrl_lite.agent_loop.manager import AgentLoopManager, GroupCounts, RunsGroups, create_agent_loop_manager
    from xrl_lite.agent_loop.output import AgentLoopMetrics, AgentLoopOutput
    from xrl_lite.agent_loop.producer import ProduceLimits, Producer, ProducerTask
    from xrl_lite.agent_loop.session_loop import SessionLoop
    from xrl_lite.agent_loop.sessions import AgentsConfig, SessionsAgentLoop
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
    from xrl_lite.agent_loop.tool_agent import AgentData, SingleTurnAgent, ToolAgentLoop

__all__ = [
    "AGENTS",
    "AGENT_LOOPS",
    "PRODUCE_STRATEGIES",
    "AgentData",
    "AgentLoop",
    "AgentLoopBase",
    "AgentLoopConfig",
    "AgentLoopManager",
    "AgentLoopManagerConfig",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentParts",
    "AgentSettings",
    "AgentsConfig",
    "AnyAgentLoopConfig",
    "AsyncProduceStrategyConfig",
    "GroupCounts",
    "LLMClient",
    "ProduceLimits",
    "ProduceStrategyConfig",
    "Producer",
    "ProducerTask",
    "RolloutCtl",
    "RunsGroups",
    "SessionLoop",
    "SessionsAgentLoop",
    "SingleTurnAgent",
    "SingleTurnAgentLoop",
    "SingleTurnAgentLoopConfig",
    "StateClient",
    "StateJudger",
    "SyncProduceStrategyConfig",
    "TaskSpecConfig",
    "TokenOutput",
    "ToolAgentLoop",
    "create_agent_loop_manager",
    "register",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__)
