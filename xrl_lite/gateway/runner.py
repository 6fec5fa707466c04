"""What runs an agent that is not ours: an async function that is given a session, or a program."""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

from pydantic import Field, model_validator

from xrl_lite.data.tokenizer import Message
from xrl_lite.errors import ConfigError, RolloutError
from xrl_lite.gateway.gateway import SessionHandle
from xrl_lite.gateway.program import ProgramHosts, ProgramSpec
from xrl_lite.judger.adapters import prompt_text
from xrl_lite.registry import load_object
from xrl_lite.settings import Settings, UserPath

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem


class AgentRunner(Protocol):
    """Lets an agent work on one sample, and returns when it is done.

    It gets those of these arguments that it names; with ``**kwargs`` all:

    - ``session`` (`SessionHandle`): URLs, key and model name;
    - ``raw_prompt``: the messages of the row;
    - ``sample_index``: which attempt at the prompt this is;
    - ``tools_kwargs``: of the row;
    - ``row``: the whole row, as agents in verl's style get it.

    It returns nothing, a number as reward, or what is added to the ``reward_info`` of the session.
    """

    async def __call__(self, session: SessionHandle, **kwargs: Any) -> Any:
        """Run the agent."""
        ...


class BlackBoxAgentConfig(Settings):
    """An agent that is not ours. Give `runner` or `command`."""

    runner: str | None = None
    """Path of an async function, or of a class whose instances are called: "package.module:name" or "file.py:name"."""

    runner_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments of the function, or those of the class."""

    command: list[str] | None = None
    """Program and its arguments, started once a sample. URL and key are in OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY."""

    prompt: Literal["stdin", "argument"] = "stdin"
    """How a program gets the prompt as text: on its standard input, or as last argument behind "--". The whole task is
    in the JSON file that XRL_LITE_TASK_FILE names."""

    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Environment variables of a program, on top of those of the run."""

    cwd: UserPath | None = None
    """Folder a program runs in; a new one for each sample, gone afterwards, when not given."""

    log_dir: UserPath | None = None
    """Folder for what programs write, a file a sample; only the last lines of failed ones are kept when not given."""

    wall_time_s: float = Field(default=600.0, gt=0)
    """Limit for one sample; beyond it the agent is ended and the attempt FAILED."""

    max_concurrent: int = Field(default=8, gt=0)
    """Samples at once, in all processes of the loop together; for programs also the number of processes that start
    them."""

    num_cpus: float = Field(default=0.1, gt=0)
    """CPU slots of one program."""

    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory of one program and what it starts; beyond it the program is ended."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.runner is None) == (self.command is None):
            raise ValueError("give exactly one of runner (an async function) and command (a program).")
        if self.command is not None and not self.command:
            raise ValueError("command is empty: give a program and its arguments.")
        if self.command is not None and self.runner_kwargs:
            raise ValueError("runner_kwargs are for a runner; put arguments of a program into command.")
        return self

    def check(self, name: str) -> None:
        """Check that the agent can be started.

        Raises:
            ConfigError: the program is not there, or the runner is not async.
            PluginError: the runner cannot be loaded.
        """
        if self.runner is not None:
            load_runner(self, name)
        elif self.command is not None and shutil.which(self.command[0], path=self.env.get("PATH")) is None:
            raise ConfigError(f"agent {name!r}: there is no program {self.command[0]!r} (looked for it on PATH).")


def load_runner(config: BlackBoxAgentConfig, name: str) -> AgentRunner:
    """Return the function of an agent.

    Raises:
        ConfigError: it is not async, or does not take what the settings give it.
        PluginError: it cannot be loaded.
    """
    assert config.runner is not None, "asked for agents that have one"
    loaded: Any = load_object(config.runner)
    kwargs = config.runner_kwargs
    if inspect.isclass(loaded):
        try:
            loaded, kwargs = cast("Any", loaded)(**config.runner_kwargs), {}
        except TypeError as error:
            raise ConfigError(f"agent {name!r}: {config.runner} cannot be made: {error}") from error
    function = loaded if inspect.isroutine(loaded) else type(loaded).__call__
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"agent {name!r}: {config.runner} is not async. Write `async def`; or start a program, which may block, "
            f"with command."
        )
    parameters = inspect.signature(loaded).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return _Bound(loaded, None, kwargs)
    unknown = [key for key in kwargs if key not in parameters]
    if unknown:
        raise ConfigError(f"agent {name!r}: {config.runner} has no argument {unknown[0]!r}.")
    return _Bound(loaded, frozenset(parameters), kwargs)


class _Bound:
    """A runner that is given what it names, and its own arguments.

    Args:
        function: The runner.
        names: Its parameters; None for any.
        own: Arguments out of the settings.
    """

    def __init__(self, function: Any, names: frozenset[str] | None, own: Mapping[str, Any]) -> None:
        self._function = function
        self._names = names
        self._own = own

    async def __call__(self, session: SessionHandle, **kwargs: Any) -> Any:
        given = {"session": session, **kwargs}
        if self._names is not None:
            given = {name: value for name, value in given.items() if name in self._names}
        return await self._function(**given, **self._own)


class ProgramRunner:
    """Starts a program for every sample.

    Args:
        config: Which, and its limits.
        name: Of the agent, for messages.
        system: Where the processes are that start the programs; the default system when not given.

    Raises:
        ResourceError: there are not enough CPU slots.
    """

    def __init__(self, config: BlackBoxAgentConfig, name: str, *, system: ActorSystem | None = None) -> None:
        assert config.command is not None, "made for agents that have one"
        self._command = config.command
        self._config = config
        self._name = name
        self._hosts = ProgramHosts(
            name,
            count=config.max_concurrent,
            num_cpus=config.num_cpus,
            memory_bytes=config.memory_bytes,
            system=system,
        )

    async def __call__(
        self,
        session: SessionHandle,
        *,
        raw_prompt: list[Message],
        sample_index: int,
        tools_kwargs: Mapping[str, Any] | None,
        row: Mapping[str, Any],
        **_: Any,
    ) -> Any:
        """Run the program, and return what it wrote into the file of its reward.

        Raises:
            RolloutError: it did not end with exit code 0 in time; tells its last lines.
        """
        config = self._config
        text = prompt_text(raw_prompt)
        command = [*self._command, "--", text] if config.prompt == "argument" else self._command
        task = {
            "session_id": session.session_id,
            "raw_prompt": raw_prompt,
            "sample_index": sample_index,
            "tools_kwargs": tools_kwargs,
            "extra_info": row.get("extra_info"),
            "data_source": row.get("data_source"),
            "reward_model": row.get("reward_model"),
        }
        spec = ProgramSpec(
            command=command,
            stdin=text if config.prompt == "stdin" else "",
            env={**config.env, **session.environment()},
            cwd=None if config.cwd is None else str(config.cwd),
            log_file=None if config.log_dir is None else str(_log_file(config.log_dir, self._name, session)),
            task=task,
            wall_time_s=config.wall_time_s,
        )
        result = await self._hosts.run(spec)
        if result.problem is not None:
            raise RolloutError(f"program {self._command[0]!r} {result.problem}")
        return result.reward

    async def aclose(self) -> None:
        """End the processes, and with them the programs."""
        await self._hosts.aclose()


def read_reward(info: Mapping[str, Any]) -> float | None:
    """Return the reward out of what an agent said about it; None where it said none.

    Raises:
        RolloutError: it is no finite number.
    """
    reward = info.get("reward")
    if reward is None:
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RolloutError(f"the agent's reward must be a finite number, got {reward!r}.")
    return float(reward)


def as_reward_info(returned: Any) -> dict[str, Any]:
    """Return what a runner returned as entries of ``reward_info``.

    Raises:
        RolloutError: it is neither nothing, nor a number, nor a mapping.
    """
    if returned is None:
        return {}
    if isinstance(returned, int | float):
        return {"reward": returned}
    if isinstance(returned, Mapping):
        return {str(key): value for key, value in cast("Mapping[Any, Any]", returned).items()}
    raise RolloutError(f"an agent may return nothing, a number or a mapping, got {returned!r:.200}.")


def _log_file(folder: Path, agent: str, session: SessionHandle) -> Path:
    return folder.resolve() / agent / f"{session.session_id}.log"
