"""Chats, as the official client has them."""

from __future__ import annotations

import json

import openai
import pytest

from caravan.errors import UsageError
from caravan.serve import fields, responding
from serve.fakes import FakeService

HELLO = [{"role": "user", "content": "hello"}]
ANSWER = "USER:HELLO\n"


def chat(client: openai.OpenAI, **options):
    return client.chat.completions.create(**{"model": "fake", "messages": HELLO, **options})


def test_a_chat_is_answered(client, served):
    answer = chat(client, messages=[{"role": "system", "content": "be nice"}, *HELLO])
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "SYSTEM:BE NICE\n" + ANSWER
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.id.startswith("chatcmpl-")
    # one more begins the sequence
    prompt, gen = 1 + len("system:be nice\nuser:hello\n"), len(choice.message.content)
    assert answer.usage.model_dump(exclude_unset=True) == {
        "prompt_tokens": prompt,
        "completion_tokens": gen,
        "total_tokens": prompt + gen,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert answer.timings["prompt_n"] == prompt - 3
    assert answer.timings["predicted_n"] == gen


def test_a_stream_has_the_same_text(client):
    with chat(client, stream=True) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_tells_what_it_has_taken_if_it_is_asked_to(client):
    with chat(client, stream=True, stream_options={"include_usage": True}) as stream:
        *_, last = stream
    assert last.choices == []
    assert last.usage.completion_tokens == len(ANSWER)
    assert last.usage.prompt_tokens_details.cached_tokens == 3


def test_several_choices_share_a_prompt_and_run_at_the_same_time(client, served, monkeypatch):
    # what is held back does not hold back the headers
    monkeypatch.setattr(responding, "_FIRST_SECONDS", 0.01)
    served.service.batcher.hold()
    with chat(client, n=3, seed=7, stream=True) as stream:
        served.service.batcher.wait_for(lambda: served.service.batcher.n_busy == 3)
        served.service.batcher.go()
        texts = ["", "", ""]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == [ANSWER] * 3
    assert [request.sampling.seed for request in served.service.batcher.requests] == [7, 8, 9]
    answer = chat(client, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.prompt_tokens == 1 + len("user:hello\n")
    assert answer.usage.completion_tokens == 2 * len(ANSWER)


def test_the_parameters_reach_the_batcher(client, served):
    chat(
        client,
        max_tokens=3,
        temperature=0.5,
        top_p=0.25,
        seed=1 << 40,
        stop=["X", "Y"],
        user="somebody",
        metadata={"ignored": "yes"},
        extra_body={"top_k": 5, "min_p": 0.125, "repeat_penalty": 1.5, "unknown": [1]},
    )
    (request,) = served.service.batcher.requests
    sampling = request.sampling
    assert request.max_tokens == 3
    assert request.stop == ("X", "Y")
    assert (sampling.temp, sampling.top_p, sampling.top_k) == (0.5, 0.25, 5)
    assert (sampling.min_p, sampling.repeat_penalty) == (0.125, 1.5)
    assert sampling.seed == (1 << 40) % 0xFFFFFFFF


def test_what_a_request_does_not_say_is_the_servers(client, served):
    chat(client, extra_body={"temperature": None, "stop": None, "seed": -1, "top_k": -1})
    (request,) = served.service.batcher.requests
    assert request.sampling.temp == served.service.sampling.temp
    assert request.sampling.seed is None
    assert request.sampling.top_k == 0
    assert (request.max_tokens, request.stop, request.logprobs) == (-1, (), None)


def test_stop_texts_and_lengths_end_an_answer(client):
    stopped = chat(client, stop="HE")
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
        "USER:",
        "stop",
    )
    cut = chat(client, max_completion_tokens=2, max_tokens=5)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("US", "length")


def test_stop_texts_of_the_template_are_among_them(client, served):
    served.service.template.stop = ("<end>",)
    chat(client, stop="X")
    assert served.service.batcher.requests[0].stop == ("<end>", "X")


def test_characters_of_several_tokens_come_whole(client, served):
    served.service.batcher.answer = lambda request: "ä€😀"
    assert chat(client).choices[0].message.content == "ä€😀"
    with chat(client, stream=True) as stream:
        texts = [c.choices[0].delta.content for c in stream if c.choices[0].delta.content]
    assert texts == ["ä", "€", "😀"]


def test_contents_of_several_texts_are_joined(client, served):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = chat(client, messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "USER:ONE\nTWO\n"


def test_the_template_gets_what_it_needs(client, served):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    chat(client, messages=messages, extra_body={"chat_template_kwargs": {"thinking": False}})
    (seen,) = served.service.template.seen
    assert seen == {"messages": messages, "tools": [], "thinking": False}


# logprobs


def test_logprobs(client):
    answer = chat(client, logprobs=True, top_logprobs=2, max_tokens=2)
    told = answer.choices[0].logprobs.content
    assert [(t.token, t.logprob, t.bytes) for t in told] == [("U", -0.5, [85]), ("S", -0.5, [83])]
    assert [(t.token, t.logprob) for t in told[0].top_logprobs] == [("U", -0.5), ("V", -1.5)]


def test_logprobs_of_a_stream_are_those_of_all_its_tokens(client):
    with chat(client, logprobs=True, stream=True, stop="O\n") as stream:
        chunks = list(stream)
    told = [t.token for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert "".join(told) == ANSWER
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "USER:HELL"


def test_alternatives_need_logprobs(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, top_logprobs=2)
    assert caught.value.param == "top_logprobs"


# response_format


def test_formats_become_grammars(client, served, monkeypatch):
    monkeypatch.setattr(fields, "json_grammar", lambda: "any")
    monkeypatch.setattr(fields, "json_schema_grammar", lambda schema: json.dumps(schema))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for wanted, grammar in (
        ({"type": "text"}, ""),
        ({"type": "json_object"}, "any"),
        ({"type": "json_object", "schema": schema}, json.dumps(schema)),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            json.dumps(schema),
        ),
    ):
        chat(client, response_format=wanted)
        assert served.service.batcher.requests[-1].sampling.grammar == grammar
    chat(client, extra_body={"grammar": "root ::= [a-z]"})
    assert served.service.batcher.requests[-1].sampling.grammar == "root ::= [a-z]"


def test_formats_that_cannot_be_are_refused(client, monkeypatch):
    def unsupported(schema):
        raise UsageError("$.a: the keyword 'not' is not supported")

    monkeypatch.setattr(fields, "json_schema_grammar", unsupported)
    for wanted, word in (
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, "'not'"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema is missing"),
        ({"type": "json_schema"}, "schema is missing"),
        ({"type": "xml"}, "response_format.type"),
    ):
        with pytest.raises(openai.BadRequestError, match=word) as caught:
            chat(client, response_format=wanted)
        assert caught.value.param.startswith("response_format")
    with pytest.raises(openai.BadRequestError) as caught:
        both = {"grammar": "root ::= [a]", "response_format": {"type": "json_object"}}
        chat(client, extra_body=both)
    assert caught.value.param == "grammar"


# tools

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_calls_of_tools_are_taken_out_of_the_text(client, served):
    served.service.batcher.answer = lambda request: 'so <add {"a":1}><sub {}>'
    answer = chat(client, tools=[TOOL])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "so "
    assert [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("call_1", "add", '{"a":1}'),
        ("call_2", "sub", "{}"),
    ]
    assert served.service.template.seen[0]["tools"] == [TOOL]
    (one,) = chat(client, tools=[TOOL], parallel_tool_calls=False).choices
    assert [c.function.name for c in one.message.tool_calls] == ["add"]


def test_calls_of_tools_in_a_stream(client, served):
    served.service.batcher.answer = lambda request: 'so <add {"a":1}><sub {}>'
    with chat(client, tools=[TOOL], stream=True) as stream:
        chunks = list(stream)
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls] == [(0, "add"), (1, "sub")]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "so "


def test_without_calls_the_whole_text_is_there(client, served):
    served.service.batcher.answer = lambda request: "a < b"
    for stream in (False, True):
        if stream:
            with chat(client, tools=[TOOL], stream=True) as chunks:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = chat(client, tools=[TOOL]).choices[0].message.content
        assert text == "a < b"


def test_tools_that_are_not_to_be_used_are_not_told_of(client, served):
    chat(client, tools=[TOOL], tool_choice="none")
    assert served.service.template.seen[0]["tools"] == []


ADD = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("choice", "grammar"), [("required", "a call of ['add']"), (ADD, "a call of add")]
)
def test_an_answer_that_has_to_be_a_call_has_a_grammar(choice, grammar, client, served):
    served.service.batcher.answer = lambda request: '<add {"a":1}>'
    (chosen,) = chat(client, tools=[TOOL], tool_choice=choice).choices
    assert served.service.batcher.requests[0].sampling.grammar == grammar
    assert chosen.finish_reason == "tool_calls"
    assert chosen.message.content is None


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        {"tools": [TOOL], "tool_choice": ADD, "response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "perhaps"},
    ],
)
def test_choices_of_tools_that_cannot_be_kept_are_refused(options, client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    assert caught.value.param == "tool_choice"


def test_a_model_without_template_has_no_chats(served, client):
    served.service.template = None
    with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
        chat(client)
    assert caught.value.code == "no_chat_template"


def test_what_the_template_refuses_is_the_clients_fault(client):
    with pytest.raises(openai.BadRequestError, match="does not begin with a tool") as caught:
        chat(client, messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}])
    assert caught.value.param == "messages"


def test_the_rendered_chat_can_be_seen(served):
    reply = served.post("/apply-template", {"messages": HELLO})
    assert reply.json() == {"prompt": "user:hello\n"}
    assert isinstance(served.service, FakeService)
