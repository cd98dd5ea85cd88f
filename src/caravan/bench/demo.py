"""The one-minute experiment: one prompt on one worker and on two, and whether the text is right.

What `caravan demo` does, without its printing. Speeds are measured side by side, in turns; the
text is compared with the engine's own, from the same weights in the same layout.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from caravan.backend import connect
from caravan.llm import (
    Context,
    ContextParams,
    EngineDevice,
    Model,
    ModelParams,
    SamplingParams,
    generate,
)
from caravan.worker.local import LocalWorkers

PROMPT_TOKENS = 512
UBATCH = 32
ROUNDS = 3
ANSWER_TOKENS = 48
QUESTION = (
    "<|im_start|>user\nWhat is a caravan? Answer in two sentences.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The object that `caravan demo --json` prints.

    Attributes:
        pp_1, pp_2: prompt tokens a second on one worker and on two, the median of the rounds.
        speedup: pp_2 / pp_1.
        speedups: that of each round.
        text, text_local: the answer over two workers, and the engine's alone.
        identical: whether they are the same.
    """

    pp_1: float
    pp_2: float
    speedup: float
    speedups: tuple[float, ...]
    text: str
    text_local: str
    identical: bool


def demo(path: Path, say: Callable[[str], None], *, timeout: float = 30.0) -> DemoResult:
    """Run it; `say` is told each step. Raises CaravanError."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 2) // 2)
    say(f"starting two workers on this machine, {threads} of {cores} cores each")
    with (
        LocalWorkers(2, threads=threads) as workers,
        connect(workers.endpoints[:1], timeout=timeout) as one,
        connect(workers.endpoints, timeout=timeout) as two,
    ):
        rates_1, rates_2 = _compare(path, one.devices, two.devices, say)
        say("asking a question over two workers")
        text = _answer(path, two.devices)
    say("asking the same of the engine alone")
    text_local = _answer(path, ())
    pp_1, pp_2 = statistics.median(rates_1), statistics.median(rates_2)
    return DemoResult(
        pp_1=round(pp_1, 2),
        pp_2=round(pp_2, 2),
        speedup=round(pp_2 / pp_1, 3),
        speedups=tuple(round(b / a, 3) for a, b in zip(rates_1, rates_2, strict=True)),
        text=text,
        text_local=text_local,
        identical=text == text_local,
    )


def _compare(
    path: Path,
    one: Sequence[EngineDevice],
    two: Sequence[EngineDevice],
    say: Callable[[str], None],
) -> tuple[list[float], list[float]]:
    """The prompt speeds of each round, the two sides taking turns."""
    params = ContextParams(n_ctx=PROMPT_TOKENS, n_ubatch=UBATCH)
    rates: tuple[list[float], list[float]] = ([], [])
    with (
        Model(path, devices=one) as model_1,
        Model(path, devices=two) as model_2,
        Context(model_1, params) as context_1,
        Context(model_2, params) as context_2,
    ):
        tokens = [(37 * i) % model_1.n_vocab for i in range(PROMPT_TOKENS)]
        for context in (context_1, context_2):
            _rate(context, tokens)
        for number in range(1, ROUNDS + 1):
            say(f"prompt of {PROMPT_TOKENS} tokens, round {number} of {ROUNDS}")
            for context, side in zip((context_1, context_2), rates, strict=True):
                side.append(_rate(context, tokens))
    return rates


def _rate(context: Context, tokens: Sequence[int]) -> float:
    context.clear()
    started = time.perf_counter()
    context.decode(tokens)
    context.synchronize()
    return len(tokens) / (time.perf_counter() - started)


def _answer(path: Path, devices: Sequence[EngineDevice]) -> str:
    # the workers keep the weights as the file has them; so must the engine to compute the same
    with (
        Model(path, ModelParams(repack=False), devices=devices) as model,
        Context(model, ContextParams(n_ctx=512)) as context,
    ):
        sampling = SamplingParams(temp=0)
        return "".join(generate(context, QUESTION, max_tokens=ANSWER_TOKENS, sampling=sampling))
