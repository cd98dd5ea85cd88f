"""Probabilities of tokens by the model's own logits, before any sampler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def token_logprobs(
    logits: NDArray[np.float32], token: int, n: int
) -> tuple[float, list[tuple[int, float]]]:
    """Natural logarithms of the probability of `token`, and of the `n` most likely ones with their
    ids, the most likely first.

    Args:
        logits: one for each token of the vocabulary.
    """
    largest = float(logits.max())
    total = largest + float(np.log(np.exp(logits.astype(np.float64) - largest).sum()))
    n = min(n, len(logits))
    top = np.argpartition(logits, len(logits) - n)[len(logits) - n :] if n else np.zeros(0, int)
    top = top[np.argsort(-logits[top], kind="stable")]
    return float(logits[token]) - total, [(int(i), float(logits[i]) - total) for i in top]
