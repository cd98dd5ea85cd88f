"""What a request is answered does not depend on who else is there: the same bits."""

from __future__ import annotations

import random

from batching.test_batcher import GREEDY, Collected, answers
from caravan.batching import Batcher, Request
from caravan.llm import ContextParams, Model, ModelParams

# below, at and above the border of attention's tiles, and around a micro-batch and the next border
SIZES = (5, 20, 63, 64, 65, 127, 128, 140, 193)


def tokens(sink: Collected) -> list[tuple[int, float]]:
    return [(token.id, token.logprob) for chunk in sink.chunks for token in chunk.tokens]


def test_alone_or_with_others(smollm2):
    dice = random.Random(5)
    requests = [
        Request(tuple(dice.randrange(1000, 40000) for _ in range(n)), 4, GREEDY, logprobs=0)
        for n in SIZES
    ]
    # one thread: several split the attention of a token that is alone
    params = ContextParams(n_ubatch=128, n_threads=1)
    options = {"n_slots": 6, "n_lanes": 2, "n_ctx": 256, "params": params}
    with Model(smollm2, ModelParams(repack=False)) as model:
        with Batcher(model, **options) as batcher:
            alone = [tokens(answers(batcher, [one])[0]) for one in requests]
        with Batcher(model, **options) as batcher:
            together = [tokens(sink) for sink in answers(batcher, requests)]
            assert batcher.state().n_cached == 0
    assert together == alone
