"""Completions, as the official client has them."""

from __future__ import annotations

import openai
import pytest

from caravan.serve import responding
from serve.fakes import BOS, N_CTX


def complete(client: openai.OpenAI, prompt, **options):
    return client.completions.create(**{"model": "fake", "prompt": prompt, **options})


def test_a_text_is_continued(client):
    answer = complete(client, "hello")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("HELLO", "stop", None)
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.completion_tokens == 5
    assert answer.timings["predicted_n"] == 5


def test_answers_are_short_unless_more_is_asked_for(client):
    (choice,) = complete(client, "a" * 40).choices
    assert (choice.text, choice.finish_reason) == ("A" * 16, "length")
    assert complete(client, "a" * 40, max_tokens=-1).choices[0].text == "A" * 40
    assert complete(client, "a", max_tokens=0).choices[0].text == ""


def test_tokens_are_taken_as_they_are(client, served):
    tokens = list(b"hi")
    assert complete(client, tokens).choices[0].text == "HI"
    assert served.service.batcher.requests[0].prompt == tuple(tokens)
    assert complete(client, "hi").choices[0].text == "HI"
    assert served.service.batcher.requests[1].prompt == (BOS, *tokens)


@pytest.mark.parametrize("prompt", [["one", "two"], [list(b"one"), list(b"two")]])
def test_several_prompts_run_at_the_same_time(prompt, client, served, monkeypatch):
    monkeypatch.setattr(responding, "_FIRST_SECONDS", 0.01)
    served.service.batcher.hold()
    with complete(client, prompt, n=2, stream=True) as stream:
        served.service.batcher.wait_for(lambda: served.service.batcher.n_busy == 4)
        served.service.batcher.go()
        texts = ["", "", "", ""]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == ["ONE", "ONE", "TWO", "TWO"]
    whole = complete(client, prompt, n=2)
    assert [choice.text for choice in whole.choices] == texts
    assert whole.usage.completion_tokens == 12
    assert whole.usage.prompt_tokens == (8 if isinstance(prompt[0], str) else 6)


def test_a_stream_has_the_same_text(client):
    with complete(client, "hello", stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == "HELLO"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.completion_tokens) == ([], 5)


def test_the_prompt_comes_back_if_that_is_wanted(client):
    assert complete(client, "say ", echo=True).choices[0].text == "say SAY "
    assert complete(client, list(b"say "), echo=True).choices[0].text == "say SAY "
    both = complete(client, ["a", "b"], echo=True, n=2)
    assert [choice.text for choice in both.choices] == ["aA", "aA", "bB", "bB"]
    with complete(client, "say ", echo=True, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "say SAY "


def test_logprobs(client):
    told = complete(client, "abc", logprobs=2).choices[0].logprobs
    assert told.tokens == ["A", "B", "C"]
    assert told.token_logprobs == [-0.5] * 3
    assert told.top_logprobs[0] == {"A": -0.5, "B": -1.5}
    assert told.text_offset == [0, 1, 2]
    with complete(client, "abc", logprobs=0, stream=True) as stream:
        parts = [c.choices[0].logprobs for c in stream if c.choices[0].logprobs]
    assert [(part.tokens, part.text_offset) for part in parts] == [
        (["A"], [0]),
        (["B"], [1]),
        (["C"], [2]),
    ]


def test_biases_are_pairs_of_tokens_and_numbers(client, served):
    complete(client, "a", logit_bias={"65": -100, "66": 1.5})
    complete(client, "a", extra_body={"logit_bias": [[65, False], [66, 1.5]]})
    for request in served.service.batcher.requests:
        assert request.sampling.logit_bias == ((65, -100.0), (66, 1.5))


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("suffix", {"suffix": "end"}),
        ("best_of", {"best_of": 3}),
        ("echo", {"echo": True, "logprobs": 1}),
        ("logprobs", {"logprobs": 21}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ["a"] * 100, "n": 2}),
        ("prompt[1]", {"prompt": [[1], []]}),
        ("prompt[0]", {"prompt": [[1.5]]}),
    ],
)
def test_what_cannot_be_done_is_refused(param, options, client, served):
    if options.get("prompt") == "":
        served.service.tokenize = lambda text, add_special=True: list(text.encode())
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **{"prompt": "a", **options})
    assert caught.value.param.startswith(param.split("[")[0])
    assert caught.value.type == "invalid_request_error"
    assert served.service.batcher.requests == []


def test_best_of_what_there_is_anyway_is_no_harm(client):
    assert len(complete(client, "a", n=2, best_of=2).choices) == 2


def test_a_prompt_that_no_slot_can_hold_is_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "x" * N_CTX)
    assert caught.value.code == "context_length_exceeded"
    assert str(N_CTX) in str(caught.value)
    assert str(N_CTX + 1) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "looked_at"),
    [("x" * 5_000_000, 16 * N_CTX), (" " * 10_000 + "x" * 5_000_000, 32 * N_CTX)],
)
def test_of_a_text_that_is_far_too_long_not_all_is_looked_at(text, looked_at, client, served):
    seen = []

    def tokenize(text, *, add_special=True):
        seen.append(len(text))
        return [120] * text.count("x")

    served.service.tokenize = tokenize
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, text)
    assert caught.value.code == "context_length_exceeded"
    assert "more than" in str(caught.value)
    assert seen[-1] == looked_at
    # one of few tokens is not refused for its length
    assert complete(client, " " * 50_000 + "x").choices[0].finish_reason == "stop"


def test_a_token_that_the_model_has_not_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="not in the vocabulary"):
        complete(client, [1, 70000])
