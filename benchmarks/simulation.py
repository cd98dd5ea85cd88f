"""What the planner's simulator says, against what happens.

    python benchmarks/simulation.py [SETUP ...] [--prompts 64,256,1024] [--rounds 3] [--json FILE]

A set-up is its devices, joined by `+`: `cpu` with one thread, or the speeds of a simulated one
(GFLOPS/GB/s); then the milliseconds that links take one way, and Mbit/s behind a `/`; and the
tokens of a micro-batch: `400/40+1200/120@2:64`, `400/40+400/40@0.2/100:64`. With `:relay` at its
end the head carries the activations. Devices and links are measured as for a plan. Prompts and
decode steps of SmolLM2 are predicted and measured; with `--concurrency` also prompts and steps of
so many requests in a batcher.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import caravan
from caravan.batching import Batcher, Chunk, Request, Usage
from caravan.llm import Context, ContextParams, Model, ModelParams, SamplingParams
from caravan.models.resolve import resolve
from caravan.plan.job import Job
from caravan.plan.pipeline import Pipeline
from caravan.plan.predict import prompt_seconds, step_seconds
from caravan.plan.setting import measured, work_of
from measure import Tokens, machine
from pipeline import Bench

MODEL = "smollm2"
SETUPS = (
    "100/20@0:64",
    "100/20+100/20@0:64",
    "400/40+1200/120@0:64",
    "400/40+400/40+800/80@0:512",
    "400/40+1200/120@2:64",
    "400/40+400/40+800/80@2:64",
    "400/40+1200/120@10:64",
    "400/40+1200/120@10:64:relay",
    "400/40+1200/120@0.2/100:64",
    "cpu@0:64",
    "cpu+cpu@0:64",
    "cpu+cpu+cpu@0:64",
    "cpu+cpu+cpu+cpu@0:64",
)
N_CTX = 4352
# Tokens that are there before decode steps are measured.
DEPTHS = (1, 1000)
# Tokens that each of several requests generates.
_N_GEN = 64


@dataclass(frozen=True)
class Setup:
    """See the module.

    Attributes:
        devices: as a worker's `-d` takes them.
        mbit: 0: as much as there is.
    """

    name: str
    devices: tuple[str, ...]
    delay_ms: float
    mbit: float
    n_ubatch: int
    relay: bool

    @classmethod
    def parse(cls, text: str) -> Setup:
        devices, _, rest = text.partition("@")
        delay, n_ubatch, *relay = rest.split(":")
        names = []
        for device in devices.split("+"):
            gflops, _, gbps = device.partition("/")
            names.append("CPU:1" if device == "cpu" else f"sim:GFLOPS={gflops},GBPS={gbps}")
        ms, _, mbit = delay.partition("/")
        rate = float(mbit or 0.0)
        return cls(text, tuple(names), float(ms), rate, int(n_ubatch), relay == ["relay"])

    @property
    def params(self) -> ContextParams:
        return ContextParams(n_ctx=N_CTX, n_batch=2048, n_ubatch=self.n_ubatch, n_threads=1)


@dataclass(frozen=True)
class Row:
    """A prediction and what was measured, in milliseconds."""

    setup: str
    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Stand:
    """A set-up's workers, and a context over them.

    Attributes:
        pipeline: the same for the simulator.
    """

    def __init__(self, bench: Bench, setup: Setup, jobs: Sequence[Job]) -> None:
        endpoints = []
        for device in setup.devices:
            if setup.delay_ms:
                endpoints += bench.behind_links(device, 1, setup.delay_ms, setup.mbit)
            else:
                endpoints.append(bench.worker(device))
        cluster = bench.stack.enter_context(
            caravan.connect(endpoints, direct_copies=not setup.relay)
        )
        cluster.routes()
        params = ModelParams(repack=False)
        work = work_of(resolve(MODEL), params, setup.params, jobs, exact=True)
        setting = measured(work, setup.params, cluster.devices, fresh=True)
        self.n_vocab = work.n_vocab
        n, n_stages = work.n_layer + 1, len(setup.devices)
        counts = [n // n_stages] * n_stages
        counts[-1] += n % n_stages
        self.pipeline = Pipeline(setting, tuple(range(n_stages)), tuple(counts))
        split = tuple(map(float, counts))
        self.model = Model(MODEL, replace(params, tensor_split=split), devices=cluster.devices)
        bench.stack.callback(self.model.close)
        self.context = Context(self.model, setup.params)
        bench.stack.callback(self.context.close)

    def read(self, prompt: Sequence[int]) -> float:
        """Seconds for a prompt in an empty context, whose graphs are new."""
        context = self.context
        context.clear()
        # otherwise a short prompt would find the graph of the one before
        context.decode(prompt[:3])
        context.synchronize()
        context.clear()
        began = time.perf_counter()
        context.decode(prompt)
        context.synchronize()
        return time.perf_counter() - began

    def steps(self, tokens: Sequence[int], depth: int) -> list[float]:
        """Seconds of decode steps after `depth` tokens; those with new graphs do not count."""
        context = self.context
        context.clear()
        context.decode((list(tokens) * (depth // len(tokens) + 1))[:depth])
        context.synchronize()
        seconds = []
        for number, token in enumerate(tokens):
            began = time.perf_counter()
            context.decode([token])
            context.synchronize()
            if number >= 2:
                seconds.append(time.perf_counter() - began)
        return seconds


def crowd(batcher: Batcher, prompts: Sequence[Sequence[int]], n_gen: int) -> list[Usage]:
    """What requests that come together have taken."""
    usages: list[Usage] = []
    done = threading.Semaphore(0)

    def sink(chunk: Chunk) -> None:
        if chunk.usage is not None:
            usages.append(chunk.usage)
            done.release()

    sampling = SamplingParams(temp=0.0, ignore_eos=True)
    for prompt in prompts:
        batcher.submit(Request(tuple(prompt), n_gen, sampling), sink)
    for _ in prompts:
        done.acquire()
    return usages


def compare(
    setup: Setup, prompts: Sequence[int], concurrencies: Sequence[int], rounds: int
) -> list[Row]:
    """Predictions of a set-up, and medians of what was measured."""
    rows = []
    jobs = [Job(n, 1, c) for n in prompts for c in (1, *concurrencies)]
    with Bench(rounds) as bench:
        stand = Stand(bench, setup, jobs)
        tokens, pipeline = Tokens(stand.n_vocab), stand.pipeline
        for count in prompts:
            seconds = [stand.read(tokens.some(count)) for _ in range(rounds + 1)][1:]
            rows.append(_row(setup, f"pp{count}", prompt_seconds(pipeline, count), seconds))
        for depth in DEPTHS:
            seconds = stand.steps(tokens.some(10 * rounds), depth)
            # nothing is sampled here
            predicted = step_seconds(pipeline, depth + 5 * rounds) - pipeline.setting.head.sample
            rows.append(_row(setup, f"tg at {depth}", predicted, seconds))
        for c in concurrencies:
            rows += _together(setup, stand, prompts, c, rounds, tokens)
    return rows


def _together(
    setup: Setup, stand: Stand, prompts: Sequence[int], c: int, rounds: int, tokens: Tokens
) -> list[Row]:
    rows = []
    with Batcher(stand.model, n_slots=c, n_ctx=N_CTX, params=setup.params) as batcher:

        def usages(n_prompt: int, n_gen: int) -> list[list[Usage]]:
            prompts = [[tokens.some(n_prompt) for _ in range(c)] for _ in range(rounds + 1)]
            return [crowd(batcher, prompt, n_gen) for prompt in prompts][1:]

        for count in prompts:
            seconds = [
                max(usage.queue_seconds + usage.prompt_seconds for usage in found)
                for found in usages(count, 1)
            ]
            predicted = prompt_seconds(stand.pipeline, count, c)
            rows.append(_row(setup, f"{c} x pp{count}", predicted, seconds))
        # short prompts: so all of them generate nearly all the time
        seconds = [
            statistics.median(usage.decode_seconds for usage in found) / (_N_GEN - 1)
            for found in usages(4, _N_GEN)
        ]
        rows.append(_row(setup, f"{c} x tg", step_seconds(stand.pipeline, _N_GEN, c), seconds))
    return rows


def _row(setup: Setup, what: str, predicted: float, seconds: Sequence[float]) -> Row:
    row = Row(setup.name, what, predicted * 1e3, statistics.median(seconds) * 1e3)
    print(
        f"| {row.setup} | {row.what} | {row.predicted:.2f} | {row.measured:.2f} |"
        f" {row.error:+.1%} |",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("setups", nargs="*", metavar="SETUP")
    parser.add_argument("--prompts", default="64,256,1024,2048")
    parser.add_argument("--concurrency", default="", help="such as 2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args()
    print(machine(), file=sys.stderr)
    print("| set-up | what | predicted, ms | measured, ms | error |")
    print("| --- | --- | ---: | ---: | ---: |")
    prompts = [int(count) for count in args.prompts.split(",")]
    concurrencies = [int(c) for c in filter(None, args.concurrency.split(","))]
    rows = [
        row
        for text in args.setups or SETUPS
        for row in compare(Setup.parse(text), prompts, concurrencies, args.rounds)
    ]
    errors = [abs(row.error) for row in rows]
    print(f"\nmedian error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
