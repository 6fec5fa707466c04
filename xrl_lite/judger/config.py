"""Settings of judgers, and the way from settings to a judger.

::

    JudgerConfig            cpu_resources None        -> build_local(), in this process
                            num_workers == 1          -> RemoteJudger -> JudgerActor -> build_local()
                            num_workers > 1           -> JudgerPool of these
    ComposedJudgerConfig                              -> ComposedJudger of what its branches build
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias, cast

from pydantic import (
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)

from xrl_lite.actors import CPUResourcesConfig
from xrl_lite.errors import ConfigError, did_you_mean
from xrl_lite.judger.adapters import ADAPTERS, RewardAdapter, adapt
from xrl_lite.judger.base import Judger
from xrl_lite.judger.choice import AnyJudgerConfig
from xrl_lite.judger.handler import (
    DEFAULT_CONCURRENCY,
    SyncIn,
    handler_name,
    is_async,
    is_url,
    load_handler,
    load_handlers,
)
from xrl_lite.judger.merge import WeightedMerge
from xrl_lite.judger.outcome import JudgementPolicy, OnError
from xrl_lite.judger.rate_limit import RateLimit
from xrl_lite.registry import path_of
from xrl_lite.settings import Settings

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem
    from xrl_lite.judger.native import NativeJudger


Handler: TypeAlias = Callable[..., Any] | str

CallableOrPath: TypeAlias = Annotated[Callable[..., Any] | str, WithJsonSchema({"type": "string"})]
"""What YAML writes as a path, and Python may give as a callable."""

RewardCode: TypeAlias = CallableOrPath | list[CallableOrPath] | None
"""Reward code, or several functions."""


NOT_SAVED = "__not_saved__"
"""Only key of the mapping that a dump has in place of what no file can hold; its value says what it was."""


class _DumpsWhatLoads(Settings):
    """Dumps code as the path to it, and what no file can hold as a mark, which is refused when it is loaded."""

    _code: ClassVar[tuple[str, ...]] = ()
    """Fields that hold callables or paths to them."""

    _values: ClassVar[tuple[str, ...]] = ()
    """Fields that hold whatever the user's code is given."""

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        values = cast("dict[str, Any]", dump(self))
        for name in (*self._code, *self._values):
            value = getattr(self, name)
            is_default = value == type(self).model_fields[name].get_default(call_default_factory=True)
            if (is_default and (info.exclude_defaults or callable(value))) or (value is None and info.exclude_none):
                continue
            values[name] = _code_as_paths(value) if name in self._code else _as_json(value)
        return values

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_missing(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = cast("Mapping[str, Any]", data)
        for name in (*cls._code, *cls._values):
            for place, kind in _marks(given.get(name), name):
                raise ConfigError(
                    f"{place} is not in this file: it was of type {kind}, given in Python. Set it here or by an "
                    f"override, or use the .py file that it was given in."
                )
        return given


class JudgerConfig(_DumpsWhatLoads):
    """A judger that scores one sample at a time by a function or a service.

    Subclass it and override `build_local` to run a judger of your own in the same places.
    """

    _code = ("reward_handler",)
    _values = ("extra_info", "reward_kwargs")

    judger_name: str
    """Name in messages, metrics and worker logs."""

    reward_handler: RewardCode = Field(default=None, exclude=True)
    """What scores: a callable (sync or async), "package.module:name", "file.py:name", or the URL of a service.
    A list of functions with signature trl or trl_chat."""

    request_timeout: float = Field(default=30.0, gt=0)
    """Longest run of one judgement, in seconds, from when it starts to run; a worker that takes longer is replaced."""

    extra_info: dict[str, Any] = Field(default_factory=dict[str, Any], exclude=True)
    """Handed to the reward code with every sample, as a shallow copy."""

    cpu_resources: CPUResourcesConfig | None = None
    """Worker processes to run in. None runs it in this process, where a hang or a crash is only half contained."""

    signature: str = "xtuner"
    """How the reward function is called: xtuner, verl, verl_batch, trl, trl_chat, openrlhf or areal. With xtuner it
    takes `response`, `label` and `extra_info`, or some of them, and returns a number, or a dict with it as `score`."""

    reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any], exclude=True)
    """Further arguments for a reward function of another signature; they win over what the sample gives."""

    reward_weights: list[float] | None = None
    """One factor for each of several reward functions; 1.0 each when not given."""

    rate_limit: RateLimit | None = None
    """Most judgements per minute, over all workers together. No limit when not given."""

    on_error: OnError = "fail_sample"
    """A sample without a score: fail_sample drops it with a message, zero scores it 0.0, raise stops the run."""

    max_initial_failures: int = Field(default=32, ge=0)
    """Stop the run when so many judgements fail before the first one succeeds; 0 never stops it."""

    max_concurrency: int | None = Field(default=None, gt=0)
    """Judgements at the same time in one process: by default 64 for async functions and services, otherwise 1.
    Above 1, a worker runs them in an event loop, so they should wait rather than compute. A process runs one call of a
    sync function at a time, whatever is set here; `cpu_resources.num_workers` runs more of them. A worker of a sync
    function wrapped around an async one (``functools.wraps``) runs one unless it is set."""

    max_pending: int = Field(default=1024, gt=0)
    """Judgements that may run or wait for a worker; further ones wait their turn, in order, before they take memory."""

    sync_in: SyncIn = "thread"
    """Where a sync function runs if there are no workers: a thread with a limit, or the event loop without one."""

    http_retries: int = Field(default=3, ge=0)
    """Further tries of a service after a connection error, 408, 429 or 5xx."""

    http_backoff_s: float = Field(default=0.2, ge=0)
    """Wait before the second try of a service, in seconds; doubles with each."""

    gold_template: str | None = None
    """What a right response looks like, with {label} in it, for the test before the run: the run stops where it scores
    no higher than a wrong one. Without it a function is tried with the label alone, and that only warns."""

    @field_validator("signature")
    @classmethod
    def _known_signature(cls, signature: str) -> str:
        if signature not in ADAPTERS:
            raise ConfigError(
                f"unknown signature {signature!r}.{did_you_mean(signature, ADAPTERS)} Known: {', '.join(ADAPTERS)}."
            )
        return signature

    @field_validator("gold_template")
    @classmethod
    def _template_has_label(cls, template: str | None) -> str | None:
        if template is not None and "{label}" not in template:
            raise ConfigError(f"must contain {{label}}, got {template!r}.")
        return template

    @model_validator(mode="after")
    def _handler_can_be_called(self) -> Self:
        adapter = self.adapter()
        if adapter is not None:
            adapter.check(judger=self.judger_name)
        return self

    @property
    def policy(self) -> JudgementPolicy:
        """What the judger does about samples that get no score."""
        return JudgementPolicy(
            on_error=self.on_error,
            request_timeout=self.request_timeout,
            max_initial_failures=self.max_initial_failures,
        )

    @property
    def concurrency_per_worker(self) -> int:
        """Judgements that one worker process runs at the same time."""
        return self.max_concurrency or (DEFAULT_CONCURRENCY if self.waits_rather_than_computes() else 1)

    def adapter(self) -> RewardAdapter | None:
        """Return what calls the reward function; None for a service, and where there is none."""
        if self.reward_handler is None or is_url(self.reward_handler):
            return None
        return adapt(
            load_handlers(self.reward_handler, judger=self.judger_name),
            judger=self.judger_name,
            signature=self.signature,
            reward_kwargs=self.reward_kwargs,
            weights=self.reward_weights,
        )

    def waits_rather_than_computes(self) -> bool:
        """Return whether one process may run many judgements at a time."""
        if self.reward_handler is None or type(self).build_local is not JudgerConfig.build_local:
            return False
        return is_url(self.reward_handler) or is_async(self.adapter())

    def reads_prompt(self) -> bool:
        """Return whether judging is known to need the prompt."""
        adapter = self.adapter()
        return adapter is not None and adapter.reads_prompt

    def gold_response(self, label: Any) -> str | None:
        """Return a right response for a label, or None where it is not known how one looks."""
        return None if self.gold_template is None else self.gold_template.replace("{label}", str(label))

    def build_local(self) -> Judger:
        """Return the judger itself; it runs in the process that calls this. Override it for judgers of your own."""
        return self.native(self.reward_handler, self.extra_info)

    def native(self, handler: Handler | Sequence[Handler] | None, extra_info: dict[str, Any]) -> NativeJudger:
        """Return a native judger with these settings, for presets that wrap the handler or add to `extra_info`."""
        from xrl_lite.judger.native import NativeJudger  # it runs code, settings only describe it

        return NativeJudger(
            judger_name=self.judger_name,
            reward_handler=handler,
            extra_info=extra_info,
            request_timeout=self.request_timeout,
            signature=self.signature,
            reward_kwargs=self.reward_kwargs,
            reward_weights=self.reward_weights,
            sync_in=self.sync_in,
            max_concurrency=self.max_concurrency or DEFAULT_CONCURRENCY,
            on_error=self.on_error,
            max_initial_failures=self.max_initial_failures,
            http_retries=self.http_retries,
            http_backoff_s=self.http_backoff_s,
            gold_response=self.gold_response,
        )

    def build(self, system: ActorSystem | None = None) -> Judger:
        """Return the judger, in the place that `cpu_resources` asks for. Returns at once; workers start meanwhile.

        Args:
            system: The actor system that workers belong to; the default one when not given.

        Raises:
            ConfigError: there is no reward code, or it cannot be sent to a worker.
            ResourceError: there are not enough CPU slots.
        """
        from xrl_lite.judger.build import build_judger  # it needs these settings

        return build_judger(self, system=system)


class ComposedJudgerConfig(_DumpsWhatLoads):
    """Several judgers, picked and merged by the data source of each sample."""

    _code = ("merge_fn",)

    branches: dict[str, AnyJudgerConfig]
    """Judgers by the names that data sources use."""

    merge_fn: CallableOrPath | None = Field(default=None, exclude=True)
    """Makes one reward of several, ``merge(state, {branch: output}) -> state``: a callable or a path. May be async."""

    weights: dict[str, float] | None = None
    """Instead of `merge_fn`: the score is the sum of the branches' scores with these weights."""

    judger_name: str = "composed"
    """Name in messages and metrics."""

    on_error: OnError = "fail_sample"
    """A sample of several branches that gets no score: fail_sample, zero or raise."""

    max_initial_failures: int = Field(default=32, ge=0)
    """Stop the run when so many merged judgements fail before the first one succeeds; 0 never stops it."""

    @model_validator(mode="after")
    def _branches_fit(self) -> Self:
        if self.merge_fn is not None and self.weights is not None:
            raise ConfigError("give merge_fn or weights, not both.")
        if isinstance(self.merge_fn, str):
            load_handler(self.merge_fn, judger=self.judger_name)
        unknown = [name for name in self.weights or {} if name not in self.branches]
        if unknown:
            raise ConfigError(f"weights names the branch {unknown[0]!r}; branches are {', '.join(self.branches)}.")
        seen: dict[str, JudgerConfig] = {}
        for config in leaves(self):
            known = seen.setdefault(config.judger_name, config)
            if known is not config and known != config:
                raise ConfigError(
                    f"two different branches have the judger_name {config.judger_name!r}, so their counts and "
                    f"logs could not be told apart. Give each its own judger_name."
                )
        return self

    def merge_function(self) -> Callable[..., Any] | None:
        """Return what merges the outputs of several branches, if anything does."""
        if self.weights is not None:
            return WeightedMerge(self.weights)
        return None if self.merge_fn is None else load_handler(self.merge_fn, judger=self.judger_name)

    def build(self, system: ActorSystem | None = None) -> Judger:
        """Return the composed judger; see `JudgerConfig.build`."""
        from xrl_lite.judger.build import build_judger  # it needs these settings

        return build_judger(self, system=system)


JudgerConfigLike: TypeAlias = JudgerConfig | ComposedJudgerConfig


def leaves(config: JudgerConfigLike) -> list[JudgerConfig]:
    """Return all settings of judgers that are not composed, in the order of branches."""
    if isinstance(config, JudgerConfig):
        return [config]
    return [leaf for branch in config.branches.values() for leaf in leaves(branch)]


def _code_as_paths(code: Any) -> Any:
    if isinstance(code, list):
        return [_code_as_paths(each) for each in cast("list[Any]", code)]
    if code is None or isinstance(code, str):
        return code
    return path_of(code) or _mark(f"{type(code).__name__} ({handler_name(code)}) without a name of its own")


def _as_json(value: Any) -> Any:
    """Return a value as JSON has it, with a mark in place of each part that JSON cannot hold."""
    if isinstance(value, dict):
        items = cast("dict[object, Any]", value).items()
        return {key if _is_plain(key) else str(key): _as_json(each) for key, each in items}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in cast("Sequence[Any]", value)]
    return value if _is_plain(value) else _mark(type(value).__qualname__)


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (str, int, float, bool)


def _mark(kind: str) -> dict[str, str]:
    return {NOT_SAVED: kind}


def _marks(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield place and kind of each part of a value that could not be dumped."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value)
        if list(items) == [NOT_SAVED]:
            yield place, items[NOT_SAVED]
            return
        for name, each in items.items():
            yield from _marks(each, f"{place}.{name}")
    if isinstance(value, list):
        for number, each in enumerate(cast("list[Any]", value)):
            yield from _marks(each, f"{place}.{number}")
