"""Chat templates: what is rendered, what is refused, and what a template wants."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from caravan.errors import UsageError
from caravan.llm import SamplingParams, generate
from caravan.llm.chat import ChatTemplate

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>CALL</call>{% endfor %}<|end|>{% endfor %}"
)
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_the_models_own(model):
    template = ChatTemplate.of(model)
    text = template.render([USER])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    shorter = template.render([USER], add_generation_prompt=False)
    assert text == shorter + "<|im_start|>assistant\n"
    # its end of a turn is a token that ends an answer
    assert template.stop == ()


def test_another_one(model, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}ß", encoding="utf-8")
    assert ChatTemplate.of(model, str(path)).render([USER]) == "hiß"
    assert ChatTemplate.of(model, "{{ messages[0].role }}").render([USER]) == "user"
    assert ChatTemplate.of(model, "{{ eos_token }}").render([USER]) == "<|im_end|>"
    with pytest.raises(UsageError, match=r"cannot read the chat template .*none: No such file"):
        ChatTemplate.of(model, str(tmp_path / "none"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{{")
    with pytest.raises(UsageError, match="cannot read the chat template"):
        ChatTemplate.of(model, str(tmp_path / "bytes"))


def test_a_model_without_one(model, monkeypatch):
    for source in (None, "mistral-v7-tekken"):
        monkeypatch.setattr(model, "chat_template", lambda name="", source=source: source)
        with pytest.raises(UsageError, match="has no chat template"):
            ChatTemplate.of(model)


def test_the_one_for_tools(model, monkeypatch):
    sources = {"": "plain {{ tools }}", "tool_use": "tools {{ tools|tojson }}"}
    monkeypatch.setattr(model, "chat_template", lambda name="": sources[name])
    template = ChatTemplate.of(model)
    assert template.render([USER]) == "plain None"
    assert template.render([USER], tools=[{"x": 1}]) == 'tools [{"x": 1}]'


def test_calls_are_looked_for_as_the_one_for_tools_writes_them():
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = ChatTemplate("{{ 1 }}", tool_source="{{ 1 }}<|python_tag|>")
    calls = template.calls(tools)
    assert calls.feed('<|python_tag|>{"name": "f"}') == []
    (delta,) = calls.finish()
    assert delta.call is not None and delta.call.name == "f"
    assert "parameters" in template.call_grammar(tools, "f")


@pytest.mark.parametrize("name", ["", "weather"])
def test_a_call_that_must_be_is_one(name, context):
    defined = {"City": {"enum": ["Paris", "Rome"]}}
    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": defined,
    }
    function = {"name": "weather", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    tools.append({"type": "function", "function": {"name": "time"}})
    template = ChatTemplate.of(context.model)
    sampling = SamplingParams(temp=0, grammar=template.call_grammar(tools, name))
    prompt = template.render([{"role": "user", "content": "The weather in Rome?"}])
    text = "".join(generate(context, prompt, max_tokens=60, sampling=sampling))
    calls = template.calls(tools)
    (delta,) = calls.feed(text) + calls.finish()
    assert delta.call is not None
    if name or delta.call.name == "weather":
        assert delta.call.name == "weather"
        assert json.loads(delta.call.arguments)["city"] in ("Paris", "Rome")
    with pytest.raises(UsageError, match="no tool 'nobody'"):
        template.call_grammar(tools, "nobody")


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_beginning_is_there_once(add_bos):
    template = ChatTemplate(PLAIN, bos="<s>", add_bos=add_bos)
    text = template.render([USER], add_generation_prompt=False)
    assert text == ("" if add_bos else "<s>") + "<|user|>hi<|end|>"


def test_parts_are_lines_of_a_text():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}])
    assert text == "one\ntwo"
    source = "{% for p in messages[0].content %}{{ p.type }}:{{ p.text }}{% endfor %}"
    assert ChatTemplate(source).render([USER]) == "text:hi"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "there are no messages"),
        ([{"content": "x"}], "an object with a role"),
        (["x"], "an object with a role"),
        ([{"role": 1, "content": "x"}], "an object with a role"),
        ([{"role": "user", "content": 1}], "neither a text nor a list of parts"),
        ([{"role": "user", "content": ["x"]}], "of the type None"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "of the type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "of the type 'text'"),
        ([USER, {**CALLING, "tool_calls": [{}]}], "a call of a tool in the messages is none"),
        ([USER, {**CALLING, "tool_calls": 5}], "a call of a tool in the messages is none"),
    ],
)
def test_messages_that_are_none(messages, words):
    with pytest.raises(UsageError, match=words):
        ChatTemplate(PLAIN).render(messages)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "{{ raise_exception('System  role\nnot supported') }}",
            "says: System role not supported$",
        ),
        ("{{ messages[0].a.b }}", "says: 'dict object' has no attribute 'a'"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 1 + messages }}", "unsupported operand"),
        ("{% if %}", "the chat template is none: Expected an expression"),
        ("{{ x|nothing }}", "is none: No filter named 'nothing'"),
        ("{{ " + "(" * 3000, "the chat template is none"),
    ],
)
def test_the_template_has_the_word(source, words):
    with pytest.raises(UsageError, match=words):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("{{ c.function.arguments|tojson }}", '{"a": "ü"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=ü"),
        ("{% for k, v in c.function.arguments.items() %}'{{ v }}'{% endfor %}", "'ü'"),
        ("{{ '{' + c.function.arguments + '}' }}", '{{"a": "ü"}}'),
        ("{{ c.function.arguments }}", '{"a": "ü"}'),
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": "ü"}', {"a": "ü"}])
def test_earlier_calls_are_written_as_the_template_wants_them(written, shown, arguments):
    template = ChatTemplate(WITH_CALLS.replace("CALL", written))
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    text = template.render([USER, {**CALLING, "tool_calls": [call]}])
    assert text == f"<|user|>hi<|end|><|assistant|><call>{shown}</call><|end|>"


def test_arguments_that_are_no_json():
    call = {**CALL, "function": {"name": "f", "arguments": "{"}}
    template = ChatTemplate(WITH_CALLS.replace("CALL", "{{ c.function.arguments|tojson }}"))
    with pytest.raises(UsageError, match="a call of a tool in the messages is none"):
        template.render([USER, {**CALLING, "tool_calls": [call]}])


def test_a_developer_is_a_system_to_older_templates():
    message = {"role": "developer", "content": "x"}
    assert ChatTemplate(PLAIN).render([message]).startswith("<|system|>x")
    newer = PLAIN.replace("bos_token", "'' if 'developer' else ''")
    assert ChatTemplate(newer).render([message]).startswith("<|developer|>x")


@pytest.mark.parametrize(
    ("source", "stop"),
    [
        (PLAIN, ("<|end|>",)),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ("\nuser:",)),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", ()),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", ()),
        ("{{ raise_exception('') }}", ()),
    ],
)
def test_texts_that_end_an_answer(source, stop):
    assert ChatTemplate(source, eos="</s>").stop == stop
    assert ChatTemplate(source, eos="</s>", ends=lambda text: True).stop == ()


def test_importing_the_package_does_not_import_jinja():
    script = "import caravan.llm.chat, sys; assert 'jinja2' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
