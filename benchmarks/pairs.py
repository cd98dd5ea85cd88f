"""llama.cpp's RPC client and servers against ours: all four pairs, over 1, 2 and 4 workers.

    python benchmarks/pairs.py [--model smollm2] [--rounds 5] [--json FILE]

Needs llama-cpp-python with RPC (`make interop`); both heads and all workers use its library, so the
kernels are the same on all sides, and so are the layers of each device. (llama.cpp by itself splits
the layers a little otherwise: that is the last column.) All pairs are loaded at once and take turns
in one process, so that what else the machine does hits all of them alike; the first round is a
warm-up. Every worker and server computes with one thread. Prints medians, the spread, and each
pair's speed over that of llama.cpp's client with its own servers, round by round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import caravan
from caravan import engine
from caravan.llm import Context, ContextParams, Model, ModelParams
from caravan.llm.devices import LocalDevice
from interop.peers import CppServer, libraries
from measure import Tokens, arguments, decode_speed, machine, prompt_speed, quotients, spread

COUNTS = (1, 2, 4)
PAIRS = {
    "cc": "llama.cpp client, llama.cpp servers",
    "oc": "our head, llama.cpp servers",
    "co": "llama.cpp client, our workers",
    "oo": "our head, our workers",
    "ll": "llama.cpp both, its own split",
}
GOALS = {("pp", 1): 1.0, ("pp", 2): 1.05, ("pp", 4): 1.5, ("tg", 1): 1, ("tg", 2): 1, ("tg", 4): 1}

Cell = tuple[str, int]
Samples = dict[str, dict[Cell, list[float]]]


def main() -> None:
    args = _arguments()
    folder = libraries()
    if folder is None:
        sys.exit("llama.cpp's RPC is not installed: make interop")
    os.environ["CARAVAN_LIBRARY"] = str(folder)
    print(machine(), file=sys.stderr)
    with ExitStack() as stack:
        contexts = _contexts(stack, args, folder)
        tokens = Tokens(next(iter(contexts.values())).model.n_vocab)
        prompt = tokens.some(args.n_prompt)
        samples: Samples = {kind: {cell: [] for cell in contexts} for kind in ("pp", "tg")}
        for number in range(args.rounds + 1):
            for cell in _turns(number):
                if cell not in contexts:
                    continue
                pp = prompt_speed(contexts[cell], prompt)
                tg = decode_speed(contexts[cell], tokens.some(args.n_gen + 1))
                if number:
                    samples["pp"][cell].append(pp)
                    samples["tg"][cell].append(tg)
            print(f"round {number} of {args.rounds}", file=sys.stderr)
        for context in contexts.values():
            context.close()
            context.model.close()
    _report(args, samples)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, n_gen=64)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    return parser.parse_args()


def _turns(number: int) -> list[Cell]:
    """Neighbours in time are the pairs of one count; every other round goes backwards."""
    cells = [(pair, count) for count in COUNTS for pair in PAIRS]
    return cells if number % 2 else cells[::-1]


def _contexts(stack: ExitStack, args: argparse.Namespace, folder: Path) -> dict[Cell, Context]:
    most = max(COUNTS)

    # a server of theirs serves one client, so each head has its own
    def servers() -> list[str]:
        return [stack.enter_context(CppServer()).endpoint for _ in range(most)]

    ours = stack.enter_context(caravan.LocalWorkers(most, threads=1)).endpoints
    clients = {
        "cc": lambda: _their_devices(folder, servers()),
        "oc": lambda: stack.enter_context(caravan.connect(servers())).devices,
        "co": lambda: _their_devices(folder, ours),
        "oo": lambda: stack.enter_context(caravan.connect(ours)).devices,
        "ll": lambda: _their_devices(folder, servers()),
    }
    devices = {pair: clients[pair]() for pair in args.pairs}
    return {
        (pair, count): _context(args, devices[pair][:count], pair == "ll")
        for pair in args.pairs
        for count in COUNTS
    }


def _their_devices(folder: Path, endpoints: Sequence[str]) -> list[LocalDevice]:
    """llama.cpp's own remote devices."""
    ggml = engine.load().ggml
    add = ctypes.CDLL(str(folder / "libggml-rpc.so.0")).ggml_backend_rpc_add_server
    add.restype, add.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    found = [ggml.reg_dev_get(add(endpoint.encode()), 0) for endpoint in endpoints]
    return [
        LocalDevice(device, ggml.dev_name(device).decode(), ggml.dev_description(device).decode())
        for device in found
    ]


def _context(args: argparse.Namespace, devices: Sequence[object], their_split: bool) -> Context:
    # shares that are given are rounded by llama.cpp alone
    split = (1.0,) * len(devices) if their_split else ()
    model = Model(args.model, ModelParams(repack=False, tensor_split=split), devices=devices)
    params = ContextParams(
        n_ctx=args.n_prompt + args.n_gen, n_batch=2048, n_ubatch=args.n_ubatch, n_threads=1
    )
    return Context(model, params)


def _report(args: argparse.Namespace, samples: Samples) -> None:
    kinds = {"pp": f"pp{args.n_prompt}", "tg": f"tg{args.n_gen}"}
    print("| test | workers |", *(f"{PAIRS[pair]} |" for pair in args.pairs))
    print("| --- | ---: |", *("---: |" for _ in args.pairs))
    for kind, name in kinds.items():
        for count in COUNTS:
            print(
                f"| {name} | {count} |",
                *(f"{spread(samples[kind][pair, count])} |" for pair in args.pairs),
            )
    for base in ("cc", "ll"):
        if base in args.pairs:
            _report_over(base, args.pairs, samples, kinds)
    if args.json:
        flat = {k: {f"{p}{n}": v for (p, n), v in s.items()} for k, s in samples.items()}
        args.json.write_text(json.dumps(flat, indent=2))


def _report_over(base: str, pairs: Sequence[str], samples: Samples, kinds: dict[str, str]) -> None:
    others = [pair for pair in pairs if pair not in ("cc", "ll")]
    print(f"\nOver {PAIRS[base]}, round by round:\n")
    print("| test | workers |", *(f"{PAIRS[pair]} |" for pair in others), "goal |")
    print("| --- | ---: |", *("---: |" for _ in others), "---: |")
    for kind, name in kinds.items():
        for count in COUNTS:
            below = samples[kind][base, count]
            ratios = [spread(quotients(samples[kind][p, count], below), 3) for p in others]
            print(f"| {name} | {count} |", *(f"{r} |" for r in ratios), f"{GOALS[kind, count]:g} |")


if __name__ == "__main__":
    main()
