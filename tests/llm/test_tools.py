"""Calls of tools in a stream of text: every form, cut anywhere; what is none is content."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan.errors import UsageError
from caravan.llm.tools import Delta, ToolCalls, call_schema


def tool(name: str, **types: str) -> dict:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city="string", days="integer"), tool("time")]
HERMES, LLAMA, MISTRAL = "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]"
CODER, DEEPSEEK = "<tool_call><function=", "<｜tool▁calls▁begin｜>"
ARGUMENTS = '{"city": "Köln", "days": 2}'
BARE = '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}'
CALL = '{"name": "weather", "arguments": {"city": "Köln", "days": 2}}'
WEATHER = ("weather", {"city": "Köln", "days": 2})
TIME = ("time", {})


def told(deltas: list[Delta]) -> tuple[str, list[tuple[str, dict]]]:
    """Content and calls; a call has an id of its own."""
    calls = [delta.call for delta in deltas if delta.call is not None]
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", call.id) for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    assert all(bool(delta.content) != (delta.call is not None) for delta in deltas)
    content = "".join(delta.content for delta in deltas)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


def split(source: str, *parts: str, tools=TOOLS) -> tuple[str, list[tuple[str, dict]]]:
    calls = ToolCalls(source, tools)
    found = [delta for part in parts for delta in calls.feed(part)]
    return told(found + calls.finish())


FORMS = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
    (HERMES, f"Let me see.\n<tool_call>{CALL}</tool_call>", "Let me see.", [WEATHER]),
    (
        HERMES,
        f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "time"}}\n</tool_call>\n',
        "",
        [WEATHER, TIME],
    ),
    (HERMES, f"<tool_call>{CALL}", "", [WEATHER]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\nSo.", "So.", [WEATHER]),
    (HERMES, f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", [WEATHER, WEATHER]),
    (HERMES, BARE, "", [WEATHER]),
    ("<tool_calls>", f"<tool_calls>[{CALL}]</tool_calls>", "", [WEATHER]),
    ("<tool_calls>", f"<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>", "", [WEATHER, WEATHER]),
    ("<TOOLCALL>", f"<TOOLCALL>[{CALL}]</TOOLCALL>", "", [WEATHER]),
    (LLAMA, BARE, "", [WEATHER]),
    (LLAMA, f"\n\n{BARE}; {BARE}", "", [WEATHER, WEATHER]),
    (LLAMA, f"<|python_tag|>{BARE}", "", [WEATHER]),
    (LLAMA, f"{BARE}\nThere.", "There.", [WEATHER]),
    (LLAMA, '{"type": "function", "function": ' + BARE + "}", "", [WEATHER]),
    (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", [WEATHER]),
    (MISTRAL, f" [{CALL}, {CALL}]", "", [WEATHER, WEATHER]),
    (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", [WEATHER]),
    (MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]a1B2[ARGS]{ARGUMENTS}", "", [WEATHER]),
    (
        MISTRAL,
        f"Now.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}",
        "Now.",
        [WEATHER, TIME],
    ),
    # where the marks are tokens without a text
    (MISTRAL, f"weather{ARGUMENTS}", "", [WEATHER]),
    (MISTRAL, f"weather[ARGS]{ARGUMENTS}", "", [WEATHER]),
    (
        CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        "",
        [WEATHER],
    ),
    (CODER, f"So: <function=weather>{ARGUMENTS}</function>", "So:", [WEATHER]),
    (
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        "",
        [WEATHER],
    ),
    (
        HERMES,
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "",
        [WEATHER],
    ),
    (HERMES, "<tool_call>time</tool_call>", "", [TIME]),
    (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [WEATHER],
    ),
    (
        DEEPSEEK,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        [WEATHER, TIME],
    ),
    (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [WEATHER],
    ),
    ("<|tool_call|>", f"<|tool_call|>[{CALL}]<|/tool_call|>", "", [WEATHER]),
    ("<|function_call|>", f"<|function_call|>{CALL}", "", [WEATHER]),
    (
        "<|START_ACTION|>",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f"{ARGUMENTS}}}\n]<|END_ACTION|>",
        "",
        [WEATHER],
    ),
    # the same where the marks are tokens without a text
    (
        "<|START_ACTION|>",
        f'[\n{{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGUMENTS}}}\n]',
        "",
        [WEATHER],
    ),
    (
        "｜DSML｜",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
        [WEATHER],
    ),
    (
        "<function name=",
        'So <function name="weather"><param name="city">Köln</param>'
        '<param name="days">2</param></function><function name="time"></function>',
        "So",
        [WEATHER, TIME],
    ),
    (
        "<|tool_call>",
        '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>',
        "",
        [WEATHER],
    ),
    ("nothing", f"<tool_call>{CALL}</tool_call>", "", [WEATHER]),
]


@pytest.mark.parametrize(("source", "text", "content", "calls"), FORMS)
def test_every_form_cut_anywhere(source, text, content, calls):
    assert split(source, text) == (content, calls)
    assert split(source, *text) == (content, calls)
    for at in range(len(text)):
        assert split(source, text[:at], text[at:]) == (content, calls)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (HERMES, ""),
        (HERMES, "Just text, with {braces} and <tags>.\n\n"),
        (HERMES, "  indented <tool_cal"),
        (HERMES, "<tool_call>no json</tool_call> and text"),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": }}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": 3}</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": "x"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "argum'),
        (HERMES, "a <tool_call> b <tool_call> c"),
        (HERMES, "</tool_call>"),
        (HERMES, "\n \n"),
        (LLAMA, '{"name": "nobody", "parameters": {}}'),
        (LLAMA, '{"city": "Köln"}'),
        (LLAMA, '{"name": "weather"'),
        (LLAMA, "[1] a list"),
        (LLAMA, "[" * 5000),
        (LLAMA, '{"name": ' * 5000),
        (LLAMA, "{}"),
        (MISTRAL, "weather is what we talk about"),
        (MISTRAL, "weather[ARG"),
        (MISTRAL, "[TOOL_CALLS]nothing"),
        (MISTRAL, "[TOOL_CALLS"),
        (CODER, "<function=weather>\nwords</function>"),
        (CODER, "<function=weather"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>"),
    ],
)
def test_what_is_no_call_is_content_to_the_letter(source, text):
    assert split(source, text) == (text, [])
    assert split(source, *text) == (text, [])


def test_a_mark_inside_of_the_arguments():
    arguments = {"city": '</tool_call> \\ " {', "days": 2}
    written = json.dumps({"name": "weather", "arguments": arguments})
    text = f"<tool_call>{written}</tool_call> done"
    for parts in ([text], [*text]):
        assert split(HERMES, *parts) == ("done", [("weather", arguments)])


def test_malformed_and_sound_calls_side_by_side():
    text = f"<tool_call>oops</tool_call>\n<tool_call>{CALL}</tool_call>"
    for parts in ([text], [*text]):
        assert split(HERMES, *parts) == ("<tool_call>oops</tool_call>", [WEATHER])


def test_values_without_quotes_are_what_the_schema_says():
    tools = [tool("f", text="string", number="number", flag="boolean")]
    written = "".join(
        f"<parameter={key}>\n{value}\n</parameter>"
        for key, value in (("text", "12"), ("number", "1.5"), ("flag", "true"), ("other", "[1"))
    )
    text = f"<tool_call><function=f>{written}</function></tool_call>"
    expected = {"text": "12", "number": 1.5, "flag": True, "other": "[1"}
    assert split(CODER, text, tools=tools) == ("", [("f", expected)])


def test_texts_between_other_quotes():
    text = '<|tool_call>call:f{a:[<|"|>x, y: "z"<|"|>,{b:true}],c:{}}<tool_call|>'
    expected = {"a": ['x, y: "z"', {"b": True}], "c": {}}
    assert split("<|tool_call>", text) == ("", [("f", expected)])


def test_text_is_not_held_longer_than_it_must_be():
    calls = ToolCalls(HERMES, TOOLS)
    assert calls.feed("It is") == [Delta("It is")]
    assert calls.feed(" 5 <") == [Delta(" 5")]
    assert calls.feed(" 6 ") == [Delta(" < 6")]
    assert calls.feed("<tool_") == []
    assert calls.feed("x") == [Delta(" <tool_x")]
    assert ToolCalls(HERMES, TOOLS).feed('{"city": ') == [Delta('{"city":')]
    assert ToolCalls(LLAMA, TOOLS).feed('{"na') == []


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", CALL, BARE, "[TOOL_CALLS]", "weather", "[ARGS]", "{}"),
        *("{", "}", "[", "]", '"', "\\", " ", "\n", "text", "<function=weather>", "</function>"),
        *("<", ";", '"name"', ": "),
    ]
)


@given(st.lists(PIECES, max_size=12), st.sampled_from([HERMES, LLAMA, MISTRAL, CODER]), st.data())
def test_any_text_cut_anywhere_is_the_same(parts, source, data):
    text = "".join(parts)
    whole = split(source, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    places = [0, *cuts, len(text)]
    cut = [text[a:b] for a, b in itertools.pairwise(places)]
    assert split(source, *cut) == whole
    if not whole[1]:
        assert whole[0] == text


# calls that must be


def test_the_schema_of_a_call():
    schema = call_schema(HERMES, TOOLS, "time")
    assert schema["properties"] == {"name": {"const": "time"}, "arguments": {"$ref": "#/$defs/0"}}
    assert schema["$defs"] == {"0": {"type": "object", "properties": {}}}
    names = [one["properties"]["name"]["const"] for one in call_schema(LLAMA, TOOLS)["anyOf"]]
    assert names == ["weather", "time"]
    assert "parameters" in call_schema(LLAMA, TOOLS, "time")["required"]
    for name, tools in (("nobody", TOOLS), ("", [])):
        with pytest.raises(UsageError, match=r"there (is no tool 'nobody'|are no tools)"):
            call_schema(HERMES, tools, name)


def test_what_a_schema_refers_to_in_itself():
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}, "b": [{"$ref": "#"}]},
        "$defs": {"A": {"type": "string"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    moved = call_schema(HERMES, tools, "f")["$defs"]["0"]
    assert moved["properties"] == {"a": {"$ref": "#/$defs/0/$defs/A"}, "b": [{"$ref": "#/$defs/0"}]}
