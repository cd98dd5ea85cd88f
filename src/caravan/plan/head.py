"""What a model takes of the head and of its links, from steps of rehearsals. Called by `work`.

The steps are those of `timing`, played with one device and with several.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Sequence

import numpy as np

from caravan import engine
from caravan.engine.llama import TOKEN_DATA, TokenDataArray
from caravan.llm.params import KV_BLOCK
from caravan.llm.rehearsal import Rehearsed, Step
from caravan.plan.pipeline import HeadTimes, Traffic

_REPEATS = 3
_DECODES = 10
# Of the head between two decode steps: a few milliseconds of rest, and all takes thrice as long.
_REST = 0.004
_F32 = 4


def timing(small: int, full: int, room: int) -> list[Step]:
    """Micro-batches of two sizes, of which the first does not count, then decode steps with one
    graph, in a context that has room for so many tokens."""
    steps = [Step(full, at=0)]
    at = full
    for _ in range(_REPEATS):
        at = at if at + full <= room else 0
        steps.append(Step(full, at=at))
        at += full
    # two like each other would have one graph
    other = small + 1 if small < full else max(1, small - 1)
    steps += [Step((small, other)[i % 2], at=0) for i in range(_REPEATS)]
    # in the middle of a stretch of equal graphs, where the context has room for several
    middle = min(room, 4 * KV_BLOCK) - KV_BLOCK // 2
    return steps + [
        Step(1, "all", at=middle + i, rest=_REST if i else 0.0) for i in range(_DECODES)
    ]


def traffic_of(steps: Sequence[Rehearsed], n_layer: int, n_vocab: int) -> Traffic:
    """From a rehearsal with several devices."""
    prompts, decodes = steps[:-_DECODES], steps[-_DECODES:]
    # the second device gets small inputs only: fixed + tokens (position + entries mask)
    known = steps[: 1 - _DECODES]
    terms = np.array([(1.0, step.n_tokens, step.n_tokens * step.n_kv) for step in known])
    small = np.array([step.written[1] for step in known], np.float64)
    scale = np.maximum(terms.max(axis=0), 1.0)
    fixed, position, mask = np.linalg.lstsq(terms / scale, small)[0] / scale
    written = statistics.median(
        (step.written[0] - step.written[1]) / step.n_tokens for step in prompts
    )
    last, graphs = decodes[-1], prompts[-1].graphs
    activation = last.crossed[1] / last.n_tokens
    # a description has no embeddings: all are alike, and would not travel twice
    embedding = max(activation, (last.sent[0] - last.sent[1]) / last.n_tokens)
    travels = embedding + last.sent[1]
    return Traffic(
        activation=activation,
        embedding=embedding,
        fixed=max(0.0, round(float(fixed), 3)),
        position=max(0.0, round(float(position), 3)),
        mask=max(0.0, round(float(mask), 6)),
        again=min(1.0, travels / max(1.0, embedding + last.written[1])),
        logits=float(_F32 * n_vocab),
        graph=sum(graph.rows.nbytes for graph in graphs) / (n_layer + 1),
        nodes=sum(graph.n_nodes for graph in graphs) / (n_layer + 1),
        alone=max(0.0, written - embedding),
    )


def head_times(
    single: Sequence[Rehearsed], several: Sequence[Rehearsed], n_vocab: int
) -> HeadTimes:
    """From the same steps with one device and with several."""

    def seconds(steps: Sequence[Rehearsed]) -> tuple[float, float, float]:
        """Of a full micro-batch, of a small one, of a decode step."""
        full, small = steps[1 : 1 + _REPEATS], steps[1 + _REPEATS : 1 + 2 * _REPEATS]
        again = [step for step in steps[-_DECODES:] if step.reused] or steps[-1:]
        # the least: what comes on top is other programs' doing
        full_least, small_least = (min(step.seconds for step in some) for some in (full, small))
        return full_least, small_least, statistics.median(step.seconds for step in again)

    n_full, n_small = single[1].n_tokens, single[1 + _REPEATS].n_tokens
    one, more = seconds(single), seconds(several)
    stages = len(several[0].graphs) - 1
    token = 0.0
    if n_full > n_small:
        token = max(0.0, min(one[0] - one[1], more[0] - more[1]) / (n_full - n_small))
    first = max(0.0, one[1] - n_small * token)
    build_stage = min(first, max(0.0, (more[1] - one[1]) / stages))
    reuse_stage = min(one[2], max(0.0, (more[2] - one[2]) / stages))
    return HeadTimes(
        build=first - build_stage,
        build_stage=build_stage,
        token=token,
        reuse=one[2] - reuse_stage,
        reuse_stage=reuse_stage,
        sample=_sampling_seconds(n_vocab),
    )


def _sampling_seconds(n_vocab: int) -> float:
    """How long the usual chain takes for one token."""
    llama = engine.load().llama
    chain = llama.sampler_chain_init(llama.sampler_chain_default_params())
    llama.sampler_chain_add(chain, llama.sampler_init_top_k(40))
    llama.sampler_chain_add(chain, llama.sampler_init_dist(1))
    logits = np.random.default_rng(1).standard_normal(max(1, n_vocab)).astype(np.float32)
    seconds = []
    try:
        for _ in range(_REPEATS):
            began = time.perf_counter()
            data = np.zeros(len(logits), TOKEN_DATA)
            data["id"] = np.arange(len(logits))
            data["logit"] = logits
            array = TokenDataArray(data.ctypes.data, len(data), -1, False)
            llama.sampler_apply(chain, ctypes.addressof(array))
            seconds.append(time.perf_counter() - began)
    finally:
        llama.sampler_free(chain)
    return statistics.median(seconds)
