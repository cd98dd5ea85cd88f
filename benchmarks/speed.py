"""Prompt and decode speed over 0, 1, 2 and 4 local workers, side by side in one run, as ratios.

    python benchmarks/speed.py [--model smollm2] [--rounds 5] [--json FILE]

Every set-up is loaded at the same time and they take turns, so that what else the machine does
hits all of them alike; the first round is a warm-up. One thread each: a worker's device, and the
engine alone. Prints medians, the spread, and the ratios that the README quotes.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack

import caravan
from caravan.llm import Context, ContextParams, Model, ModelParams
from measure import (
    Tokens,
    arguments,
    decode_speed,
    machine,
    print_ratios,
    prompt_speed,
    quotients,
    spread,
)

SETUPS = (0, 1, 2, 4)


def main() -> None:
    args = arguments(__doc__, n_gen=48).parse_args()
    print(machine(), file=sys.stderr)
    with ExitStack() as stack:
        workers = stack.enter_context(caravan.LocalWorkers(max(SETUPS), threads=1))
        contexts = {n: _context(stack, args, workers.endpoints[:n]) for n in SETUPS}
        tokens = Tokens(contexts[0].model.n_vocab)
        prompt = tokens.some(args.n_prompt)
        samples: dict[str, dict[int, list[float]]] = {
            kind: {n: [] for n in SETUPS} for kind in ("pp", "tg")
        }
        for number in range(args.rounds + 1):
            for n in SETUPS if number % 2 else reversed(SETUPS):
                pp = prompt_speed(contexts[n], prompt)
                tg = decode_speed(contexts[n], tokens.some(args.n_gen + 1))
                if number:
                    samples["pp"][n].append(pp)
                    samples["tg"][n].append(tg)
            print(f"round {number} of {args.rounds}", file=sys.stderr)
        for context in contexts.values():
            context.close()
            context.model.close()
    _report(args, samples)


def _context(stack: ExitStack, args: argparse.Namespace, endpoints: list[str]) -> Context:
    devices = stack.enter_context(caravan.connect(endpoints)).devices if endpoints else ()
    # the engine alone keeps the weights as the workers do: the same kernels on both sides
    model = Model(args.model, ModelParams(repack=False), devices=devices)
    params = ContextParams(
        n_ctx=args.n_prompt + args.n_gen, n_batch=2048, n_ubatch=args.n_ubatch, n_threads=1
    )
    return Context(model, params)


def _report(args: argparse.Namespace, samples: dict[str, dict[int, list[float]]]) -> None:
    print("| set-up | pp t/s | tg t/s |\n| --- | ---: | ---: |")
    for n in SETUPS:
        name = "engine alone" if n == 0 else f"{n} worker{'s' if n > 1 else ''}"
        print(f"| {name} | {spread(samples['pp'][n])} | {spread(samples['tg'][n])} |")
    wanted = [
        ("pp", 2, 1, "prompt, 2 workers / 1", 1.75),
        ("pp", 4, 2, "prompt, 4 workers / 2", 1.05),
        ("pp", 1, 0, "prompt, 1 worker / engine alone", 0.97),
        ("tg", 1, 0, "decode, 1 worker / engine alone", 0.95),
        ("tg", 2, 1, "decode, 2 workers / 1", 0.97),
        ("tg", 4, 1, "decode, 4 workers / 1", None),
    ]
    ratios = print_ratios(
        [
            (name, quotients(samples[kind][a], samples[kind][b]), goal)
            for kind, a, b, name, goal in wanted
        ]
    )
    if args.json:
        args.json.write_text(json.dumps({"samples": samples, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
