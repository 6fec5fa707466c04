"""The gateway: sessions for agents that speak OpenAI's or Anthropic's API, on a port of this machine.

::

    agent --HTTP--> server --> session --> rollout_ctl
                                  '--finalize--> trajectories, reward_info

Waits for    requests
Is woken by  the end of its block, which aborts the sessions and closes the port
"""

from __future__ import annotations

import secrets
import socket
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio.abc import TaskGroup

from xrl_lite.agent_loop import RolloutCtl
from xrl_lite.data import SampleParams
from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.sampling_params import merge_sampling_params
from xrl_lite.data.template_check import check_template
from xrl_lite.data.tokenizer import Tokenizer
from xrl_lite.errors import ConfigError, errors_as_themselves
from xrl_lite.gateway.config import GatewayConfig
from xrl_lite.gateway.refusal import Refusal, invalid
from xrl_lite.gateway.session import Session, SessionParts, SessionState
from xrl_lite.gateway.turn import SessionResult
from xrl_lite.lazy import is_installed
from xrl_lite.log import get_logger
from xrl_lite.tools import ToolParser

if TYPE_CHECKING:
    from xrl_lite.gateway.listener import Listener

logger = get_logger(__name__)

_MAX_CLOSED = 4096
"""Sessions that are over and still known as such."""


@dataclass(frozen=True, kw_only=True)
class SessionHandle:
    """What an agent needs to speak to the model."""

    session_id: str
    """The session."""
    api_key: str
    """Its key, as bearer token or as x-api-key. Good for this session only."""
    base_url: str
    """Base URL for OpenAI's clients; ends in /v1."""
    anthropic_base_url: str
    """Base URL for Anthropic's clients, which add /v1 themselves."""
    reward_info_url: str
    """Where ``{"reward_info": {...}}`` is posted."""
    model: str
    """Name of the model."""

    def environment(self) -> dict[str, str]:
        """Return these as the environment variables that clients read by themselves."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
            "ANTHROPIC_MODEL": self.model,
            "XRL_LITE_SESSION_ID": self.session_id,
            "XRL_LITE_REWARD_INFO_URL": self.reward_info_url,
        }


@dataclass(frozen=True)
class _Open:
    session: Session
    api_key: str


class Gateway:
    """Serves the model to agents. Use it as an async context manager.

    ::

        async with Gateway(rollout_ctl, tokenizer=tokenizer) as gateway:
            handle = gateway.create_session()
            ...                                     # the agent works with handle.base_url and handle.api_key
            result = await gateway.finalize_session(handle.session_id)

    Args:
        rollout_ctl: Generates.
        tokenizer: The model's tokenizer.
        config: Settings.
        sample_params: How to sample where neither session nor request say.
        max_trajectory_tokens: Most tokens of a trajectory where the settings do not say, such as the model's limit.
        resume_aborted: Ask again for what the engine aborts; otherwise that aborts the session.
        api_key: The gateway's own key, for whoever makes sessions over HTTP; a random one when not given.

    Raises:
        TemplateError: the model's chat template fails its self-test.
        ConfigError: a package or the file of the chat template is missing.
        OSError: the port is taken.
    """

    def __init__(
        self,
        rollout_ctl: RolloutCtl,
        *,
        tokenizer: Tokenizer,
        config: GatewayConfig | None = None,
        sample_params: SampleParams | None = None,
        max_trajectory_tokens: int | None = None,
        resume_aborted: bool = True,
        api_key: str | None = None,
    ) -> None:
        self.config = config = config or GatewayConfig()
        self.api_key = api_key or _new_key("gateway")
        """The gateway's own key."""
        self.max_trajectory_tokens = config.max_trajectory_tokens or max_trajectory_tokens
        """Prompt and response of a trajectory together; None where only the engine knows."""
        self._sample_params = sample_params or SampleParams()
        tokenizer = tokenizer.with_template(config.chat_template, config.template_kwargs)
        self._tokenizer = tokenizer
        self._parser = ToolParser.get_tool_parser(config.tool_format, tokenizer)
        self._template = ChatTemplate(
            tokenizer, end_ids=tokenizer.token_ids_of(self._parser.stop_texts) | frozenset(config.end_token_ids)
        )
        check_template(self._template, on_rewrite=config.on_rewrite)
        self._rollout_ctl = rollout_ctl
        self._resume_aborted = resume_aborted
        self._open: dict[str, _Open] = {}
        self._closed: OrderedDict[str, SessionState] = OrderedDict()
        self._listener: Listener | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        _check_installed()
        async with AsyncExitStack() as stack:
            await self._open_on(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with errors_as_themselves():
            await self._stack.__aexit__(kind, error, trace)

    @property
    def is_open(self) -> bool:
        """Whether it has been entered, and listens."""
        return self._listener is not None

    @property
    def url(self) -> str:
        """Where it is reached, without a path."""
        assert self._listener is not None, "it is entered"
        host, port = self._listener.address
        host = self.config.advertised_host or host
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def num_sessions(self) -> int:
        """Sessions that are not over."""
        return len(self._open)

    # --- sessions

    def create_session(
        self,
        *,
        session_id: str | None = None,
        sample_params: SampleParams | Mapping[str, Any] | None = None,
        seed_name: str | None = None,
        task_name: str | None = None,
    ) -> SessionHandle:
        """Make a session.

        Args:
            session_id: Its name; a random one when not given.
            sample_params: How to sample where requests may not or do not say; a mapping changes those of the gateway.
            seed_name: Source of its seeds, `session_id` when not given.
            task_name: Goes into the seeds.

        Raises:
            Refusal: there is one of this name, or a parameter cannot be used.
        """
        session_id = session_id or uuid.uuid4().hex
        if session_id in self._open:
            raise Refusal("conflict", f"There is a session {session_id!r} already.")
        self._closed.pop(session_id, None)
        params = self._sample_params_of(sample_params)
        session = Session(session_id, self._parts, sample_params=params, seed_name=seed_name, task_name=task_name)
        api_key = _new_key(session_id)
        self._open[session_id] = _Open(session, api_key)
        root = f"{self.url}/sessions/{session_id}"
        return SessionHandle(
            session_id=session_id,
            api_key=api_key,
            base_url=f"{root}/v1",
            anthropic_base_url=root,
            reward_info_url=f"{root}/reward_info",
            model=self.config.model_name,
        )

    async def finalize_session(self, session_id: str) -> SessionResult:
        """End a session and return what it made; requests in flight have `finalize_grace_s` left.

        Raises:
            Refusal: there is no such session, or it is over.
        """
        session = self.session(session_id)
        try:
            return await session.finalize()
        finally:
            await self._close(session)

    async def abort_session(self, session_id: str) -> None:
        """Give a session up, and end what is in flight for it.

        Raises:
            Refusal: there is no such session, or it is over.
        """
        await self._close(self.session(session_id))

    def session(self, session_id: str) -> Session:
        """Return a session.

        Raises:
            Refusal: there is none of this name, or it is over.
        """
        if session_id in self._open:
            return self._open[session_id].session
        if session_id in self._closed:
            state = self._closed[session_id].value
            raise Refusal("conflict", f"Session {session_id} is {state} and takes no more requests.")
        raise Refusal("not_found", f"There is no session {session_id!r}.")

    def session_of(self, api_key: str, session_id: str | None = None) -> Session:
        """Return the session that a key stands for; the gateway's own key gets one that is not kept.

        Args:
            api_key: As it came with a request.
            session_id: The session that the path of the request names.

        Raises:
            Refusal: the key is wrong, there is no such session, or it is over.
        """
        is_owner = secrets.compare_digest(api_key.encode(), self.api_key.encode())
        if session_id is None and is_owner:
            return Session(uuid.uuid4().hex, self._parts, sample_params=self._sample_params)
        named = session_id or _session_of_key(api_key)
        if named is None:
            raise _wrong_key()
        session = self.session(named)
        if not is_owner and not secrets.compare_digest(api_key.encode(), self._open[named].api_key.encode()):
            raise _wrong_key()
        return session

    # --- end

    async def _open_on(self, stack: AsyncExitStack) -> None:
        """Listen, until the stack is closed."""
        from xrl_lite.gateway.listener import Listener

        listening = stack.enter_context(_listen(self.config.host, self.config.port))
        tasks = await stack.enter_async_context(_cancelled_at_end())
        self._parts = SessionParts(
            rollout_ctl=self._rollout_ctl,
            tokenizer=self._tokenizer,
            template=self._template,
            parser=self._parser,
            config=self.config,
            max_trajectory_tokens=self.max_trajectory_tokens,
            tasks=tasks,
            resume_aborted=self._resume_aborted,
        )
        listener = Listener(self, listening)
        await stack.enter_async_context(listener.serving(tasks))
        stack.push_async_callback(self._abort_all)  # first of all, so that clients still hear of it
        if self.config.idle_timeout_s is not None:
            tasks.start_soon(self._abort_idle, self.config.idle_timeout_s)
        self._listener = listener

    async def _close(self, session: Session) -> None:
        if self._open.pop(session.session_id, None) is None:
            return
        with anyio.CancelScope(shield=True):  # ends at once
            await session.abort()
        self._closed[session.session_id] = session.state
        if len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)

    async def _abort_all(self) -> None:
        for opened in list(self._open.values()):
            await self._close(opened.session)

    async def _abort_idle(self, idle_s: float) -> None:
        while True:
            await anyio.sleep(idle_s / 4)
            latest_s = time.monotonic() - idle_s
            for session in [opened.session for opened in self._open.values()]:
                if not session.num_in_flight and session.last_request_s < latest_s:
                    logger.warning("session %s: aborted, no request for %g s", session.session_id, idle_s)
                    await self._close(session)

    def _sample_params_of(self, given: SampleParams | Mapping[str, Any] | None) -> SampleParams:
        if isinstance(given, SampleParams):
            return given
        try:
            return merge_sampling_params(self._sample_params, given or {})
        except ConfigError as error:
            raise invalid(f"sample_params: {error}", param="sample_params") from error


@asynccontextmanager
async def _cancelled_at_end() -> AsyncGenerator[TaskGroup]:
    """Yield a task group whose tasks are cancelled at the end."""
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        finally:
            tasks.cancel_scope.cancel()


def _check_installed() -> None:
    missing = [name for name in ("starlette", "uvicorn", "httptools") if not is_installed(name)]
    if missing:
        raise ConfigError(f"The gateway needs {' and '.join(missing)}. Install: pip install 'xrl-lite[gateway]'")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listening


def _new_key(name: str) -> str:
    return f"sk-{name}.{secrets.token_urlsafe(24)}"


def _session_of_key(api_key: str) -> str | None:
    name, dot, _ = api_key.removeprefix("sk-").rpartition(".")
    return name if dot else None


def _wrong_key() -> Refusal:
    return Refusal("authentication", "Incorrect API key: it belongs to no session here, or to another one.")
