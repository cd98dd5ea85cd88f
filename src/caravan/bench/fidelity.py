"""`Fidelity`: how far logits are from those that they should be, as a few numbers.

For what changes a computation a little, such as `wire_dtype`: the same text is read twice, and what
the model expects after each token is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caravan.backend import Cluster
from caravan.llm import Context, ContextParams, Model

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Over all tokens of a text.

    Attributes:
        n_tokens: how many were compared.
        max_difference: the largest difference of any two logits.
        mean_kl: mean Kullback-Leibler divergence of the probabilities from the expected ones, in
            nats.
        same_top: share of tokens after which the most likely next token is the same.
    """

    n_tokens: int
    max_difference: float
    mean_kl: float
    same_top: float


def compare(expected: Logits, found: Logits) -> Fidelity:
    """Compare logits of the shape (tokens, vocabulary)."""
    if expected.shape != found.shape or expected.ndim != 2 or not len(expected):
        raise ValueError(f"logits of shapes {expected.shape} and {found.shape}")
    p, q = _log_probabilities(expected), _log_probabilities(found)
    return Fidelity(
        n_tokens=len(expected),
        max_difference=float(np.abs(expected - found).max()),
        mean_kl=float((np.exp(p) * (p - q)).sum(axis=1).mean()),
        same_top=float((expected.argmax(axis=1) == found.argmax(axis=1)).mean()),
    )


def logits_of(context: Context, tokens: Sequence[int]) -> Logits:
    """The logits after each of the tokens, which the context reads from its beginning."""
    context.clear()
    rows: list[Logits] = []
    for start in range(0, len(tokens), context.n_batch):
        part = tokens[start : start + context.n_batch]
        context.decode(part, logits="all")
        rows.extend(context.logits(index) for index in range(len(part)))
    return np.array(rows)


def of_wire_dtype(
    cluster: Cluster,
    model: Model,
    tokens: Sequence[int],
    word: str,
    params: ContextParams | None = None,
) -> Fidelity:
    """What a wire type does to the logits of a text, against f32, on the same devices.

    The model must be on devices of the cluster, whose type is as before afterwards.
    """
    params = params or ContextParams(n_ctx=len(tokens), n_batch=256, n_ubatch=64)
    before = cluster.wire_dtype
    found: list[Logits] = []
    try:
        with Context(model, params) as context:
            for dtype in ("f32", word):
                cluster.wire_dtype = dtype
                found.append(logits_of(context, tokens))
    finally:
        cluster.wire_dtype = before
    return compare(*found)


def _log_probabilities(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
