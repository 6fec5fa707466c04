"""Agent loops: how an attempt at a prompt is made."""

from xrl_lite.agent_loop.agents import AGENTS, AgentLoopBase, AgentParts, AgentSettings, register
from xrl_lite.agent_loop.base import AGENT_LOOPS, AgentLoop, AgentLoopConfig, RolloutCtl, StateJudger
from xrl_lite.agent_loop.client import LLMClient, StateClient, TokenOutput
from xrl_lite.agent_loop.manager import AgentLoopManager, AnyAgentLoopConfig, ProduceLimits, TaskSpecConfig
from xrl_lite.agent_loop.output import AgentLoopMetrics, AgentLoopOutput
from xrl_lite.agent_loop.sessions import AgentsConfig, SessionsAgentLoop
from xrl_lite.agent_loop.single_turn import SingleTurnAgentLoop, SingleTurnAgentLoopConfig
from xrl_lite.agent_loop.tool_agent import AgentData, SingleTurnAgent, ToolAgentLoop

__all__ = [
    "AGENTS",
    "AGENT_LOOPS",
    "AgentData",
    "AgentLoop",
    "AgentLoopBase",
    "AgentLoopConfig",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentParts",
    "AgentSettings",
    "AgentsConfig",
    "AnyAgentLoopConfig",
    "LLMClient",
    "ProduceLimits",
    "RolloutCtl",
    "SessionsAgentLoop",
    "SingleTurnAgent",
    "SingleTurnAgentLoop",
    "SingleTurnAgentLoopConfig",
    "StateClient",
    "StateJudger",
    "TaskSpecConfig",
    "TokenOutput",
    "ToolAgentLoop",
    "register",
]
