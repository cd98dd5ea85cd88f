"""What TLS costs: the same two workers with it and without, for prompts, decoding and loading.

    python benchmarks/tls.py [--model smollm2] [--rounds 5] [--json FILE]

Four workers of one thread each on loopback, two of them with TLS on every connection, also between
the two; certificates of both ends are checked. All are loaded at once and take turns in one
process, in changing order; the first round is a warm-up. Ratios are those of one round. Loading is
that of `loading.py`: a model of 2.2 GB with random weights, onto one worker that keeps none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import caravan
from caravan.llm import Context, ContextParams, Model, ModelParams
from caravan.transport import authority
from caravan.transport.certificates import Tls
from caravan.worker.local import Worker
from loading import write_model
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

SIDES = ("plain", "tls")
GOALS = {"pp": 0.95, "tg": None, "load": None}


def main() -> None:
    args = _arguments()
    print(machine(), file=sys.stderr)
    samples: dict[str, dict[str, list[float]]] = {
        kind: {side: [] for side in SIDES} for kind in ("pp", "tg", "load")
    }
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        authority.init(work, authority.usual())
        workers = {side: _workers(stack, work, side) for side in SIDES}
        _speeds(args, stack, work, workers, samples)
        if not args.no_load:
            write_model(work / "model.gguf")
            for number in range(args.rounds + 1):
                for side in SIDES if number % 2 else SIDES[::-1]:
                    rate = _load(work, workers[side][0], side)
                    if number:
                        samples["load"][side].append(rate)
    _report(args, samples)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, n_gen=48)
    parser.add_argument("--no-load", action="store_true", help="prompts and decoding alone")
    return parser.parse_args()


def _tls(work: Path, name: str) -> Tls:
    return Tls(*(str(work / f"{stem}.pem") for stem in ("ca", name, f"{name}-key")))


def _workers(stack: ExitStack, work: Path, side: str) -> list[str]:
    own = _tls(work, "worker")
    options = ("--tls-ca", own.ca, "--tls-cert", own.cert, "--tls-key", own.key)
    started = [Worker("CPU:1", options=options if side == "tls" else ()) for _ in range(2)]
    return [stack.enter_context(worker).endpoint for worker in started]


def _connect(work: Path, endpoints: list[str], side: str) -> caravan.Cluster:
    return caravan.connect(endpoints, tls=_tls(work, "head") if side == "tls" else None)


def _speeds(
    args: argparse.Namespace,
    stack: ExitStack,
    work: Path,
    workers: dict[str, list[str]],
    samples: dict[str, dict[str, list[float]]],
) -> None:
    contexts = {}
    for side in SIDES:
        devices = stack.enter_context(_connect(work, workers[side], side)).devices
        model = stack.enter_context(Model(args.model, ModelParams(repack=False), devices=devices))
        params = ContextParams(
            n_ctx=args.n_prompt + args.n_gen, n_batch=2048, n_ubatch=args.n_ubatch, n_threads=1
        )
        contexts[side] = stack.enter_context(Context(model, params))
    tokens = Tokens(contexts["plain"].model.n_vocab)
    prompt = tokens.some(args.n_prompt)
    for number in range(args.rounds + 1):
        for side in SIDES if number % 2 else SIDES[::-1]:
            pp = prompt_speed(contexts[side], prompt)
            tg = decode_speed(contexts[side], tokens.some(args.n_gen + 1))
            if number:
                samples["pp"][side].append(pp)
                samples["tg"][side].append(tg)
        print(f"round {number} of {args.rounds}", file=sys.stderr)


def _load(work: Path, endpoint: str, side: str) -> float:
    """GB a second, from the call of `Model` to its return."""
    with _connect(work, [endpoint], side) as cluster:
        started = time.perf_counter()
        with Model(work / "model.gguf", ModelParams(repack=False), devices=cluster.devices):
            seconds = time.perf_counter() - started
    return (work / "model.gguf").stat().st_size / seconds / 1e9


def _report(args: argparse.Namespace, samples: dict[str, dict[str, list[float]]]) -> None:
    names = {
        "pp": f"pp{args.n_prompt}, 2 workers, t/s",
        "tg": f"tg{args.n_gen}, 2 workers, t/s",
        "load": "loading, 1 worker, GB/s",
    }
    kinds = [kind for kind in names if samples[kind]["tls"]]
    print("| test | without | with TLS |\n| --- | ---: | ---: |")
    for kind in kinds:
        digits = 2 if kind == "load" else 1
        cells = [spread(samples[kind][side], digits) for side in SIDES]
        print(f"| {names[kind]} | {cells[0]} | {cells[1]} |")
    ratios = print_ratios(
        [
            (
                f"{names[kind].split(',')[0]}, with TLS / without",
                quotients(samples[kind]["tls"], samples[kind]["plain"]),
                GOALS[kind],
            )
            for kind in kinds
        ]
    )
    if args.json:
        args.json.write_text(json.dumps({"samples": samples, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
