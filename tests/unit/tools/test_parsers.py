"""Tool-call formats: golden tables, round trips, and that nothing a model writes raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrl_lite.errors import PluginError, UnknownNameError
from xrl_lite.tools import FunctionCall, ParsedResponse, ToolParser, ToolSchema
from xrl_lite.tools.parsers import PARSERS

NINE = ["hermes", "gpt-oss", "qwen3_coder", "glm", "seed", "minimax", "kimi", "deepseek", "gemma"]


def tool(name: str, required: list[str], **properties: str) -> ToolSchema:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": required,
    }
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [
    tool("add", ["x", "y"], x="integer", y="number"),
    tool("find", ["query"], query="string", options="object", tags="array", exact="boolean"),
]


def parse(name: str, text: str) -> ParsedResponse:
    return ToolParser.get_tool_parser(name).parse(text, TOOLS)


def call(name: str, call_id: str | None = None, **arguments: Any) -> FunctionCall:
    return FunctionCall(name, json.dumps(arguments, ensure_ascii=False), call_id)


D = "｜DSML｜"
Q = '<|"|>'
NESTED = {"query": "a", "options": {"deep": [1, {"k": "v"}]}}
GOLDEN: list[tuple[str, str, str, str, list[FunctionCall]]] = [
    # --- hermes
    (
        "hermes",
        "text around",
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>\nDone.',
        "I add.\n\nDone.",
        [call("add", x=1, y=2)],
    ),
    (
        "hermes",
        "two calls",
        '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
        '<tool_call>{"name": "find", "arguments": {"query": "b"}}</tool_call>',
        "",
        [call("add", x=1), call("find", query="b")],
    ),
    (
        "hermes",
        "nested JSON",
        '<tool_call>{"name": "find", "arguments": ' + json.dumps(NESTED) + "}</tool_call>",
        "",
        [call("find", **NESTED)],
    ),
    ("hermes", "missing end tag", '<tool_call>{"name": "add", "arguments": {"x": 1}}', "", [call("add", x=1)]),
    (
        "hermes",
        "arguments as a JSON text (T2)",
        '<tool_call>{"name":"find","arguments":"{\\"query\\": \\"72\\"}"}</tool_call>',
        "",
        [call("find", query="72")],
    ),
    (
        "hermes",
        "end tag inside an argument",
        '<tool_call>{"name": "find", "arguments": {"query": "</tool_call>"}}</tool_call>',
        "",
        [call("find", query="</tool_call>")],
    ),
    (
        "hermes",
        "a list of calls",
        '<tool_call>[{"name": "add", "arguments": {"x": 1}}, {"name": "add", "arguments": {"x": 2}}]</tool_call>',
        "",
        [call("add", x=1), call("add", x=2)],
    ),
    ("hermes", "no call", "It is 7.\n", "It is 7.\n", []),
    # --- gpt-oss
    (
        "gpt-oss",
        "text around",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        "I add.",
        [call("add", x=1)],
    ),
    (
        "gpt-oss",
        "recipient behind the channel",
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>',
        "",
        [call("add", x=1)],
    ),
    (
        "gpt-oss",
        "two calls, nested JSON",
        f" to=functions.find<|channel|>commentary json<|message|>{json.dumps(NESTED)}<|call|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"x": 2}<|call|>',
        "",
        [call("find", **NESTED), call("add", x=2)],
    ),
    (
        "gpt-oss",
        "missing end tag",
        ' to=functions.add<|channel|>commentary json<|message|>{"x": 1}',
        "",
        [call("add", x=1)],
    ),
    ("gpt-oss", "an answer", "<|channel|>final<|message|>It is 7.<|return|>", "It is 7.", []),
    # --- qwen3_coder
    (
        "qwen3_coder",
        "text around, types from the schema",
        "I add.\n<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\n2.5\n</parameter>\n"
        "</function>\n</tool_call>",
        "I add.",
        [call("add", x=1, y=2.5)],
    ),
    (
        "qwen3_coder",
        "two calls",
        "<tool_call><function=find><parameter=query>3</parameter></function></tool_call>\n"
        "<tool_call><function=find><parameter=query>\n\nlines\n\n</parameter><parameter=exact>True</parameter>"
        "</function></tool_call>",
        "",
        [call("find", query="3"), call("find", query="\nlines\n", exact=True)],
    ),
    (
        "qwen3_coder",
        "nested JSON and literals",
        '<tool_call><function=find><parameter=query>a</parameter><parameter=options>{"deep": [1, {"k": "v"}]}'
        "</parameter><parameter=tags>['a', 'b']</parameter></function></tool_call>",
        "",
        [call("find", query="a", options=NESTED["options"], tags=["a", "b"])],
    ),
    (
        "qwen3_coder",
        "missing end tags",
        "<tool_call><function=add><parameter=x>1<parameter=y>2",
        "",
        [call("add", x=1, y=2)],
    ),
    (
        "qwen3_coder",
        "null",
        "<tool_call><function=add><parameter=x>null</parameter></function></tool_call>",
        "",
        [call("add", x=None)],
    ),
    # --- glm
    (
        "glm",
        "text around, thought left out",
        "<think>Hm.</think>I look.\n<tool_call>find\n<arg_key>query</arg_key>\n<arg_value>72</arg_value>\n"
        "<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        "I look.",
        [call("find", query="72", exact=True)],
    ),
    (
        "glm",
        "two calls",
        "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "",
        [call("add", x=1), call("add", x=2)],
    ),
    (
        "glm",
        "nested JSON",
        "<tool_call>find<arg_key>query</arg_key><arg_value>a</arg_value><arg_key>options</arg_key>"
        '<arg_value>{"deep": [1, {"k": "v"}]}</arg_value></tool_call>',
        "",
        [call("find", **NESTED)],
    ),
    ("glm", "missing end tag", "<tool_call>add<arg_key>x</arg_key><arg_value>1", "", [call("add", x=1)]),
    ("glm", "no arguments", "<tool_call>add</tool_call>", "", [call("add")]),
    # --- seed
    (
        "seed",
        "text around",
        "I add.<seed:tool_call><function=add><parameter=x>1</parameter></function></seed:tool_call>",
        "I add.",
        [call("add", x=1)],
    ),
    (
        "seed",
        "two calls, nested JSON",
        '<seed:tool_call><function=find><parameter=query>a</parameter><parameter=options>{"deep": [1, {"k": "v"}]}'
        "</parameter></function></seed:tool_call>"
        "<seed:tool_call><function=add><parameter=x>1</parameter></function></seed:tool_call>",
        "",
        [call("find", **NESTED), call("add", x=1)],
    ),
    ("seed", "missing end tag", "<seed:tool_call><function=add><parameter=x>1</parameter>", "", [call("add", x=1)]),
    # --- minimax
    (
        "minimax",
        "text around, two calls in a block",
        'I add.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="x">1</parameter>\n</invoke>\n'
        '<invoke name="find">\n<parameter name="query">7</parameter>\n</invoke>\n</minimax:tool_call>',
        "I add.",
        [call("add", x=1), call("find", query="7")],
    ),
    (
        "minimax",
        "nested JSON, missing end tag",
        '<minimax:tool_call><invoke name="find"><parameter name="query">a</parameter>'
        '<parameter name="options">{"deep": [1, {"k": "v"}]}</parameter>',
        "",
        [call("find", **NESTED)],
    ),
    # --- kimi
    (
        "kimi",
        "text around, two calls",
        "I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"x": 1}<|tool_call_end|><|tool_call_begin|>functions.find:1<|tool_call_argument_begin|>'
        '{"query": "b"}<|tool_call_end|><|tool_calls_section_end|>',
        "I add.",
        [call("add", "functions.add:0", x=1), call("find", "functions.find:1", query="b")],
    ),
    (
        "kimi",
        "an id that only contains the name, nested JSON, missing end",
        "<|tool_calls_section_begin|><|tool_call_begin|>call_find_9<|tool_call_argument_begin|>" + json.dumps(NESTED),
        "",
        [call("find", "call_find_9", **NESTED)],
    ),
    (
        "kimi",
        "an id without a name",
        '<|tool_calls_section_begin|><|tool_call_begin|>c1<|tool_call_argument_begin|>{"x": 1, "y": 2}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [call("add", "c1", x=1, y=2)],
    ),
    # --- deepseek
    (
        "deepseek",
        "text behind the thought, two calls",
        f'Hm.</think>I add.<{D}tool_calls>\n<{D}invoke name="add">\n<{D}parameter name="x" string="false">1'
        f'</{D}parameter>\n</{D}invoke>\n<{D}invoke name="find">\n<{D}parameter name="query" string="true">7'
        f"</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>",
        "I add.",
        [call("add", x=1), call("find", query="7")],
    ),
    (
        "deepseek",
        "nested JSON, raw where it is none, missing end tag",
        f'<{D}tool_calls><{D}invoke name="find"><{D}parameter name="options" string="false">'
        f'{{"deep": [1, {{"k": "v"}}]}}</{D}parameter><{D}parameter name="query" string="false">a b</{D}parameter>',
        "",
        [call("find", options=NESTED["options"], query="a b")],
    ),
    # --- gemma
    (
        "gemma",
        "text around, two calls",
        "I add.<|tool_call>call:add{x:1,y:2.5}<tool_call|>"
        f"<|tool_call>call:find{{query:{Q}a, b}}{Q},exact:true}}<tool_call|>",
        "I add.",
        [call("add", x=1, y=2.5), call("find", query="a, b}", exact=True)],
    ),
    (
        "gemma",
        "nested values, missing end",
        f"<|tool_call>call:find{{query:{Q}a{Q},options:{{deep:[1,{{k:{Q}v{Q}}}]}}}}",
        "",
        [call("find", **NESTED)],
    ),
    (
        "gemma",
        "bare values",
        "<|tool_call>call:find{query:word,exact:null}<tool_call|>",
        "",
        [call("find", query="word", exact=None)],
    ),
]


@pytest.mark.parametrize(("name", "case", "text", "content", "calls"), GOLDEN, ids=lambda value: str(value)[:30])
def test_golden(name: str, case: str, text: str, content: str, calls: list[FunctionCall]) -> None:
    parsed = parse(name, text)
    assert list(parsed.calls) == calls
    assert parsed.content == content


LONG = "9" * 5000
"""A number that Python does not read: int() has a limit of 4300 digits."""
DEEP = "[" * 3000 + "]" * 3000
MALFORMED: list[tuple[str, str, str, str]] = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": "1"', "add", "not valid JSON"),  # T1
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "", "no name"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add", "must be a JSON object"),
    ("hermes", '<tool_call>{"name": "add", "arguments": "x"}</tool_call>', "add", "not valid JSON"),
    ("hermes", "<tool_call>7</tool_call>", "", "must be a JSON object"),
    ("hermes", "<tool_call></tool_call>", "", "not valid JSON"),
    ("gpt-oss", " to=functions.add<|channel|>commentary json<|message|>{x<|call|>", "add", "not valid JSON"),
    ("qwen3_coder", "<tool_call><function=add", "", "not complete"),
    ("qwen3_coder", "<tool_call>add(1)</tool_call>", "", "no <function="),
    ("qwen3_coder", "<tool_call><function=add><parameter=x</function></tool_call>", "add", "not complete"),
    ("glm", "<tool_call>add<arg_key>x</arg_key></tool_call>", "add", "do not pair up"),
    ("glm", '<tool_call>{"name": "add"}</tool_call>', "", "does not begin with the name"),
    ("seed", "<seed:tool_call></seed:tool_call>", "", "no <function="),
    ("minimax", "<minimax:tool_call><invoke name=</minimax:tool_call>", "", "not complete"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_end|>", "", "no arguments"),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{x",
        "add",
        "not valid JSON",
    ),
    ("deepseek", f'<{D}tool_calls><{D}invoke name="add"><{D}parameter name="x', "add", "not complete"),
    ("gemma", f"<|tool_call>call:add{{x:{Q}1", "add", "no closing quote"),
    ("gemma", "<|tool_call>add(1)<tool_call|>", "", "does not begin with call:"),
    ("gemma", "<|tool_call>call:add{" + "x:{" * 200, "add", "brackets"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": ' + LONG + "}}</tool_call>", "add", "too many digits"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": ' + DEEP + "}}</tool_call>", "add", "brackets"),
    ("gpt-oss", ' to=functions.add<|message|>{"x": ' + LONG + "}<|call|>", "add", "too many digits"),
    ("gpt-oss", ' to=functions.add<|message|>{"x": ' + DEEP + "}<|call|>", "add", "brackets"),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>other<|tool_call_argument_begin|>" + f'{{"x": {LONG}}}',
        "other",
        "too many digits",
    ),
]


@pytest.mark.parametrize(("name", "text", "called", "reason"), MALFORMED)
def test_a_malformed_call_is_a_call_with_an_error(name: str, text: str, called: str, reason: str) -> None:
    (found,) = parse(name, text).calls
    assert found.name == called
    assert found.error is not None
    assert reason in found.error
    assert found.parameters == {}


def test_the_nine_formats_are_there() -> None:
    assert set(NINE) <= set(PARSERS)


@pytest.mark.parametrize("name", NINE)
def test_text_without_calls_is_left_alone(name: str) -> None:
    assert parse(name, " It is\n7. ") == ParsedResponse(" It is\n7. ")


def test_an_unknown_format_is_refused_with_what_there_is() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown tool parser 'herms'. Did you mean 'hermes'\?.*'qwen3_coder'"):
        ToolParser.get_tool_parser("herms")


def test_a_format_of_ones_own_is_registered_once() -> None:
    @ToolParser.register("test_shout")
    class ShoutParser(ToolParser):
        def parse(self, text: str, tools: Any) -> ParsedResponse:
            return ParsedResponse(text.upper())

    assert ToolParser.get_tool_parser("test_shout").parse("a", []).content == "A"
    with pytest.raises(PluginError, match="'test_shout' is taken"):
        ToolParser.register("test_shout")(type("Other", (ShoutParser,), {}))


async def test_tokens_are_decoded_as_the_format_needs() -> None:
    class Letters:
        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            special = "" if skip_special_tokens else "<|call|>"
            return ' to=functions.add<|channel|>c<|message|>{"x": 1}' + special

    parser = ToolParser.get_tool_parser("gpt-oss", Letters())
    assert await parser.extract_tool_calls([1], TOOLS) == ("", [call("add", x=1)])


# --- round trips

WORD = st.text(st.sampled_from("abcxyz_"), min_size=1, max_size=6)
TEXT = st.text(st.sampled_from("ab <>{}[]\"'\\:,.é汉7\n-"), max_size=15)
SCALARS = TEXT | st.integers(-(10**6), 10**6) | st.booleans() | st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3))
NAMED = st.dictionaries(WORD, JSON, max_size=4)


def schema_for(name: str, arguments: dict[str, Any]) -> ToolSchema:
    """A tool whose schema knows the types: formats without quotes need them."""
    kinds = {str: "string", int: "integer", bool: "boolean", float: "number", list: "array", dict: "object"}
    return tool(name, [], **{key: kinds[type(value)] for key, value in arguments.items()})


@settings(max_examples=15, deadline=None)
@given(calls=st.lists(st.tuples(WORD, NAMED), min_size=1, max_size=3, unique_by=lambda call: call[0]), before=WORD)
@pytest.mark.parametrize("name", NINE)
def test_what_is_rendered_is_parsed_again(name: str, calls: list[tuple[str, dict[str, Any]]], before: str) -> None:
    parser = ToolParser.get_tool_parser(name)
    tools = [schema_for(*each) for each in calls]
    written = parser.render([call(called, **arguments) for called, arguments in calls])
    head = f"<|channel|>commentary<|message|>{before}<|end|><|start|>assistant" if name == "gpt-oss" else before
    parsed = parser.parse(head + written, tools)
    read = [(found.name, found.parameters) for found in parsed.calls]
    assert read == [(called, without_outer_breaks(name, arguments)) for called, arguments in calls]
    assert parsed.content == before


def without_outer_breaks(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Formats with tags may take one line break at each end of a text for layout."""
    if name not in ("minimax", "deepseek"):
        return arguments
    return {
        key: value.removeprefix("\n").removesuffix("\n") if isinstance(value, str) else value
        for key, value in arguments.items()
    }


PIECES = f"""<tool_call> </tool_call> <function= add > <parameter=x> </parameter> </function> {{ }} "name" : "add" ,
"arguments" <seed:tool_call> </seed:tool_call> <minimax:tool_call> <|tool_call_begin|> <|tool_calls_section_begin|>
<|tool_call_argument_begin|> <|start|>assistant to=functions.add <|message|> <|call|> <arg_key> </arg_key> <arg_value>
</arg_value> <invoke <parameter name="add"> name="x"> <{D}tool_calls> <{D}invoke <{D}parameter 1 <|tool_call>
call:add{{ {Q} <tool_call|> x: [ ] null \\ é"""
HARD = (
    LONG,
    "0x" + "f" * 5000,
    "1e999",
    "NaN",
    DEEP,
    "[" * 990 + "]" * 990,
    '{"x":' * 3000,
    "[{1}]",
    "[b'a']",
    "{(1,): 2}",
)
FRAGMENTS = st.sampled_from([*PIECES.split(), " ", "\n", *HARD])


@settings(max_examples=30, deadline=None)
@given(text=st.lists(FRAGMENTS, max_size=25).map("".join))
@pytest.mark.parametrize("name", NINE)
def test_nothing_a_model_writes_raises(name: str, text: str) -> None:
    for found in parse(name, text).calls:
        assert found.error or isinstance(json.loads(found.arguments), dict)


def written_call(name: str, value: str) -> str:
    """A call of `add` with one argument as it stands."""
    return {
        "hermes": f'<tool_call>{{"name": "add", "arguments": {{"x": {value}}}}}</tool_call>',
        "gpt-oss": f' to=functions.add<|message|>{{"x": {value}}}<|call|>',
        "qwen3_coder": f"<tool_call><function=add><parameter=x>{value}</parameter></function></tool_call>",
        "glm": f"<tool_call>add<arg_key>x</arg_key><arg_value>{value}</arg_value></tool_call>",
        "seed": f"<seed:tool_call><function=add><parameter=x>{value}</parameter></function></seed:tool_call>",
        "minimax": f"<minimax:tool_call><invoke name=add><parameter name=x>{value}</parameter></invoke>",
        "kimi": f'<|tool_calls_section_begin|><|tool_call_begin|>a<|tool_call_argument_begin|>{{"x":{value}}}',
        "deepseek": f"<{D}tool_calls><{D}invoke name='add'><{D}parameter name='x' string='false'>{value}",
        "gemma": f"<|tool_call>call:add{{x:{value}}}<tool_call|>",
    }[name]


@pytest.mark.parametrize("kind", ["integer", "number", "string", "boolean", "array", "object", "null", "thing"])
@pytest.mark.parametrize("name", NINE)
def test_no_value_in_a_well_formed_call_raises(name: str, kind: str) -> None:
    parser, schema = ToolParser.get_tool_parser(name), tool("add", ["x"], x=kind)
    for value in HARD:
        (found,) = parser.parse(written_call(name, value), [schema]).calls
        assert found.checked().error or isinstance(found.parameters, dict)


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("hermes", '<tool_call>{"name": '),
        ("hermes", "<tool_call>{}x"),
        ("qwen3_coder", "<tool_call><function=a>"),
        ("glm", "<tool_call></tool_call>"),
        ("gemma", "<|tool_call>call:a{<tool_call|>"),
    ],
)
def test_thousands_of_calls_that_are_not_closed_take_no_long_time(name: str, piece: str) -> None:
    """As below: to look through the rest of the text for each of them would take longer than a test may."""
    num_calls = 50_000
    assert len(ToolParser.get_tool_parser(name).parse(piece * num_calls, TOOLS).calls) >= num_calls - 1


def test_space_in_a_tag_takes_no_long_time() -> None:
    (found,) = parse("minimax", "<minimax:tool_call><invoke name=" + " " * 100_000).calls
    assert found.error is not None


@pytest.mark.parametrize("name", NINE)
def test_long_texts_take_no_long_time(name: str) -> None:
    """What looked at the rest of the text again for each piece would take minutes, which a test does not have."""
    parser = ToolParser.get_tool_parser(name)
    head = parser.call_marks[0] if parser.call_marks else "<|message|><|end|>"
    for piece in [*PIECES.split(), "<arg_key>x</arg_key>", "x", "<arg_key></arg_key>"]:
        parser.parse(f"{head}add" + piece * (20_000 // len(piece)), TOOLS)
