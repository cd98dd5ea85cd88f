"""Probabilities of tokens by the model's own logits, before any sampler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def token_logprobs(
    logits: NDArray[np.float32], token: int, n: int
) -> tuple[float, list[tuple[int, float]]]:
    """Natural logarithms of the probability of `token`, and of the `n` most likely ones with their
    ids, the most likely first, and of equal ones that with the lower number.

    Args:
        logits: one for each token of the vocabulary.
    """
    largest = float(logits.max())
    total = largest + float(np.log(np.exp(logits.astype(np.float64) - largest).sum()))
    top = _largest(logits, min(n, len(logits)))
    return float(logits[token]) - total, [(int(i), float(logits[i]) - total) for i in top]


def _largest(values: NDArray[np.float32], n: int) -> NDArray[np.intp]:
    """The places of the n largest, of equal ones the first."""
    if n == 0:
        return np.zeros(0, np.intp)
    least = np.partition(values, len(values) - n)[len(values) - n]
    above = np.flatnonzero(values > least)
    places = np.sort(np.concatenate([above, np.flatnonzero(values == least)[: n - len(above)]]))
    return places[np.argsort(-values[places], kind="stable")]
