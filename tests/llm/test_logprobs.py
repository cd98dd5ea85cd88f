"""Log probabilities against a softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest

from caravan.llm.logprobs import token_logprobs

RANDOM = np.random.default_rng(7)


def reference(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    shifted = values - values.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e30])
def test_they_are_those_of_a_softmax(scale):
    logits = (RANDOM.standard_normal(5000) * scale).astype(np.float32)
    expected = reference(logits)
    own, top = token_logprobs(logits, 17, 20)
    np.testing.assert_allclose(own, expected[17], rtol=1e-12, atol=1e-12)
    assert [token for token, _ in top] == np.argsort(-expected, kind="stable")[:20].tolist()
    np.testing.assert_allclose(
        [value for _, value in top], np.sort(expected)[::-1][:20], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("n", [4, 5, 6, 100])
def test_all_of_a_small_vocabulary(n):
    logits = np.array([0.5, 2.0, -1.0, 2.0, 0.0], np.float32)
    _, top = token_logprobs(logits, 0, n)
    assert [token for token, _ in top] == [1, 3, 0, 4, 2][:n]
    if n >= 5:
        assert sum(np.exp(value) for _, value in top) == pytest.approx(1.0)


def test_none_is_none():
    own, top = token_logprobs(np.zeros(4, np.float32), 2, 0)
    assert own == pytest.approx(np.log(0.25)) and top == []


@pytest.mark.parametrize("n", [1, 3, 7])
def test_of_equal_ones_the_first_come_first(n):
    logits = np.zeros(1000, np.float32)
    logits[[900, 40, 500]] = 1.0
    _, top = token_logprobs(logits, 0, n)
    assert [token for token, _ in top] == [40, 500, 900, 0, 1, 2, 3][:n]


def test_impossible_tokens_have_no_chance():
    logits = np.full(10, -np.inf, np.float32)
    logits[3] = 4.0
    own, top = token_logprobs(logits, 3, 2)
    assert own == 0.0
    assert top[0] == (3, 0.0) and top[1][1] == -np.inf
    assert token_logprobs(logits, 5, 0)[0] == -np.inf
