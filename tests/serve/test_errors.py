"""Whatever goes wrong is told in OpenAI's format, with the right status."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from caravan.batching import Request as BatchRequest
from caravan.errors import ConnectionClosed, DecodeError, NothingAllowed, QueueFull, WorkerLost
from serve.fakes import FakeBatcher, FakeService
from serve.serving import serving

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
JSON = {"content-type": "application/json"}
LOST = WorkerLost("lab1:50052", "RPC0", "decode", ConnectionClosed("gone"))


def error_of(reply: httpx.Response) -> dict:
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("messages", {}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "hello"}),
        ("messages[0].role", {"messages": [{"role": "king", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        (
            "messages[0].content",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        ),
        ("temperature", {**CHAT, "temperature": -1}),
        ("temperature", {**CHAT, "temperature": "hot"}),
        ("top_p", {**CHAT, "top_p": 1.5}),
        ("n", {**CHAT, "n": 0}),
        ("stop", {**CHAT, "stop": 5}),
        ("stop", {**CHAT, "stop": ["x"] * 65}),
        ("stop", {**CHAT, "stop": "x" * 257}),
        ("repeat_last_n", {**CHAT, "repeat_last_n": (1 << 16) + 1}),
        ("logit_bias.x", {**CHAT, "logit_bias": {"x": 1}}),
        ("top_logprobs", {**CHAT, "logprobs": True, "top_logprobs": 21}),
        ("presence_penalty", {**CHAT, "presence_penalty": 3}),
        ("tools[0].type", {**CHAT, "tools": [{"type": "magic"}]}),
        ("chat_template_kwargs.tools", {**CHAT, "chat_template_kwargs": {"tools": 1}}),
    ],
)
def test_wrong_fields_are_named(param, body, served):
    reply = served.post("/v1/chat/completions", body)
    assert reply.status_code == 400
    error = error_of(reply)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_an_empty_list_is_called_so(served):
    error = error_of(served.post("/v1/chat/completions", {"messages": []}))
    assert error["message"] == "messages: is empty"
    assert served.service.batcher.requests == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"", 415, None),
        (b"\xff\xfe", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 6000 + b"}", 400, "invalid_json"),
        (b"[]", 400, None),
        (b'{"prompt": "a", "temperature": NaN}', 400, None),
    ],
)
def test_bodies_that_are_none(body, status, code, served):
    headers = JSON if body else {}
    reply = httpx.post(f"{served.url}/v1/completions", content=body, headers=headers)
    assert reply.status_code == status
    assert error_of(reply)["code"] == code


def test_a_body_has_to_say_that_it_is_json(served):
    """Pages elsewhere cannot say that without being asked whether they may."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        body, headers = json.dumps({"prompt": "a"}), {"content-type": kind}
        reply = httpx.post(f"{served.url}/v1/completions", content=body, headers=headers)
        assert reply.status_code == 415
        assert "Content-Type: application/json" in error_of(reply)["message"]
    assert served.service.batcher.requests == []


def test_what_only_the_engine_can_tell_is_the_clients_fault_too(served):
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = {**CHAT, "prompt": "a", "grammar": "wrong"}
        reply = served.post(path, body)
        assert reply.status_code == 400
        assert error_of(reply)["param"] == "grammar"


def test_half_characters_are_no_harm(served):
    """JSON can have them, encodings cannot."""
    body = b'{"content": "a\\ud800b"}'
    reply = httpx.post(f"{served.url}/tokenize", content=body, headers=JSON)
    assert reply.json() == {"tokens": list(b"a?b")}
    body = b'{"messages": [{"role": "user", "content": "a\\ud800"}]}'
    reply = httpx.post(f"{served.url}/apply-template", content=body, headers=JSON)
    assert reply.json() == {"prompt": "user:a\ud800\n"}
    body = b'{"messages": [{"role": "user\\ud800", "content": "a"}]}'
    reply = httpx.post(f"{served.url}/v1/chat/completions", content=body, headers=JSON)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "messages[0].role"


def test_half_characters_and_long_words_in_what_is_told(served):
    schema = '{"properties": {"\\ud800": 1}}'
    wanted = f'{{"type": "json_object", "schema": {schema}}}'
    body = f'{{"prompt": "a", "response_format": {wanted}}}'
    reply = httpx.post(f"{served.url}/v1/completions", content=body, headers=JSON)
    assert reply.status_code == 400
    assert "not a schema" in error_of(reply)["message"]
    part = {"type": "x" * 100_000, "text": "a"}
    body = {"messages": [{"role": "user", "content": [part]}]}
    reply = served.post("/v1/chat/completions", body)
    assert reply.status_code == 400
    assert len(error_of(reply)["message"]) < 700


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": [None] * 129}),
        ("/v1/completions", "prompt", {"prompt": ["a"] * 129}),
        ("/v1/completions", "prompt", {"prompt": [1] * ((1 << 21) + 1)}),
        ("/v1/completions", "prompt", {"prompt": [1, *[None] * 999]}),
        ("/v1/completions", "prompt", {"prompt": [[1, *[-1] * 999]]}),
        ("/v1/completions", "logit_bias", {**CHAT, "logit_bias": [[]] * ((1 << 16) + 1)}),
        ("/v1/completions", "stop", {**CHAT, "stop": [None] * 65}),
        ("/v1/chat/completions", "messages", {"messages": [{}] * ((1 << 14) + 1)}),
        (
            "/v1/chat/completions",
            "messages",
            {"messages": [{"role": "user", "content": [{}] * (1 << 14)}]},
        ),
        ("/v1/chat/completions", "tools", {**CHAT, "tools": [{}] * ((1 << 12) + 1)}),
        ("/v1/embeddings", "input", {"input": [None] * 2049}),
        ("/detokenize", "tokens", {"tokens": [1, *[-1] * 999]}),
        ("/tokenize", "content", {"content": "a" * ((1 << 20) + 1)}),
    ],
)
def test_what_is_too_much_is_counted_before_it_is_looked_at(path, param, body, served):
    """One error for all of it: with one for each item everybody would wait for a minute."""
    reply = served.post(path, {"prompt": "a", **body})
    assert reply.status_code == 400
    error = error_of(reply)
    assert error["param"] == param
    assert ";" not in error["message"]
    assert served.service.batcher.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_leaves_nothing_is_the_clients_fault(stream, served):
    def fail(request):
        raise NothingAllowed("no token is left")

    served.service.batcher.answer = fail
    reply = served.post("/v1/completions", {"prompt": "a", "stream": stream})
    assert reply.status_code == 400
    assert error_of(reply)["type"] == "invalid_request_error"


def test_other_urls_and_methods(served):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/docs", 404),
        ("POST", "/v1/completions/", 404),
        ("POST", "/v1/assistants", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ):
        reply = httpx.request(method, served.url + path)
        assert reply.status_code == status
        assert f"{method} {path}" in error_of(reply)["message"]


def test_another_model_does_not_exist(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-7")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_says_when_to_come_again(stream):
    batcher = FakeBatcher(n_slots=1, queue=1)
    batcher.hold()
    try:
        with serving(FakeService(batcher)) as served, served.openai() as client:
            chat = client.chat.completions.create
            two = {"messages": CHAT["messages"], "model": "x", "stream": stream, "n": 2}
            batcher.submit(BatchRequest((1,)), lambda chunk: None)
            with pytest.raises(openai.InternalServerError) as caught:
                chat(**two)
            assert caught.value.status_code == 503
            assert caught.value.code == "queue_full"
            assert caught.value.response.headers["retry-after"] == "2"
            # the one of the two that had room has gone again
            batcher.wait_for(lambda: batcher.n_busy + batcher.n_waiting == 1)
            batcher.go()
            batcher.wait_for(lambda: batcher.n_busy + batcher.n_waiting == 0)
            chat(**two)
            assert "caravan_requests_refused_total 1.0" in served.get("/metrics").text
            # more than can ever be there is nothing to come again with
            with pytest.raises(openai.BadRequestError) as wrong:
                chat(**{**two, "n": 3})
            assert wrong.value.param == "n"
    finally:
        batcher.close()


def test_the_client_comes_again_by_itself():
    batcher = FakeBatcher()
    full = [QueueFull("full", 0.1)]
    submit = batcher.submit

    def sometimes(request, sink):
        if full:
            raise full.pop()
        return submit(request, sink)

    batcher.submit = sometimes
    try:
        with serving(FakeService(batcher)) as served:
            with served.openai(max_retries=1) as client:
                answer = client.completions.create(model="x", prompt="a")
            assert answer.choices[0].text == "A"
    finally:
        batcher.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(DecodeError("no room"), 500, None), (LOST, 503, "worker_lost")],
)
def test_what_the_engine_says_has_a_status(error, status, code, stream, served):
    def fail(request):
        raise error

    served.service.batcher.answer = fail
    reply = served.post("/v1/completions", {"prompt": "a", "stream": stream})
    assert reply.status_code == status
    told = error_of(reply)
    assert (told["message"], told["type"], told["code"]) == (str(error), "server_error", code)


def test_an_error_in_a_stream_is_told_in_it(client, served):
    def reply(request):
        yield from b"ab"
        raise DecodeError("no room")

    served.service.batcher.reply = reply
    texts = []
    stream = client.completions.create(model="x", prompt="a", stream=True)
    with stream, pytest.raises(openai.APIError, match="no room"):
        for chunk in stream:
            texts.append(chunk.choices[0].text)
    assert texts == ["a", "b"]


def test_one_of_several_that_fails_ends_all(served):
    batcher = served.service.batcher

    def fail(request):
        if request.prompt[-1] == ord("b"):
            raise DecodeError("no room")
        batcher.hold()
        return "long"

    batcher.answer = fail
    reply = served.post("/v1/completions", {"prompt": ["a", "b"]})
    assert reply.status_code == 500
    batcher.wait_for(lambda: batcher.n_busy == 0)


def test_nothing_is_computed_any_more(served):
    served.service.batcher.error = LOST
    for path in ("/health", "/v1/health"):
        reply = served.get(path)
        assert (reply.status_code, error_of(reply)["code"]) == (503, "not_computing")
    reply = served.post("/v1/chat/completions", CHAT)
    assert (reply.status_code, error_of(reply)["code"]) == (503, "worker_lost")
    assert "caravan_computing 0.0" in served.get("/metrics").text


def test_what_is_nested_too_deeply_is_the_clients_fault(served):
    def render(*arguments, **options):
        return render(*arguments, **options)

    served.service.template.render = render
    reply = served.post("/v1/chat/completions", CHAT)
    assert (reply.status_code, error_of(reply)["message"]) == (
        400,
        "the request is nested too deeply",
    )


def test_errors_of_the_servers_own_are_told_to_both_sides(served):
    def wrong(text, add_special=True):
        raise ZeroDivisionError("secret")

    served.service.tokenize = wrong
    reply = served.post("/v1/completions", {"prompt": "a"})
    assert (reply.status_code, error_of(reply)["message"]) == (500, "internal error")
    (error,) = served.errors
    assert isinstance(error, ZeroDivisionError)
    served.errors.clear()
    assert served.get("/health").status_code == 200
