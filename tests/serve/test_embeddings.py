"""Embeddings, as the official client has them."""

from __future__ import annotations

import openai
import pytest

from caravan.serve import embeddings


def embed(client: openai.OpenAI, given, **options):
    return client.embeddings.create(**{"model": "fake", "input": given, **options})


# the client asks for base64 by itself if nothing is said
@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}])
def test_every_text_has_a_vector(options, client):
    answer = embed(client, ["ab", "abcd"], **options)
    assert [item.embedding for item in answer.data] == [[3.0, 0.5, -0.25], [5.0, 0.5, -0.25]]
    assert [item.index for item in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 8


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("ab", [[256, 97, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_texts_and_tokens(given, tokens, client, served):
    embed(client, given)
    assert served.service.embedded == [tokens]


def test_long_lists_are_computed_in_parts(client, served, monkeypatch):
    monkeypatch.setattr(embeddings, "_SLICE", 6)
    answer = embed(client, [[1] * 4, [1] * 2, [1], [1] * 9, [1]])
    assert [[len(text) for text in part] for part in served.service.embedded] == [
        [4, 2],
        [1],
        [9],
        [1],
    ]
    assert [item.embedding[0] for item in answer.data] == [4, 2, 1, 9, 1]


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("dimensions", {"dimensions": 2}),
        ("input", {"input": []}),
        ("input", {"input": ["a"] * 2049}),
        ("encoding_format", {"encoding_format": "hex"}),
    ],
)
def test_what_cannot_be_done_is_refused(param, options, client):
    with pytest.raises(openai.BadRequestError) as caught:
        embed(client, **{"given": options.pop("input", "a"), **options})
    assert caught.value.param == param


def test_more_than_can_wait_are_sent_away(client, monkeypatch):
    monkeypatch.setattr(embeddings, "MOST_WAITING", 0)
    with pytest.raises(openai.InternalServerError) as caught:
        embed(client, "a")
    assert (caught.value.status_code, caught.value.code) == (503, "queue_full")


def test_the_models_own_dimensions_may_be_asked_for(client):
    assert len(embed(client, "a", dimensions=3).data[0].embedding) == 3
