"""Reward functions of other systems, called the way they are written for.

An adapter knows what a signature needs of the sample, how to lay out the arguments for one sample, and how to read what
comes back. It is used as a handler (``JudgerConfig(reward_handler=VerlReward(compute_score))``) or by its name in the
setting ``signature``.

=============  ===================================================================  ==============================
name           called as                                                            returns
=============  ===================================================================  ==============================
xtuner         ``fn(response, label, extra_info)``                                  number or dict with ``score``
verl           ``fn(data_source, solution_str, ground_truth, extra_info)``          number or dict with ``score``
verl_batch     ``fn(data_sources, solution_strs, ground_truths, extra_infos)``      list of these
trl            ``fn(prompts, completions, completion_ids, **columns)``, texts       list of number or None (skip)
trl_chat       the same, with lists of messages                                     list of number or None (skip)
openrlhf       ``fn(queries, prompts, labels)``                                     dict ``rewards``, ``scores``
areal          ``fn(prompt, completions, prompt_ids, completion_ids, **columns)``   number
=============  ===================================================================  ==============================

Only the arguments that a function takes are passed. Any of them may be async. ``reward_kwargs`` win over all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from copy import copy
from numbers import Number
from typing import Any, ClassVar, Self, cast

from xrl_lite.data.rollout_state import RolloutState
from xrl_lite.errors import ConfigError, did_you_mean
from xrl_lite.judger.handler import Parameters, RewardHandler, handler_name, is_async, wraps_async
from xrl_lite.judger.merge import with_parts
from xrl_lite.judger.outcome import RewardValueError, SkipSampleError

LABEL_COLUMNS = ("ground_truth", "solution", "answer", "label", "target")
"""Parameters, and keys of ``**kwargs``, that stand for the label when the row has no column of that name."""

_TRL_LOGGING = ("trainer_state", "log_extra", "log_metric")
_PROMPTS = frozenset({"prompt", "prompts", "queries"})
_OWN_FIELDS = frozenset({"judgement", "row", "raw_prompt"})


class RewardAdapter:
    """Calls a reward function for one sample. Subclasses say how.

    Args:
        function: The reward function, sync or async.
        reward_kwargs: Further arguments; they win over what the sample gives.
    """

    signature: ClassVar[str]
    """Name in the setting ``signature``."""

    offers: ClassVar[tuple[str, ...]]
    """Arguments that every sample can give."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """What of the sample is needed beside response and label; see `NEEDS`."""

    takes_columns: ClassVar[bool] = False
    """Whether columns of the row are passed by name."""

    def __init__(self, function: RewardHandler, *, reward_kwargs: Mapping[str, Any] | None = None) -> None:
        self.function = function
        self.functions: Sequence[RewardHandler] = [function]
        self.reward_kwargs = dict(reward_kwargs or {})
        self.parameters = Parameters(function)

    @property
    def __name__(self) -> str:
        return handler_name(self.function)

    @property
    def is_async(self) -> bool:
        """Whether the function is async."""
        return is_async(self.function)

    @property
    def wraps_async(self) -> bool:
        """Whether the function is sync, but wrapped around an async one."""
        return wraps_async(self.function)

    @property
    def reads_prompt(self) -> bool:
        """Whether the function asks for the prompt by name."""
        return "message" in self.needs and not _PROMPTS.isdisjoint(self.parameters.names)

    def with_kwargs(self, reward_kwargs: Mapping[str, Any] | None) -> Self:
        """Return the adapter with further arguments for the function."""
        if not reward_kwargs:
            return self
        twin = copy(self)
        twin.reward_kwargs = {**self.reward_kwargs, **reward_kwargs}
        return twin

    def check(self, *, judger: str) -> None:
        """Check that the function can be called this way; columns are only known with the data.

        Raises:
            ConfigError: a parameter gets no argument; names the signature that would fit, if there is one.
        """
        parameters = self.parameters
        offered = {*self.offers, *self.reward_kwargs}
        missing = [name for name in parameters.required if name not in offered]
        if not missing or self.takes_columns:
            return
        fitting = guess_signature(self.function)
        advice = f" It looks like signature: {fitting}." if fitting not in (None, self.signature) else ""
        raise ConfigError(
            f"judger {judger!r}: {handler_name(self.function)} needs the argument {missing[0]!r}, which signature "
            f"{self.signature!r} does not give.{did_you_mean(missing[0], self.offers)} Given are "
            f"{', '.join(self.offers)} and reward_kwargs.{advice}"
        )

    def required_columns(self) -> list[str]:
        """Return the columns of the row that the function cannot do without."""
        return []

    def __call__(self, payload: Mapping[str, Any], extra_info: Mapping[str, Any]) -> Any:
        """Return the reward dict, or an awaitable of it for an async function."""
        offered = self.arguments(payload, extra_info)
        if self.reward_kwargs:
            offered.update(self.reward_kwargs)
        result = self.function(**self.parameters.choose(offered))
        if type(result) is not dict and inspect.isawaitable(result):  # looking costs more than the rest of the call
            return self._read_later(result)
        return self.read(result)

    def arguments(self, payload: Mapping[str, Any], extra_info: Mapping[str, Any]) -> dict[str, Any]:
        """Lay out the arguments for one sample."""
        raise NotImplementedError

    def read(self, result: Any) -> Any:
        """Turn what the function returned into a reward dict."""
        return result

    async def _read_later(self, result: Awaitable[Any]) -> Any:
        return self.read(await result)

    def _columns_among(self, parameters: Parameters, *given: str) -> list[str]:
        known = {*self.offers, *LABEL_COLUMNS, *self.reward_kwargs, *given}
        return [name for name in parameters.required if name not in known]

    def _only(self, results: Any) -> Any:
        """Return the one value of a list for one sample; a list of another length would be another sample's reward."""
        values = _as_list(results)
        if len(values) != 1:
            raise RewardValueError(
                f"{handler_name(self.function)} returned {len(values)} values, expected 1: {results!r}"
            )
        return values[0]


class XtunerReward(RewardAdapter):
    """The native signature; ``extra_info`` is a fresh shallow copy for every call."""

    signature = "xtuner"
    offers = ("response", "label", "extra_info")

    def arguments(self, payload: Mapping[str, Any], extra_info: Mapping[str, Any]) -> dict[str, Any]:
        info = {**extra_info}
        for name in self.needs:
            info[name] = payload[name]
        return {"response": payload["response"], "label": payload["label"], "extra_info": info}

    def read(self, result: Any) -> Any:
        """Take a bare number for the score; in XTuner only a dict is a reward."""
        return {"score": result} if _is_number(result) else result


class VerlReward(RewardAdapter):
    """``compute_score``; the columns of the row come in ``extra_info``."""

    signature = "verl"
    offers = ("data_source", "solution_str", "ground_truth", "extra_info")
    needs = frozenset({"data_source", "columns"})

    def arguments(self, payload: Mapping[str, Any], extra_info: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "data_source": payload["data_source"],
            "solution_str": payload["response"],
            "ground_truth": payload["label"],
            "extra_info": {**payload["columns"], **extra_info},
        }

    def read(self, result: Any) -> Any:
        return cast("Any", result) if isinstance(result, dict) else {"score": result, "acc": result}


class VerlBatchReward(VerlReward):
    """The batch form of ``compute_score``, called with lists of one."""

    signature = "verl_batch"
    offers = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

    def arguments(self, payload: Mapping[str, Any], extra_info: Mapping[str, Any]) -> dict[str, Any]:
        single = super().arguments(payload, extra_info)
        return dict(zip(self.offers, ([value] for value in single.values()), strict=True))

    def read(self, result: Any) -> Any:
        return super().read(self._only(result))


class TrlReward(RewardAdapter):
    """Reward functions of TRL's trainers, called with lists of one. None skips the sample.

    Args:
        function: One function, or several that are summed with `weights`. A sample that all of them skip is skipped.
        weights: One factor per function; 1.0 each when not given.
        reward_kwargs: Further arguments; they win over what the sample gives.
    """

    signature = "trl"
    offers = ("prompts", "completions", "completion_ids")
    needs = frozenset({"message", "response_ids", "columns"})
    takes_columns = True
    with_messages: ClassVar[bool] = False

    def __init__(
        self,
        function: RewardHandler | Sequence[RewardHandler],
        *,
        weights: Sequence[float] | None = None,
        reward_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        functions = [function] if callable(function) else list(function)
        if not functions or (weights is not None and len(weights) != len(functions)):
            raise ConfigError(f"give one weight per reward function, got {len(functions)} and {len(weights or ())}.")
        super().__init__(functions[0], reward_kwargs=reward_kwargs)
        self.functions = functions
        self._names = _different([handler_name(each) for each in functions])
        self._parameters = [Parameters(each) for each in functions]
        self.weights = [1.0] * len(functions) if weights is None else list(weights)

    @property
    def is_async(self) -> bool:
        """Whether any of the functions is async."""
        return any(is_async(function) for function in self.functions)

    @property
    def wraps_async(self) -> bool:
        """Whether none of the functions is async, but one is wrapped around an async one."""
        return not self.is_async and any(wraps_async(function) for function in self.functions)

    @property
    def reads_prompt(self) -> bool:
        """Whether any of the functions asks for the prompt by name."""
        return any(not _PROMPTS.isdisjoint(parameters.names) for parameters in self._parameters)

    def required_columns(self) -> list[str]:
        """Return the columns that any of the functions cannot do without."""
        needed = [self._columns_among(parameters, *_TRL_LOGGING) for parameters in self._parameters]
        return list(dict.fromkeys(name for names in needed for name in names))

    def __call__(self, payload: Mapping[str, Any], extra_info: Mapping[str, Any]) -> Any:
        """Return the reward dict, or an awaitable of it. What the functions log becomes a part of it."""
        logged: dict[str, Any] = {}
        offered = {**self.arguments(payload, extra_info), **self._logging(logged), **self.reward_kwargs}
        results = [
            function(**self._arguments_of(function, parameters, offered, payload))
            for function, parameters in zip(self.functions, self._parameters, strict=True)
        ]
        if any(inspect.isawaitable(result) for result in results):
            return self._sum_later(results, logged)
        return self._sum(results, logged)

    def arguments(self, payload: Mapping[str, Any], extra_info: Mapping[str, Any]) -> dict[str, Any]:
        response, prompt = payload["response"], payload["message"]
        columns = {**payload["columns"], **extra_info}
        return {
            **{name: [value] for name, value in columns.items()},
            "prompts": [prompt if self.with_messages else prompt_text(prompt)],
            "completions": [[{"role": "assistant", "content": response}] if self.with_messages else response],
            "completion_ids": [payload["response_ids"]],
        }

    def _arguments_of(
        self, function: RewardHandler, parameters: Parameters, offered: dict[str, Any], payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        label = {name: [payload["label"]] for name in LABEL_COLUMNS if parameters.takes(name) and name not in offered}
        chosen = parameters.choose({**offered, **label})
        for name in parameters.required:
            if name not in chosen:
                raise RewardValueError(
                    f"{handler_name(function)} needs the column {name!r}, which the row does not have."
                    f"{did_you_mean(name, offered)} It has {', '.join(offered)}."
                )
        return chosen

    def _logging(self, logged: dict[str, Any]) -> dict[str, Any]:
        def log_extra(column: str, values: Sequence[Any]) -> None:
            logged[column] = self._only(values)

        def log_metric(name: str, value: float) -> None:
            logged[name] = value

        return dict(zip(_TRL_LOGGING, (None, log_extra, log_metric), strict=True))

    async def _sum_later(self, results: list[Any], logged: dict[str, Any]) -> dict[str, Any]:
        return self._sum([await result if inspect.isawaitable(result) else result for result in results], logged)

    def _sum(self, results: list[Any], logged: dict[str, Any]) -> dict[str, Any]:
        values = [self._only(result) for result in results]
        scored = [value * weight for value, weight in zip(values, self.weights, strict=True) if value is not None]
        if not scored:
            raise SkipSampleError("the reward function returned None")
        parts = dict(zip(self._names, values, strict=True)) if len(self.functions) > 1 else {}
        return {**logged, **with_parts(scored[0] if len(scored) == 1 else sum(scored), parts)}


class TrlChatReward(TrlReward):
    """TRL reward functions for conversational data: prompts and completions are lists of messages."""

    signature = "trl_chat"
    with_messages = True


class OpenRlhfReward(RewardAdapter):
    """``reward_func`` of OpenRLHF. ``rewards`` is trained on; ``scores`` and ``extra_logs`` are kept beside it."""

    signature = "openrlhf"
    offers = ("queries", "prompts", "labels")
    needs = frozenset({"message"})

    def arguments(self, payload: Mapping[str, Any], extra_info: Mapping[str, Any]) -> dict[str, Any]:
        prompt = prompt_text(payload["message"])
        return {"queries": [prompt + payload["response"]], "prompts": [prompt], "labels": [payload["label"]]}

    def read(self, result: Any) -> Any:
        if not isinstance(result, Mapping):
            reward = self._only(result)
            return {"score": reward, "scores": reward}
        values = cast("Mapping[str, Any]", result)
        if values.get("rewards") is None:
            raise RewardValueError(f"{handler_name(self.function)} returned no 'rewards': {values!r}")
        reward = self._only(values["rewards"])
        scores = values.get("scores")
        logs = cast("Mapping[str, Any]", values.get("extra_logs") or {})
        return {
            **{name: self._only(value) for name, value in logs.items()},
            "score": reward,
            "scores": reward if scores is None else self._only(scores),  # a score of 0.0 is a score
        }


class ArealReward(RewardAdapter):
    """Reward functions of AReaL workflows."""

    signature = "areal"
    offers = ("prompt", "completions", "prompt_ids", "completion_ids")
    needs = frozenset({"message", "prompt_ids", "response_ids", "columns"})
    takes_columns = True

    def required_columns(self) -> list[str]:
        """Return the columns that the function cannot do without."""
        return self._columns_among(self.parameters)

    def arguments(self, payload: Mapping[str, Any], extra_info: Mapping[str, Any]) -> dict[str, Any]:
        label = {name: payload["label"] for name in LABEL_COLUMNS if self.parameters.takes(name)}
        return {
            **label,
            **payload["columns"],
            **extra_info,
            "prompt": prompt_text(payload["message"]),
            "completions": payload["response"],
            "prompt_ids": payload["prompt_ids"],
            "completion_ids": payload["response_ids"],
        }

    def read(self, result: Any) -> Any:
        return cast("Any", result) if isinstance(result, dict) else {"score": result}


ADAPTERS: dict[str, type[RewardAdapter]] = {
    adapter.signature: adapter
    for adapter in (XtunerReward, VerlReward, VerlBatchReward, TrlReward, TrlChatReward, OpenRlhfReward, ArealReward)
}
"""Adapters by the name used in the setting ``signature``."""


def adapt(
    handler: RewardHandler | Sequence[RewardHandler],
    *,
    judger: str,
    signature: str,
    reward_kwargs: Mapping[str, Any] | None = None,
    weights: Sequence[float] | None = None,
) -> RewardAdapter:
    """Return what calls a reward function, or several, in the way that a signature says; an adapter has its own way.

    Raises:
        ConfigError: several functions or weights, where the signature takes one function; weights for an adapter.
    """
    if isinstance(handler, RewardAdapter):
        if weights is not None:
            raise ConfigError(f"judger {judger!r}: give weights to {type(handler).__name__}(..), not reward_weights.")
        return handler.with_kwargs(reward_kwargs)
    kind = ADAPTERS[signature]
    if callable(handler) and weights is None:
        return kind(handler, reward_kwargs=reward_kwargs)
    if not issubclass(kind, TrlReward):
        raise ConfigError(
            f"judger {judger!r}: several reward functions, and reward_weights, go with signature trl or trl_chat, not "
            f"{signature!r}. For others make a composed judger of them, with weights."
        )
    return kind(handler, weights=weights, reward_kwargs=reward_kwargs)


def select_needed(state: RolloutState, needs: frozenset[str]) -> dict[str, Any]:
    """Return the parts of a state that adapters ask for in `RewardAdapter.needs`."""
    columns = {name: value for name, value in state.extra_fields.items() if name not in _OWN_FIELDS}
    found = {
        "message": state.message,
        "prompt_ids": state.prompt_ids,
        "response_ids": state.response_ids,
        "num_response_tokens": None if state.response_ids is None else len(state.response_ids),
        "data_source": data_source_name(state),
        "columns": columns,
    }
    return {name: found[name] for name in needs}


def data_source_name(state: RolloutState) -> str | None:
    """Return the name of the data source; of a dict with one key, that key."""
    original = state.extra_fields.get("origin_data_source")
    if isinstance(original, str):
        return original
    source = state.data_source
    return next(iter(source), None) if isinstance(source, dict) else source


def prompt_text(message: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of a prompt; a single user message is its content."""
    return "\n".join(content_text(part.get("content")) for part in message)


def content_text(content: Any) -> str:
    """Return the text of a message's content: a string, or the text parts of a multimodal list."""
    if isinstance(content, str):
        return content
    parts = cast("list[Mapping[str, Any]]", content) if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if part.get("type") == "text")


def guess_signature(function: RewardHandler) -> str | None:
    """Return the signature whose arguments a function names, or None."""
    parameters = Parameters(function)
    telling = {
        "verl": "solution_str",
        "verl_batch": "solution_strs",
        "openrlhf": "queries",
        "trl": "prompts",
        "areal": "completion_ids",
        "xtuner": "response",
    }
    return next((name for name, word in telling.items() if word in parameters.names), None)


def _different(names: Sequence[str]) -> list[str]:
    """Return the names, those that came before with a number behind them."""
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}_{count + 1}" if count else name for name, count in zip(names, before, strict=True)]


def _is_number(value: Any) -> bool:
    return type(value) is not dict and (isinstance(value, Number) or hasattr(value, "dtype"))


def _as_list(values: Any) -> list[Any]:
    if hasattr(values, "tolist"):  # tensors and arrays, without importing their libraries
        values = values.tolist()
    return list(cast("Sequence[Any]", values)) if isinstance(values, list | tuple) else [values]
