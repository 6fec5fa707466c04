"""Running programs that nobody has read: code that a model wrote. Knows no RL; judgers and tools use it."""

from xrl_lite.sandbox.limits import SandboxLimits
from xrl_lite.sandbox.run import Ending, Sandbox, SandboxError, SandboxResult, python_command

__all__ = ["Ending", "Sandbox", "SandboxError", "SandboxLimits", "SandboxResult", "python_command"]
