"""Prompt and decode speed over 0, 1, 2 and 4 local workers, side by side in one run, as ratios.

    python benchmarks/speed.py [--model smollm2] [--rounds 5] [--json FILE]

Every set-up is loaded at the same time and they take turns, so that what else the machine does
hits all of them alike; the first round is a warm-up. One thread each: a worker's device, and the
engine alone. Prints medians, the spread, and the ratios that the README quotes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import caravan
from caravan import engine
from caravan.llm import Context, ContextParams, Model, ModelParams

SETUPS = (0, 1, 2, 4)


def main() -> None:
    args = _arguments()
    print(_machine(), file=sys.stderr)
    with ExitStack() as stack:
        workers = stack.enter_context(caravan.LocalWorkers(max(SETUPS), threads=1))
        contexts = {n: _context(stack, args, workers.endpoints[:n]) for n in SETUPS}
        rng = random.Random(1)
        n_vocab = contexts[0].model.n_vocab
        prompt = [rng.randrange(n_vocab) for _ in range(args.n_prompt)]
        samples: dict[str, dict[int, list[float]]] = {
            kind: {n: [] for n in SETUPS} for kind in ("pp", "tg")
        }
        for number in range(args.rounds + 1):
            for n in SETUPS if number % 2 else reversed(SETUPS):
                pp, tg = _measure(contexts[n], prompt, args.n_gen, rng, n_vocab)
                if number:
                    samples["pp"][n].append(pp)
                    samples["tg"][n].append(tg)
            print(f"round {number} of {args.rounds}", file=sys.stderr)
        for context in contexts.values():
            context.close()
            context.model.close()
    _report(args, samples)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("-p", "--n-prompt", type=int, default=1024)
    parser.add_argument("-n", "--n-gen", type=int, default=48)
    parser.add_argument("-ub", "--n-ubatch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write samples and ratios there too")
    return parser.parse_args()


def _context(stack: ExitStack, args: argparse.Namespace, endpoints: list[str]) -> Context:
    devices = stack.enter_context(caravan.connect(endpoints)).devices if endpoints else ()
    # the engine alone keeps the weights as the workers do: the same kernels on both sides
    model = Model(args.model, ModelParams(repack=False), devices=devices)
    params = ContextParams(
        n_ctx=args.n_prompt + args.n_gen, n_batch=2048, n_ubatch=args.n_ubatch, n_threads=1
    )
    return Context(model, params)


def _measure(
    context: Context, prompt: list[int], n_gen: int, rng: random.Random, n_vocab: int
) -> tuple[float, float]:
    """Tokens a second of the prompt, and of the tokens generated after clearing it."""
    context.clear()
    started = time.perf_counter()
    context.decode(prompt)
    context.synchronize()
    pp = len(prompt) / (time.perf_counter() - started)
    context.clear()
    tokens = [rng.randrange(n_vocab) for _ in range(n_gen + 1)]
    context.decode(tokens[:1])
    context.synchronize()
    started = time.perf_counter()
    for token in tokens[1:]:
        context.decode([token])
        context.synchronize()
    return pp, n_gen / (time.perf_counter() - started)


def _ratio(samples: dict[int, list[float]], a: int, b: int) -> tuple[float, float, float]:
    """Median, lowest and highest of a/b, round by round: neighbours in time."""
    ratios = [x / y for x, y in zip(samples[a], samples[b], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _report(args: argparse.Namespace, samples: dict[str, dict[int, list[float]]]) -> None:
    print("| set-up | pp t/s | tg t/s |\n| --- | ---: | ---: |")
    for n in SETUPS:
        name = "engine alone" if n == 0 else f"{n} worker{'s' if n > 1 else ''}"
        cells = [
            f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
            for values in (samples["pp"][n], samples["tg"][n])
        ]
        print(f"| {name} | {cells[0]} | {cells[1]} |")
    wanted = [
        ("pp", 2, 1, "prompt, 2 workers / 1", 1.75),
        ("pp", 4, 2, "prompt, 4 workers / 2", 1.05),
        ("pp", 1, 0, "prompt, 1 worker / engine alone", 0.97),
        ("tg", 1, 0, "decode, 1 worker / engine alone", 0.95),
        ("tg", 2, 1, "decode, 2 workers / 1", 0.97),
        ("tg", 4, 1, "decode, 4 workers / 1", None),
    ]
    print("\n| ratio | median | range | goal |\n| --- | ---: | ---: | ---: |")
    ratios = {}
    for kind, a, b, name, goal in wanted:
        median, low, high = _ratio(samples[kind], a, b)
        ratios[name] = median
        print(f"| {name} | {median:.3f} | {low:.3f} to {high:.3f} | {goal or ''} |")
    if args.json:
        args.json.write_text(json.dumps({"samples": samples, "ratios": ratios}, indent=2))


def _machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    today = time.strftime("%Y-%m-%d")
    return (
        f"{today}, {platform.machine()}, {cores} cores, Python {platform.python_version()},"
        f" ggml {engine.load().version}, caravan {caravan.__version__}"
    )


if __name__ == "__main__":
    main()
