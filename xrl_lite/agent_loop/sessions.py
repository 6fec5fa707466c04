"""Agents of the run's own processes: classes in verl's style, found by name, with the tools of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio
from pydantic import Field, model_validator

from xrl_lite.agent_loop.agents import AgentParts, AgentSettings, AgentTable
from xrl_lite.agent_loop.base import AgentLoopConfig, RolloutCtl, StateJudger, part_of
from xrl_lite.agent_loop.client import StateClient
from xrl_lite.agent_loop.output import AgentLoopOutput
from xrl_lite.agent_loop.session_loop import ENDS_THE_RUN, SessionLoop, row_of, tokenizer_of
from xrl_lite.agent_loop.tool_agent import RowTools
from xrl_lite.data import EncodeRow, RolloutState, Row, SampleParams
from xrl_lite.data.token_builder import OnRewrite
from xrl_lite.data.tokenizer import read_template
from xrl_lite.errors import ConfigError, did_you_mean
from xrl_lite.settings import UserPath
from xrl_lite.tools import Toolbox, ToolParser, ToolsConfig, load_tools, read_tools

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem
    from xrl_lite.data.chat_template import ChatTemplate
    from xrl_lite.data.tokenizer import Tokenizer
    from xrl_lite.tools.schema import ToolSchema


class AgentsConfig(AgentLoopConfig):
    """Settings of agents: which, with which tools, within which limits."""

    agent_loop_config_path: UserPath | None = None
    """YAML file of agents: a list of entries with name, `_target_` and settings of the agent."""

    default_agent_loop: str = "tool_agent"
    """Agent of rows that name none: tool_agent, single_turn_agent, or one of yours."""

    tools: ToolsConfig = ToolsConfig()
    """Tools and the format they are called in."""

    response_length: int | None = Field(default=None, gt=0)
    """Tokens behind the prompt at most, those of tools included; `sample_params.max_tokens` when not given."""

    max_assistant_turns: int | None = Field(default=None, gt=0)
    """Turns of the model at most."""

    max_user_turns: int | None = Field(default=None, gt=0)
    """Turns of tools and users at most."""

    on_rewrite: OnRewrite = "fork"
    """Where the chat template changes earlier turns (reasoning that is dropped): fork into a second trajectory, refuse
    to start, or keep the turns as they were sampled."""

    chat_template: UserPath | None = None
    """Jinja file that takes the place of the model's own chat template, for example one that knows tools."""

    template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the chat template, for example {enable_thinking: false}."""

    end_token_ids: list[int] = Field(default_factory=list[int])
    """Tokens that end a turn, where neither tokenizer nor template tell."""

    max_concurrent_sessions: int | None = Field(default=None, gt=0)
    """Sessions at once, of all processes together; those beyond wait."""

    session_timeout_s: float | None = Field(default=None, gt=0)
    """Limit for one session, judging not included; beyond it the attempt is FAILED."""

    max_initial_failures: int = Field(default=32, ge=0)
    """Stop the run when so many attempts raise the same before the first one does not; 0 never stops it."""

    @model_validator(mode="after")
    def _a_session_for_each_process(self) -> Self:
        num_workers = self.cpu_resources.num_workers if self.cpu_resources else 1
        if self.max_concurrent_sessions is not None and self.max_concurrent_sessions < num_workers:
            raise ValueError(
                f"max_concurrent_sessions is {self.max_concurrent_sessions}, fewer than the {num_workers} processes of "
                f"cpu_resources.num_workers, which share them. Raise the one or lower the other."
            )
        return self

    def share_of(self, number: int, num_workers: int) -> Self:
        if self.max_concurrent_sessions is None:
            return self
        share = part_of(self.max_concurrent_sessions, number, num_workers)
        return self.model_copy(update={"max_concurrent_sessions": share, "cpu_resources": None})

    def build_local(
        self,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        tokenizer: Tokenizer | None = None,
        system: ActorSystem | None = None,
    ) -> SessionsAgentLoop:
        """Make the loop."""
        return SessionsAgentLoop(self, rollout_ctl, judger, tokenizer=tokenizer, system=system)

    @property
    def max_response_tokens(self) -> int:
        return self.response_length or self.sample_params.max_tokens

    def row_encoder(self, tokenizer: Tokenizer, *, tools: Sequence[ToolSchema] = ()) -> EncodeRow:
        from xrl_lite.data.chat_template import ChatTemplate

        template = ChatTemplate(tokenizer.with_template(self.chat_template, self.template_kwargs))
        schemas = {str(schema["function"]["name"]): schema for schema in tools}

        def encode(row: Row) -> list[int]:
            if (row.agent_name or self.default_agent_loop) == "single_turn_agent":
                return template.encode(row.prompt)
            selection = RowTools.of({"extra_info": row.extra_info}).selection
            shown = [schema for name, schema in schemas.items() if selection is None or name in selection]
            return template.encode(row.prompt, tools=shown or None)

        return encode

    def planned_actors(self) -> Iterator[tuple[str, float]]:
        yield from super().planned_actors()
        tools = [
            *((source.name or source.where, source.num_workers, source.num_cpus) for source in read_tools(self.tools)),
            *((f"mcp/{server.name}", 1, server.num_cpus) for server in self.tools.mcp_servers),
        ]
        for _ in range(self.cpu_resources.num_workers if self.cpu_resources else 1):  # each loop has tools of its own
            for name, num_workers, num_cpus in tools:
                for number in range(num_workers):
                    yield f"tool/{name}/{number}", num_cpus

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Check that the tools can be had, and that there are an agent and the tools it asks for for every row.

        Raises:
            ConfigError: a row names an agent or a tool that there is not, and says which row; a file is missing.
            ToolError: a tool cannot be used.
            PluginError: a file or class of a tool cannot be loaded.
        """
        if self.chat_template is not None:
            read_template(self.chat_template)
        table = AgentTable(self.agent_loop_config_path)
        table.check(self.default_agent_loop)
        sources = read_tools(self.tools)
        known = {source.name for source in sources if source.name is not None}
        all_known = len(known) == len(sources) and not self.tools.mcp_servers
        for row in rows:
            try:
                if row.agent_name is not None:
                    table.check(row.agent_name)
                selected = RowTools.of({"extra_info": row.extra_info}).selection or []
            except ConfigError as error:
                raise ConfigError(f"row {row.index}: {error}") from error
            unknown = [name for name in selected if name not in known]
            if unknown and all_known:
                raise ConfigError(
                    f"row {row.index}: it names the tool {unknown[0]!r}, which there is not."
                    f"{did_you_mean(unknown[0], known)} There are: {', '.join(sorted(known)) or 'none'}."
                )


class SessionsAgentLoop(SessionLoop):
    """Runs agents.

    Args:
        config: Settings.
        rollout_ctl: Generates.
        judger: Scores.
        tokenizer: The model's tokenizer; that of `config.hf_checkpoint` when not given.
        system: Where tools run that have processes; the default system when not given.

    Raises:
        ConfigError: there is no tokenizer, or no agent of the default's name.
        TemplateError: the chat template fails its self-test.
    """

    def __init__(
        self,
        config: AgentsConfig,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        tokenizer: Tokenizer | None = None,
        system: ActorSystem | None = None,
    ) -> None:
        super().__init__(
            config,
            rollout_ctl,
            judger,
            tokenizer=tokenizer_of(config, tokenizer).with_template(config.chat_template, config.template_kwargs),
            default_agent=config.default_agent_loop,
            session_timeout_s=config.session_timeout_s,
            max_initial_failures=config.max_initial_failures,
        )
        self._config = config
        self._system = system
        self._table = AgentTable(config.agent_loop_config_path)
        self._table.check(config.default_agent_loop)
        self._parser = ToolParser.get_tool_parser(config.tools.format, self._tokenizer)
        self._template = self._make_template()
        self._toolbox: Toolbox | None = None
        self._loading: anyio.Lock | None = None
        self._places: anyio.Semaphore | None = None

    async def ready(self) -> None:
        """Load the tools and check the chat template with them, before the first session."""
        await self._tools()

    async def tool_schemas(self) -> list[ToolSchema]:
        return [tool.schema for tool in (await self._tools()).tools.values()]

    async def aclose(self) -> None:
        """Give back what the tools hold."""
        if self._toolbox is not None:
            await self._toolbox.aclose()

    def places_of(self, agent: str) -> anyio.Semaphore | None:
        if self._config.max_concurrent_sessions is None:
            return None
        self._places = self._places or anyio.Semaphore(self._config.max_concurrent_sessions)
        return self._places

    async def run_session(self, agent: str, state: RolloutState) -> list[AgentLoopOutput]:
        client = StateClient(
            self.rollout_ctl,
            attempt=str(state.rollout_id),
            sample_params=state.sample_params,
            task_name=state.task_name,
        )
        made = self._table.make(agent, self._parts(state, client, await self._tools()))
        try:
            returned = await made.run(sampling_params_of(state.sample_params), **row_of(state))
            outputs = returned if isinstance(returned, list) else [returned]
            if not outputs or not all(isinstance(output, AgentLoopOutput) for output in outputs):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"run() must return an AgentLoopOutput or a list of them, got {returned!r:.200}")
        except ENDS_THE_RUN:
            raise
        except Exception:
            if not client.was_aborted:
                raise
            return [AgentLoopOutput.aborted(state.prompt_ids or [])]  # half a response is no reason to fail
        if state.sample_params == self.sample_params:  # evaluations have their own
            client.check_trained(sum(sum(output.response_mask) for output in outputs))
        if client.was_aborted:  # an agent need not know what an abort is
            for output in outputs:
                output.extra_fields["stop_reason"] = "aborted"
        return outputs

    def _parts(self, state: RolloutState, client: StateClient, toolbox: Toolbox) -> AgentParts:
        config, params = self._config, state.sample_params
        return AgentParts(
            llm_client=client,
            tokenizer=self._tokenizer,
            template=self._template,
            toolbox=toolbox,
            parser=self._parser,
            settings=AgentSettings(
                response_length=config.response_length or params.max_tokens,
                max_assistant_turns=config.max_assistant_turns,
                max_user_turns=config.max_user_turns,
                on_rewrite=config.on_rewrite,
            ),
        )

    async def _tools(self) -> Toolbox:
        if self._toolbox is None:
            self._loading = self._loading or anyio.Lock()
            async with self._loading:
                if self._toolbox is None:
                    self._toolbox = await self._load_tools()
        return self._toolbox

    async def _load_tools(self) -> Toolbox:
        config = self._config.tools
        tools = await load_tools(config, system=self._system)
        toolbox = Toolbox(
            tools,
            call_timeout_s=config.call_timeout_s,
            max_parallel_calls=config.max_parallel_calls,
            truncation=config.truncation,
            encode=self._tokenizer.encode_text,
            decode=lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False),
        )
        if tools:
            from xrl_lite.data.template_check import check_template

            schemas = [tool.schema for tool in tools]
            try:
                check_template(self._template, tools=schemas, on_rewrite=self._config.on_rewrite)
            except BaseException:
                await toolbox.aclose()
                raise
        return toolbox

    def _make_template(self) -> ChatTemplate:
        from xrl_lite.data.chat_template import ChatTemplate
        from xrl_lite.data.template_check import check_template

        stops = self._tokenizer.token_ids_of(self._parser.stop_texts)
        template = ChatTemplate(self._tokenizer, end_ids=stops | frozenset(self._config.end_token_ids))
        check_template(template, on_rewrite=self._config.on_rewrite)
        return template


def sampling_params_of(params: SampleParams) -> dict[str, Any]:
    """Return sample parameters as agents get them."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "repetition_penalty": params.repetition_penalty,
    }
