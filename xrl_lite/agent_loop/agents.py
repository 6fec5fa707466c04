"""Agents in verl's style: a class with ``run``, made anew for every attempt, found by name.

::

    @register("my_agent")
    class MyAgent(AgentLoopBase):
        async def run(self, sampling_params, **row):
            tokens = self.start(row["raw_prompt"])
            output = await self.server_manager.generate(
                row["session_id"], prompt_ids=tokens.context_ids, sampling_params=sampling_params
            )
            ...
            return AgentLoopOutput.of_row(tokens.rows()[0], num_turns=2)

Tokens go in and tokens come out: never encode again what was decoded. `AgentLoopBase.start` gives a builder that keeps
to that.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import yaml

from xrl_lite.agent_loop.client import LLMClient
from xrl_lite.agent_loop.output import AgentLoopOutput
from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.token_builder import OnRewrite, TokenBuilder
from xrl_lite.data.tokenizer import Message, Tokenizer
from xrl_lite.errors import ConfigError, PluginError, RolloutError, did_you_mean
from xrl_lite.registry import Registry, load_object
from xrl_lite.tools import Toolbox, ToolParser, ToolSchema

A = TypeVar("A", bound="type[AgentLoopBase]")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What every agent of a run is told."""

    response_length: int
    """Tokens behind the prompt at most, those of tools included."""
    max_assistant_turns: int | None = None
    """Turns of the model at most; None does not limit."""
    max_user_turns: int | None = None
    """Turns of tools and users at most; None does not limit."""
    on_rewrite: OnRewrite = "fork"
    """What to do where the chat template changes earlier turns."""


@dataclass(frozen=True, kw_only=True)
class AgentParts:
    """What agents are made with. An agent's constructor gets those that it names; with ``**kwargs``, all."""

    llm_client: LLMClient
    """Generates."""
    tokenizer: Tokenizer
    """The model's tokenizer."""
    template: ChatTemplate
    """Renders what is between turns."""
    toolbox: Toolbox
    """The tools of the run."""
    parser: ToolParser
    """Finds calls in responses."""
    settings: AgentSettings
    """Limits."""

    def by_name(self) -> dict[str, Any]:
        """Return them under our names and under verl's."""
        return {
            "trainer_config": SimpleNamespace(config=self._as_verl_config()),
            "server_manager": self.llm_client,
            "tokenizer": self.tokenizer.hf,
            "processor": None,
            "dataset_cls": None,
            "data_config": None,
            "tools": SimpleNamespace(tools=list(self.toolbox.tools.values())),
            "parts": self,
        }

    def _as_verl_config(self) -> Any:
        """The paths of verl's config that agents read."""
        settings = self.settings
        multi_turn = SimpleNamespace(
            max_assistant_turns=settings.max_assistant_turns,
            max_user_turns=settings.max_user_turns,
            max_parallel_calls=self.toolbox.max_parallel_calls,
        )
        rollout = SimpleNamespace(response_length=settings.response_length, multi_turn=multi_turn)
        return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))


class AgentLoopBase(ABC):
    """One attempt of one agent. Made anew for each, so it may keep what it likes.

    Args:
        trainer_config: Paths of verl's config that agents read.
        server_manager: Generates; see `LLMClient`.
        tokenizer: The transformers tokenizer.
        processor: None; kept for agents that take one.
        dataset_cls: None; kept likewise.
        data_config: None; kept likewise.
        **kwargs: ``parts``: all of `AgentParts`; ``tools``; further keys of the agent's entry in the YAML file.
    """

    def __init__(
        self,
        trainer_config: Any = None,
        server_manager: Any = None,
        tokenizer: Any = None,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        config = trainer_config.config
        self.config = config
        self.rollout_config = config.actor_rollout_ref.rollout
        self.server_manager: LLMClient = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config
        self.parts: AgentParts = kwargs["parts"]

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run the attempt and return its trajectory, or several in order; the reward is that of the last.

        Args:
            sampling_params: temperature, top_p, top_k, repetition_penalty, as `LLMClient.generate` takes them.
            **kwargs: The row: ``raw_prompt`` (messages), ``data_source``, ``reward_model``, ``extra_info``,
                ``tools_kwargs``, ``agent_name``, ``uid``, ``index``, ``session_id``.
        """

    def start(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> TokenBuilder:
        """Return a builder for a conversation that begins with these messages.

        Raises:
            RolloutError: there are images in them.
            TemplateError: the template refuses them.
        """
        refuse_images(messages, "the prompt")
        return TokenBuilder(self.parts.template, messages, tools=tools, on_rewrite=self.parts.settings.on_rewrite)


def refuse_images(messages: Sequence[Message], where: str) -> None:
    """Raise RolloutError where messages hold anything but text: there is no engine for it yet."""
    for message in messages:
        content = message.get("content")
        for part in cast("list[Any]", content) if isinstance(content, list) else ():
            kind = cast("Mapping[str, Any]", part).get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise RolloutError(f"{where} holds a part of type {kind!r}, but the model takes text only.")


AGENTS: Registry[type[AgentLoopBase]] = Registry(
    "agent",
    {
        "single_turn_agent": "xrl_lite.agent_loop.tool_agent:SingleTurnAgent",
        "tool_agent": "xrl_lite.agent_loop.tool_agent:ToolAgentLoop",
    },
)
"""Agents by name. User code adds its own with ``@register("name")``."""


def register(name: str) -> Callable[[A], A]:
    """Return a decorator that registers an agent under a name.

    Raises:
        PluginError: another agent has the name.
    """
    return cast("Callable[[A], A]", AGENTS.register(name))


class AgentTable:
    """The agents of a run: registered ones, and those of a YAML file.

    Args:
        path: The file; None for registered ones alone.

    Raises:
        ConfigError: the file is missing or does not look as it should.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._entries = {} if path is None else read_agent_file(path)

    @property
    def names(self) -> list[str]:
        """All names."""
        return sorted({*self._entries, *AGENTS})

    def check(self, name: str) -> None:
        """Raise ConfigError where there is no agent of this name."""
        if name not in self._entries and name not in AGENTS and ":" not in name:
            raise ConfigError(
                f"Unknown agent {name!r}.{did_you_mean(name, self.names)} Known: {', '.join(self.names)}. Add one with "
                f"@register({name!r}) or as an entry of agent_loop_config_path."
            )

    def make(self, name: str, parts: AgentParts) -> AgentLoopBase:
        """Make an agent.

        Raises:
            ConfigError: there is none of this name, or its entry has a key that its constructor does not take.
            PluginError: its class cannot be loaded.
        """
        self.check(name)
        entry = self._entries.get(name)
        agent: Any = AGENTS.resolve(name) if entry is None else _load_target(entry["_target_"], name)
        own = {} if entry is None else {key: value for key, value in entry.items() if key != "_target_"}
        return agent(**_arguments(agent, name, parts.by_name(), own))


def read_agent_file(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a file of agents by name.

    ::

        - name: my_agent
          _target_: my_package.agents.MyAgent
          min_terms: 2

    Raises:
        ConfigError: there is no such file, or it does not look like this; names the entry.
    """
    file = path.expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"agent_loop_config_path: there is no file {path} (looked for {file}).")
    try:
        document: object = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"agent_loop_config_path: {path} is not YAML: {error}") from error
    if not isinstance(document, list):
        raise ConfigError(f"agent_loop_config_path: {path} must hold a list of entries with name and _target_.")
    found: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(cast("list[Any]", document)):
        where = f"agent_loop_config_path: {path}, entry {number}"
        if not isinstance(entry, Mapping) or not {"name", "_target_"} <= set(cast("Mapping[str, Any]", entry)):
            raise ConfigError(f"{where}: needs name and _target_, got {entry!r}.")
        values = dict(cast("Mapping[str, Any]", entry))
        name = str(values.pop("name"))
        if name in found:
            raise ConfigError(f"{where}: the name {name!r} is taken by an earlier entry.")
        found[name] = values
    return found


def _load_target(target: str, name: str) -> Any:
    try:
        return load_object(target)
    except PluginError as error:
        raise PluginError(f"agent {name!r}: {error}") from error


def _arguments(agent: Any, name: str, parts: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Choose what a constructor is called with: parts it names, and its own settings, all of which it must take."""
    parameters, takes_any = _parameters_of(agent)
    for key in own:
        if key not in parameters and not takes_any:
            raise ConfigError(f"agent {name!r} has no setting {key!r}.{did_you_mean(key, parameters)}")
    injected = parts if takes_any else {key: value for key, value in parts.items() if key in parameters}
    return {**injected, **own}


@lru_cache
def _parameters_of(agent: Any) -> tuple[frozenset[str], bool]:
    """Return what a constructor takes by name, and whether it takes anything; looked up once, made for each attempt."""
    parameters = inspect.signature(agent).parameters
    return frozenset(parameters), any(each.kind is each.VAR_KEYWORD for each in parameters.values())
