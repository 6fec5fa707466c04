"""Calls: arguments that fit, limits, life cycles, and an answer whatever happens."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from xrl_lite.errors import ToolError
from xrl_lite.tools import (
    BaseTool,
    FunctionCall,
    Toolbox,
    ToolResponse,
    ToolResult,
    Truncation,
    function_tool,
    truncate,
)
from xrl_lite.tools.toolbox import call_message, message_of


@function_tool
def calc(answer: str) -> str:
    """Check an answer.

    Args:
        answer: The answer.
    """
    return f"checked {answer!r}"


@function_tool("twice")
async def double(x: int) -> tuple[dict[str, int], float, dict[str, int]]:
    """Double a number.

    Args:
        x: The number.
    """
    return {"result": 2 * x}, 0.5, {"seen": x}


@function_tool
def broken(x: int) -> str:
    """Fail.

    Args:
        x: Any.
    """
    raise KeyError(f"no {x}")


@function_tool
async def endless(x: int) -> str:
    """Never answer.

    Args:
        x: Any.
    """
    await anyio.sleep_forever()
    return ""


class Counting(BaseTool):
    """Writes down its life."""

    def __init__(self, lifetime: str = "call", *, fail_at: str = "") -> None:
        self.life: list[str] = []
        self.fail_at = fail_at
        schema: dict[str, Any] = {"type": "function", "function": {"name": "count", "parameters": {}}}
        super().__init__({"lifetime": lifetime}, schema)

    def note(self, what: str) -> None:
        self.life.append(what)
        if what == self.fail_at:
            raise RuntimeError(f"scripted failure of {what}")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.note(f"create {kwargs}" if kwargs else "create")
        return "one", ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        self.note("execute")
        return ToolResponse(text=str(kwargs["agent_data"])), 1.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.note("release")


def call(name: str, arguments: str = "{}", **fields: Any) -> FunctionCall:
    return FunctionCall(name, arguments, **fields)


async def run(toolbox: Toolbox, *calls: FunctionCall, **session: Any) -> list[ToolResult]:
    async with toolbox.session(**session) as tools:
        return await tools.run(calls, agent_data="data")


async def answer(toolbox: Toolbox, name: str, arguments: str) -> str | None:
    (result,) = await run(toolbox, call(name, arguments))
    return result.response.text


@pytest.mark.parametrize(
    ("tool", "arguments", "text", "failure"),
    [
        ("calc", '{"answer": "72"}', "checked '72'", None),
        ("calc", '{"answer": 72}', "checked '72'", None),  # T3
        ("twice", '{"x": "3"}', '{"result": 6}', None),
        ("twice", '{"x": 3.0}', '{"result": 6}', None),
        ("twice", '{"x": "three"}', "Error: argument 'x' must be of type integer, got \"three\".", "arguments"),
        ("twice", "{}", "Error: twice needs the argument 'x'. It takes: x (integer).", "arguments"),
        (
            "calc",
            '{"anser": "1"}',
            "Error: calc has no argument 'anser'. Did you mean 'answer'? It takes: answer (string).",
            "arguments",
        ),
        (
            "cacl",
            "{}",
            "Error: unknown tool cacl; available: calc, twice, broken. Did you mean 'calc'?",
            "unknown_tool",
        ),  # T4
        ("broken", '{"x": 1}', "Error: broken failed: KeyError: 'no 1'", "raised"),
    ],
)
async def test_every_call_has_an_answer(tool: str, arguments: str, text: str, failure: str | None) -> None:
    toolbox = Toolbox([calc, double, broken])
    (result,) = await run(toolbox, call(tool, arguments))
    assert (result.response.text, result.failure) == (text, failure)
    assert toolbox.counts.metrics()["tools/failure_frequency"] == float(failure is not None)


async def test_a_malformed_call_is_told_to_the_model_and_counted() -> None:
    toolbox = Toolbox([calc])
    (result,) = await run(toolbox, call("calc", '{"answer": ', error="the arguments are not valid JSON"))
    assert result.response.text == "Error: The tool call cannot be read: the arguments are not valid JSON"
    assert toolbox.counts.metrics()["tools/failures/malformed"] == 1.0


async def test_arguments_that_a_parser_did_not_look_at_are_checked() -> None:
    (result,) = await run(Toolbox([calc]), call("calc", "{not json"))
    assert result.failure == "malformed"


async def test_reward_and_metrics_of_a_tool_are_kept() -> None:
    (result,) = await run(Toolbox([double]), call("twice", '{"x": 3}'))
    assert (result.reward, result.metrics) == (0.5, {"seen": 3})


async def test_a_tool_that_takes_too_long_is_given_up() -> None:
    (result,) = await run(Toolbox([endless], call_timeout_s=0.05), call("endless", '{"x": 1}'))
    assert result.failure == "timeout"
    assert result.response.text == "Error: endless took longer than 0.05 s and was ended."


async def test_a_hanging_function_in_a_thread_is_left_behind() -> None:
    go_on = threading.Event()

    @function_tool
    def hang(x: int) -> str:
        """Hang.

        Args:
            x: Any.
        """
        go_on.wait(10)
        return ""

    (result,) = await run(Toolbox([hang], call_timeout_s=0.05), call("hang", '{"x": 1}'))
    go_on.set()
    assert result.failure == "timeout"


async def test_only_so_many_calls_are_carried_out_and_at_the_same_time() -> None:
    met = [anyio.Event(), anyio.Event()]

    @function_tool
    async def meet(me: int) -> str:
        """Wait for the other.

        Args:
            me: Which.
        """
        met[me].set()
        await met[1 - me].wait()
        return str(me)

    calls = [call("meet", f'{{"me": {me}}}') for me in (0, 1)] + [call("cacl")]
    results = await run(Toolbox([meet], max_parallel_calls=2), *calls)
    assert [result.response.text for result in results] == ["0", "1"]


async def test_create_and_release_are_around_every_call() -> None:
    tool = Counting()
    await run(Toolbox([tool], max_parallel_calls=2), call("count"), create_kwargs={"count": {"x": 1}})
    assert tool.life == ["create {'x': 1}", "execute", "release"]


async def test_an_instance_may_last_as_long_as_its_trajectory() -> None:
    tool = Counting("trajectory")
    async with Toolbox([tool], max_parallel_calls=2).session() as tools:
        await tools.run([call("count"), call("count")])
        await tools.run([call("count")])
        assert tool.life == ["create", "execute", "execute", "execute"]
    assert tool.life[-1:] == ["release"]


async def test_a_cancelled_trajectory_releases_what_its_tools_set_up() -> None:
    tool = Counting("trajectory")
    with anyio.CancelScope() as scope:
        async with Toolbox([tool]).session() as tools:
            await tools.run([call("count")])
            scope.cancel()
            await anyio.sleep_forever()
    assert tool.life == ["create", "execute", "release"]


@pytest.mark.parametrize(("fail_at", "life"), [("create", 1), ("execute", 3), ("release", 3)])
async def test_a_failure_at_any_place_is_an_answer(fail_at: str, life: int) -> None:
    tool = Counting(fail_at=fail_at)
    (result,) = await run(Toolbox([tool]), call("count"))
    assert len(tool.life) == life
    assert result.failure == (None if fail_at == "release" else "raised")


async def test_a_row_may_restrict_the_tools() -> None:
    toolbox = Toolbox([calc, double])
    async with toolbox.session(selection=["twice"]) as tools:
        assert [schema["function"]["name"] for schema in tools.schemas] == ["twice"]
        (result,) = await tools.run([call("calc", '{"answer": "1"}')])
    assert result.response.text == "Error: unknown tool calc; available: twice."


async def test_a_selection_of_tools_that_do_not_exist_is_refused() -> None:
    with pytest.raises(ToolError, match=r"tool_selection names 'calk'.*Did you mean 'calc'\?"):
        await run(Toolbox([calc]), selection=["calk"])


def test_two_tools_of_one_name_are_refused() -> None:
    @function_tool("calc")
    def other(x: int) -> str:
        """Do.

        Args:
            x: Any.
        """
        return ""

    with pytest.raises(ToolError, match=r"Two tools are called 'calc': .*calc and .*other"):
        Toolbox([calc, other])


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", "(truncated)...6789"), ("right", "0123...(truncated)"), ("middle", "01...(truncated)...89")],
)
async def test_long_answers_are_cut(side: Any, expected: str) -> None:
    assert truncate("0123456789", 4, side) == expected
    assert truncate("0123", 4, side) == "0123"


async def test_answers_are_cut_by_tokens_where_that_is_asked_for() -> None:
    words = ["a", "b", "c", "d", "e", "f"]
    toolbox = Toolbox(
        [calc],
        truncation=Truncation(max_length=2, side="right", unit="tokens"),
        encode=lambda text: [ord(letter) for letter in text],
        decode=lambda ids: "".join(map(chr, ids)),
    )
    (result,) = await run(toolbox, call("calc", f'{{"answer": "{words}"}}'))
    assert (result.response.text, result.truncated) == ("ch...(truncated)", True)
    assert toolbox.counts.metrics()["tools/num_truncated"] == 1.0


def test_cutting_by_tokens_needs_a_tokenizer() -> None:
    with pytest.raises(ToolError, match="by tokens only where there is a tokenizer"):
        Toolbox([calc], truncation=Truncation(max_length=2, unit="tokens"))


@pytest.mark.parametrize(
    ("returned", "text", "reward"),
    [
        (ToolResponse(text="a"), "a", 0.0),
        ("a", "a", 0.0),
        ({"é": 1}, '{"é": 1}', 0.0),
        (7, "7", 0.0),
        (("a",), "a", 0.0),
        (("a", None), "a", 0.0),
        (("a", 1), "a", 1.0),
        (("a", 1, {"m": 2}), "a", 1.0),
    ],
)
async def test_functions_may_return_many_things(returned: object, text: str, reward: float) -> None:
    @function_tool
    def give(x: int) -> object:
        """Give.

        Args:
            x: Any.
        """
        return returned

    response, got, _ = await give.execute("", {"x": 1})
    assert (response.text, got) == (text, reward)


@pytest.mark.parametrize("returned", [(), ("a", 1, {}, 2), ("a", "b"), ("a", 1, 2)])
async def test_other_tuples_are_refused(returned: object) -> None:
    @function_tool
    def give(x: int) -> object:
        """Give.

        Args:
            x: Any.
        """
        return returned

    with pytest.raises(TypeError):
        await give.execute("", {"x": 1})


def test_a_function_tool_is_still_a_function() -> None:
    assert calc(answer="1") == "checked '1'"
    assert calc.__name__ == "calc"


def test_images_come_in_lists_and_stand_before_the_text() -> None:
    with pytest.raises(ValueError, match="must be a list"):
        ToolResponse(image="one")  # pyright: ignore[reportArgumentType]
    result = ToolResult(call=call("look", tool_call_id="a"), response=ToolResponse(text="seen", image=["pixels"]))
    assert message_of(result) == {
        "role": "tool",
        "name": "look",
        "tool_call_id": "a",
        "content": [{"type": "image", "image": "pixels"}, {"type": "text", "text": "seen"}],
    }


def test_a_malformed_call_still_has_a_place_in_the_conversation() -> None:
    function = call_message(call("", "{", tool_call_id="a", error="no name"))["function"]
    assert function == {"name": "invalid", "arguments": {}}
