"""What the benchmarks share: one measurement, ratios of neighbours in time, and their tables."""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import caravan
from caravan import engine
from caravan.llm import Context

Samples = dict[str, list[float]]


class Tokens:
    """Random tokens of a model; the content does not matter for speed."""

    def __init__(self, n_vocab: int, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._n_vocab = n_vocab

    def some(self, count: int) -> list[int]:
        return [self._rng.randrange(self._n_vocab) for _ in range(count)]


def arguments(doc: str | None, n_gen: int) -> argparse.ArgumentParser:
    """The options that benchmarks of prompts and decoding share."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("-p", "--n-prompt", type=int, default=1024)
    parser.add_argument("-n", "--n-gen", type=int, default=n_gen)
    parser.add_argument("-ub", "--n-ubatch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write samples and ratios there too")
    return parser


def prompt_speed(context: Context, prompt: list[int]) -> float:
    """Tokens a second of reading `prompt` into an empty context."""
    context.clear()
    started = time.perf_counter()
    context.decode(prompt)
    context.synchronize()
    return len(prompt) / (time.perf_counter() - started)


def decode_speed(context: Context, tokens: list[int]) -> float:
    """Tokens a second, one at a time, after a first one that does not count."""
    context.clear()
    context.decode(tokens[:1])
    context.synchronize()
    started = time.perf_counter()
    for token in tokens[1:]:
        context.decode([token])
        context.synchronize()
    return (len(tokens) - 1) / (time.perf_counter() - started)


def quotients(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """a/b, round by round."""
    return [x / y for x, y in zip(a, b, strict=True)]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median, and the range in brackets."""
    low, high, middle = min(values), max(values), statistics.median(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def print_ratios(rows: Sequence[tuple[str, Sequence[float], float | None]]) -> dict[str, float]:
    """A table of (name, ratios of the rounds, goal); the medians by name."""
    print("\n| ratio | median | range | goal |\n| --- | ---: | ---: | ---: |")
    medians: dict[str, float] = {}
    for name, values, goal in rows:
        medians[name] = statistics.median(values)
        aim = "" if goal is None else f"{goal:.3g}"
        print(f"| {name} | {medians[name]:.3f} | {min(values):.3f} to {max(values):.3f} | {aim} |")
    return medians


def machine() -> str:
    """Date, machine and versions, for whoever quotes the numbers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    today = time.strftime("%Y-%m-%d")
    return (
        f"{today}, {platform.machine()}, {cores} cores, Python {platform.python_version()},"
        f" ggml {engine.load().version}, caravan {caravan.__version__}"
    )
