"""Many prompts over three and over four workers: each gives the first one's logits, and none hangs.

    python benchmarks/endurance.py [--runs 200] [-p 256] [-ub 16] [--bound 60]

A prompt that takes longer than the bound ends the script, which then says where every thread is.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time

import numpy as np

import caravan
from caravan.llm import Context, ContextParams, Model, ModelParams
from measure import Tokens, machine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("-p", "--n-prompt", type=int, default=256)
    parser.add_argument("-ub", "--n-ubatch", type=int, default=16)
    parser.add_argument("--bound", type=float, default=60.0, help="seconds for each prompt")
    args = parser.parse_args()
    print(machine(), file=sys.stderr)
    for n in (3, 4):
        slowest = _run(n, args)
        print(f"{n} workers: {args.runs} prompts, all the same logits, {slowest:.2f} s at most")


def _run(n: int, args: argparse.Namespace) -> float:
    """The longest time of a prompt."""
    params = ContextParams(n_ctx=args.n_prompt, n_batch=args.n_prompt, n_ubatch=args.n_ubatch)
    with (
        caravan.LocalWorkers(n, threads=1) as workers,
        caravan.connect(workers.endpoints) as cluster,
        Model("smollm2", ModelParams(repack=False), devices=cluster.devices) as model,
        Context(model, params) as context,
    ):
        prompt = Tokens(model.n_vocab).some(args.n_prompt)
        first, slowest = None, 0.0
        for number in range(args.runs):
            faulthandler.dump_traceback_later(args.bound, exit=True)
            started = time.perf_counter()
            context.clear()
            context.decode(prompt)
            logits = context.logits()
            slowest = max(slowest, time.perf_counter() - started)
            faulthandler.cancel_dump_traceback_later()
            first = logits if first is None else first
            if not np.array_equal(logits, first):
                sys.exit(f"{n} workers, prompt {number}: other logits than the first")
        return slowest


if __name__ == "__main__":
    main()
