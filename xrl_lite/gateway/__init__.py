"""The gateway: any agent that speaks OpenAI's or Anthropic's API is sampled, and trained, token by token."""

from xrl_lite.gateway.agent_loop import BlackBoxAgentLoop, BlackBoxAgentsConfig
from xrl_lite.gateway.config import GatewayConfig
from xrl_lite.gateway.gateway import Gateway, SessionHandle
from xrl_lite.gateway.refusal import Refusal
from xrl_lite.gateway.runner import AgentRunner, BlackBoxAgentConfig
from xrl_lite.gateway.turn import SessionResult, Trajectory

__all__ = [
    "AgentRunner",
    "BlackBoxAgentConfig",
    "BlackBoxAgentLoop",
    "BlackBoxAgentsConfig",
    "Gateway",
    "GatewayConfig",
    "Refusal",
    "SessionHandle",
    "SessionResult",
    "Trajectory",
]
