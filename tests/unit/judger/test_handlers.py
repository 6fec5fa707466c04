"""All kinds of reward code, and the errors for what is none."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.unit.judger.states import exact, make_state
from xrl_lite.judger import (
    JUDGERS,
    AnyJudgerConfig,
    ExactMatchJudgerConfig,
    GSM8KJudgerConfig,
    JudgerConfig,
    NativeJudger,
)
from xrl_lite.judger.config import NOT_SAVED
from xrl_lite.judger.handler import handler_name, is_async
from xrl_lite.settings import Settings, explain


async def async_exact(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
    await asyncio.sleep(0)
    return exact(response, label, extra_info)


class CallableObject:
    def __call__(self, response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        return exact(response, label, extra_info)

    def method(self, response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        return exact(response, label, extra_info)


class AsyncCallable:
    async def __call__(self, response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        return await async_exact(response, label, extra_info)


def with_bonus(bonus: float, response: str, label: Any, extra_info: Any) -> dict[str, Any]:
    return {"score": exact(response, label, extra_info)["score"] + bonus}


HANDLERS: dict[str, Any] = {
    "function": exact,
    "async function": async_exact,
    "lambda": lambda response, label, extra_info: exact(response, label, extra_info),
    "lambda that returns a coroutine": lambda response, label, extra_info: async_exact(response, label, extra_info),
    "function without extra_info": lambda response, label: exact(response, label, {}),
    "partial": functools.partial(with_bonus, 0.0),
    "partial of an async function": functools.partial(async_exact),
    "callable object": CallableObject(),
    "bound method": CallableObject().method,
    "object with async __call__": AsyncCallable(),
    "partial of an object with async __call__": functools.partial(AsyncCallable()),
    "module path": "tests.unit.judger.states:exact",
    "file path": f"{Path(__file__).with_name('states.py')}:exact",
}


@pytest.mark.parametrize("name", HANDLERS)
@pytest.mark.parametrize("sync_in", ["thread", "loop"])
async def test_every_kind_of_handler_scores(name: str, sync_in: Any) -> None:
    judger = JudgerConfig(judger_name="x", reward_handler=HANDLERS[name], sync_in=sync_in).build()
    right, wrong = await asyncio.gather(judger.judge(make_state("72")), judger.judge(make_state("73")))
    assert (right.reward, wrong.reward) == ({"score": 1.0}, {"score": 0.0})


@pytest.mark.parametrize(
    ("handler", "name"),
    [(functools.partial(exact), "exact"), (CallableObject(), "CallableObject"), (exact, "exact"), ("a.b:c", "a.b:c")],
)
def test_p1_handlers_without_a_name_get_one(handler: Any, name: str) -> None:
    assert handler_name(handler) == name


def test_async_is_seen_through_partials_and_call() -> None:
    names = [name for name, handler in HANDLERS.items() if not isinstance(handler, str) and is_async(handler)]
    assert names == [
        "async function",
        "partial of an async function",
        "object with async __call__",
        "partial of an object with async __call__",
    ]


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        ("tests.unit.judger.states:exakt", "Did you mean 'exact'"),
        ("tests.unit.judger.no_such_module:exact", "no_such_module"),
        ("no_such_file.py:exact", "there is no such file"),
        ("exact", "neither a path nor a URL"),
        ("tests.unit.judger.test_handlers:HANDLERS", "is not callable"),
        (CallableObject, "is the class CallableObject. Give an instance"),
        (lambda answer: {"score": 1.0}, "needs the argument 'answer'"),
        (lambda solution_str, ground_truth: 1.0, "It looks like signature: verl"),
    ],
)
def test_bad_handlers_are_refused_when_the_config_is_read(handler: Any, says: str) -> None:
    with pytest.raises(ValueError, match="judger 'x'") as caught:
        JudgerConfig(judger_name="x", reward_handler=handler)
    assert says in str(caught.value)


def test_a_handler_that_is_no_callable_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="reward_handler"):
        JudgerConfig(judger_name="x", reward_handler=3)  # pyright: ignore[reportArgumentType]


async def test_extra_info_is_a_fresh_copy_for_every_call() -> None:
    seen: list[dict[str, Any]] = []

    def greedy(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
        seen.append(dict(extra_info))
        extra_info["used"] = True
        return {"score": 1.0}

    judger = NativeJudger("x", greedy, {"k": 1})
    for _ in range(2):
        await judger.judge(make_state())
    assert seen == [{"k": 1}, {"k": 1}]


async def test_a_local_sync_function_leaves_the_loop_free() -> None:
    loop_was_free = threading.Event()

    def wait_for_loop(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        loop_was_free.wait()
        return {"score": 1.0}

    async def free() -> None:
        loop_was_free.set()

    judger = NativeJudger("x", wait_for_loop)
    state, _ = await asyncio.gather(judger.judge(make_state()), free())
    assert state.reward == {"score": 1.0}


async def test_async_judgements_keep_to_max_concurrency() -> None:
    running, peak = 0, 0

    async def watch(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1
        return {"score": 1.0}

    judger = NativeJudger("x", watch, max_concurrency=3)
    await asyncio.gather(*(judger.judge(make_state()) for _ in range(20)))
    assert peak == 3


def test_a_judger_is_usable_from_several_loops_and_after_pickling() -> None:
    judger = JudgerConfig(judger_name="x", reward_handler=async_exact).build()
    for one in (judger, judger, pickle.loads(pickle.dumps(judger))):
        assert asyncio.run(one.judge(make_state())).reward == {"score": 1.0}


class Holder(Settings):
    """Other settings with a judger in them."""

    judger: AnyJudgerConfig
    """The judger."""


class MyJudgerConfig(JudgerConfig):
    judger_name: str = "mine"
    bonus: float = 0.0


class TestAnyJudgerConfig:
    def test_a_mapping_is_read_by_its_type(self) -> None:
        assert Holder.model_validate({"judger": {"type": "gsm8k"}}).judger == GSM8KJudgerConfig()
        native = Holder.model_validate(
            {"judger": {"judger_name": "x", "reward_handler": "tests.unit.judger.states:exact"}}
        )
        assert type(native.judger) is JudgerConfig

    def test_an_instance_stays_what_it_is(self) -> None:
        config = ExactMatchJudgerConfig()
        assert Holder(judger=config).judger is config

    @pytest.mark.parametrize("mode", ["python", "json"])
    def test_what_is_dumped_loads_again(self, mode: Any) -> None:
        for judger in (
            GSM8KJudgerConfig(extra_info={"score": 2, "method": "flexible"}),
            ExactMatchJudgerConfig(cpu_resources={"num_workers": 2}),  # pyright: ignore[reportArgumentType]
            JudgerConfig(judger_name="x", reward_handler="tests.unit.judger.states:exact", extra_info={"a": [1]}),
            JudgerConfig(judger_name="x", reward_handler="http://127.0.0.1:1/judge", on_error="zero"),
        ):
            holder = Holder(judger=judger)
            assert Holder.model_validate(holder.model_dump(mode=mode)) == holder

    def test_what_json_cannot_hold_is_marked_and_the_mark_is_refused(self) -> None:
        config = JudgerConfig(judger_name="x", reward_handler=exact, extra_info={"lock": object(), "factor": 2})
        dumped = config.model_dump(mode="json")
        assert dumped["reward_handler"] == f"{exact.__module__}:exact"
        assert dumped["extra_info"] == {"lock": {NOT_SAVED: "object"}, "factor": 2}
        with pytest.raises(ValidationError, match=r"extra_info\.lock is not in this file: it was of type object"):
            JudgerConfig.model_validate(dumped)

    def test_an_unknown_type_names_the_closest(self) -> None:
        with pytest.raises(ValueError, match=r"Unknown judger 'gms8k'\. Did you mean 'gsm8k'"):
            Holder.model_validate({"judger": {"type": "gms8k"}})

    @pytest.mark.parametrize("kind", ["tests.unit.judger.states:no_such", "tests.unit.judger.states:exact", 3])
    def test_a_type_that_is_no_judger_is_refused(self, kind: Any) -> None:
        with pytest.raises(ValueError, match=r"no_such|is not a JudgerConfig|Unknown judger '3'"):
            Holder.model_validate({"judger": {"type": kind}})

    def test_errors_inside_say_where(self) -> None:
        with pytest.raises(ValidationError) as caught:
            Holder.model_validate({"judger": {"type": "gsm8k", "request_timout": 3}})
        assert "judger.request_timout: unknown setting. Did you mean 'request_timeout'?" in str(
            explain(caught.value, Holder)
        )

    def test_a_class_of_ones_own_is_named_by_its_path(self) -> None:
        holder = Holder.model_validate({"judger": {"type": f"{__name__}:MyJudgerConfig", "bonus": 2.0}})
        assert holder.judger == MyJudgerConfig(bonus=2.0)
        assert holder.model_dump()["judger"]["type"] == f"{__name__}:MyJudgerConfig"
        assert Holder.model_validate(holder.model_dump(mode="json")) == holder

    def test_what_is_no_judger_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must be a judger"):
            TypeAdapter(AnyJudgerConfig).validate_python(3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("request_timeout", 0), ("max_concurrency", 0), ("signature", "verk"), ("gold_template", "####"), ("unknown", 1)],
)
def test_bad_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        JudgerConfig.model_validate({"judger_name": "x", "reward_handler": exact, field: value})


def test_every_setting_is_described() -> None:
    for config in map(JUDGERS.resolve, JUDGERS):
        assert [name for name, field in config.model_fields.items() if not field.description] == []
        assert set(config.model_json_schema()["properties"]) == set(config.model_fields)
