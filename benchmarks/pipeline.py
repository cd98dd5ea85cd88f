"""How a pipeline scales: devices of one worker, many stages, slow links, and smaller activations.

    python benchmarks/pipeline.py [PART ...] [--rounds 5] [--json FILE]

Each part compares set-ups that are loaded at the same time and take turns, and prints ratios with
their goals; the first round is a warm-up.

devices    two devices of one worker against two workers, the sample model, one thread each
stages     2, 4 and 8 simulated devices of equal speed against one: the speed-up of a prompt of 16
           micro-batches, of the ideal m*s/(m+s-1)
delay      links with 10 ms each way between head and workers and among the workers: decode with
           direct copies against relayed ones, of what counting crossings allows; and prompt speed
           against the same without delay
bandwidth  links of 100 Mbit/s: prompts with activations as f16 against f32
fidelity   what f16 and bf16 do to the logits of the sample model over two workers
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import caravan
from caravan.bench.fidelity import compare, logits_of, of_wire_dtype
from caravan.llm import Context, ContextParams, Model, ModelParams
from link import Link, free_port
from measure import Tokens, decode_speed, machine, print_ratios, prompt_speed, quotients, spread

Row = tuple[str, list[float], float | None]

DELAY_MS = 10.0
MBIT = 100.0


class Bench:
    """Set-ups that stay open until the part ends, and take turns in being measured."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.stack = ExitStack()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    def workers(self, n: int) -> list[str]:
        """Endpoints of `n` new workers with a thread each."""
        return self.stack.enter_context(caravan.LocalWorkers(n, threads=1)).endpoints

    def worker(self, devices: str, *options: str, port: int = 0) -> str:
        """Endpoint of a new worker."""
        worker = caravan.Worker(devices, port=port, options=options)
        return self.stack.enter_context(worker).endpoint

    def behind_links(self, devices: str, n: int, delay_ms: float, mbit: float = 0.0) -> list[str]:
        """`n` new workers that the head and the others only reach over slow links."""
        endpoints = []
        for _ in range(n):
            port = free_port()
            head = self.stack.enter_context(Link(port, delay_ms, mbit))
            peers = self.stack.enter_context(Link(port, delay_ms, mbit))
            self.worker(devices, "--peer-address", f"127.0.0.1:{peers.port}", port=port)
            endpoints.append(f"127.0.0.1:{head.port}")
        return endpoints

    def context(
        self,
        model: str | Path,
        endpoints: list[str],
        params: ContextParams,
        **options: object,
    ) -> Context:
        """A context over all devices of the workers, which know their ways to each other."""
        cluster = self.stack.enter_context(caravan.connect(endpoints, **options))  # type: ignore[arg-type]
        cluster.routes()
        loaded = Model(model, ModelParams(repack=False), devices=cluster.devices)
        self.stack.callback(loaded.close)
        context = Context(loaded, params)
        self.stack.callback(context.close)
        return context

    def take_turns(self, measures: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
        """Samples of each; every second round runs backwards."""
        samples: dict[str, list[float]] = {name: [] for name in measures}
        for number in range(self.rounds + 1):
            order = list(measures) if number % 2 else list(reversed(measures))
            for name in order:
                value = measures[name]()
                if number:
                    samples[name].append(value)
            print(f"round {number} of {self.rounds}", file=sys.stderr)
        return samples


def devices(rounds: int) -> list[Row]:
    """Two devices of one worker against two workers."""
    with Bench(rounds) as bench:
        params = ContextParams(n_ctx=1088, n_batch=2048, n_ubatch=64, n_threads=1)
        one = bench.context("smollm2", [bench.worker("CPU:1,CPU:1")], params)
        two = bench.context("smollm2", bench.workers(2), params)
        tokens = Tokens(one.model.n_vocab)
        prompt, text = tokens.some(1024), tokens.some(49)
        samples = bench.take_turns(
            {
                "pp, one worker": lambda: prompt_speed(one, prompt),
                "pp, two workers": lambda: prompt_speed(two, prompt),
                "tg, one worker": lambda: decode_speed(one, text),
                "tg, two workers": lambda: decode_speed(two, text),
            }
        )
    _show(samples)
    return [
        (
            f"{what}, 2 devices in one worker / 2 workers",
            quotients(samples[f"{kind}, one worker"], samples[f"{kind}, two workers"]),
            0.97,
        )
        for kind, what in (("pp", "prompt"), ("tg", "decode"))
    ]


def stages(rounds: int) -> list[Row]:
    """A prompt of 16 micro-batches over 1, 2, 3, 4 and 8 simulated devices."""
    counts, batches = (1, 2, 3, 4, 8), 16
    with Bench(rounds) as bench, tempfile.TemporaryDirectory() as folder:
        # a layer of this shape takes 6.6 ms for 32 tokens; 48 layers divide by every count
        model = _fake(folder, layers=48, embd=2048, ff=8192, heads=16, vocab=1024)
        params = ContextParams(n_ctx=32 * batches, n_batch=512, n_ubatch=32, n_threads=1)
        contexts = {}
        for n in counts:
            endpoints = [bench.worker("sim:GFLOPS=600,GBPS=100") for _ in range(n)]
            contexts[n] = bench.context(model, endpoints, params)
        prompt = Tokens(contexts[1].model.n_vocab).some(32 * batches)
        samples = bench.take_turns(
            {
                f"pp, {n} stages": lambda n=n: prompt_speed(contexts[n], prompt)  # type: ignore[misc]
                for n in counts
            }
        )
    _show(samples)
    rows: list[Row] = []
    for before, n in itertools.pairwise(counts):
        ideal = batches * n / (batches + n - 1)
        speedups = quotients(samples[f"pp, {n} stages"], samples["pp, 1 stages"])
        rows.append(
            (f"{n} stages / 1, of the ideal {ideal:.3f}", [s / ideal for s in speedups], 0.95)
        )
        gains = quotients(samples[f"pp, {n} stages"], samples[f"pp, {before} stages"])
        rows.append((f"{n} stages / {before}", gains, 1.0))
    return rows


def delay(rounds: int) -> list[Row]:
    """Decode and prompts over links with a delay."""
    return [row for n in (2, 4) for row in _delay(rounds, n)]


def _delay(rounds: int, n: int) -> list[Row]:
    with Bench(rounds) as bench:
        params = ContextParams(n_ctx=2112, n_batch=2112, n_ubatch=64, n_threads=1)
        near = bench.context("smollm2", bench.workers(n), params)
        far = bench.behind_links("CPU:1", n, DELAY_MS)
        direct = bench.context("smollm2", far, params)
        relayed = bench.context("smollm2", far, params, direct_copies=False)
        tokens = Tokens(near.model.n_vocab)
        prompt, text = tokens.some(2048), tokens.some(21)
        samples = bench.take_turns(
            {
                "tg, no delay": lambda: decode_speed(near, text),
                "tg, direct": lambda: decode_speed(direct, text),
                "tg, relayed": lambda: decode_speed(relayed, text),
                "pp, no delay": lambda: prompt_speed(near, prompt),
                "pp, direct": lambda: prompt_speed(direct, prompt),
            }
        )
    print(f"\n{n} workers, {DELAY_MS:g} ms each way")
    _show(samples)
    d, c = DELAY_MS / 1e3, statistics.median(1 / speed for speed in samples["tg, no delay"])
    allowed = (2 * n * d + c) / ((n + 1) * d + c)
    gains = quotients(samples["tg, direct"], samples["tg, relayed"])
    return [
        (
            f"decode, {n} workers, direct / relayed, of {allowed:.3f}",
            [gain / allowed for gain in gains],
            0.95,
        ),
        (
            f"prompt, {n} workers, delayed / not",
            quotients(samples["pp, direct"], samples["pp, no delay"]),
            0.95,
        ),
    ]


def bandwidth(rounds: int) -> list[Row]:
    """Prompts over links that carry less than the devices compute."""
    with Bench(rounds) as bench, tempfile.TemporaryDirectory() as folder:
        model = _fake(folder, layers=8, embd=4096, ff=11008, heads=32, vocab=1024)
        params = ContextParams(n_ctx=512, n_batch=512, n_ubatch=64, n_threads=1, flash_attn="on")
        far = bench.behind_links("sim:GFLOPS=5000,GBPS=500", 2, 0.2, MBIT)
        wide = bench.context(model, far, params)
        narrow = bench.context(model, far, params, wire_dtype="f16")
        prompt = Tokens(wide.model.n_vocab).some(512)
        samples = bench.take_turns(
            {
                "pp, f32": lambda: prompt_speed(wide, prompt),
                "pp, f16": lambda: prompt_speed(narrow, prompt),
            }
        )
    _show(samples)
    return [
        (
            f"prompt, {MBIT:g} Mbit/s, f16 / f32",
            quotients(samples["pp, f16"], samples["pp, f32"]),
            1.7,
        )
    ]


def fidelity(rounds: int) -> list[Row]:
    """Logits with smaller activations against those with f32, after each token of a text."""
    text = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
    print("\n| wire dtype | tokens | largest difference | mean KL, nats | same top token |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with Bench(rounds) as bench:
        cluster = bench.stack.enter_context(caravan.connect(bench.workers(2)))
        model = Model("smollm2", ModelParams(repack=False), devices=cluster.devices)
        bench.stack.callback(model.close)
        tokens = model.tokenize(text)[:1024]
        rows = {word: of_wire_dtype(cluster, model, tokens, word) for word in ("f16", "bf16")}
        # what another order of the same sums does, to compare with
        logits = []
        for flash_attn in ("on", "off"):
            params = ContextParams(n_ctx=1024, n_batch=256, n_ubatch=64, flash_attn=flash_attn)
            with Context(model, params) as context:
                logits.append(logits_of(context, tokens))
        rows["f32, flash attention off / on"] = compare(*logits)
    for name, found in rows.items():
        print(
            f"| {name} | {found.n_tokens} | {found.max_difference:.4f} |"
            f" {found.mean_kl:.2e} | {found.same_top:.2%} |"
        )
    return []


PARTS = {
    "devices": devices,
    "stages": stages,
    "delay": delay,
    "bandwidth": bandwidth,
    "fidelity": fidelity,
}


def _fake(folder: str, **shape: int) -> Path:
    """The header of a model of this shape."""
    path = Path(folder) / "fake.gguf"
    options = [f"--{name}={value}" for name, value in shape.items()]
    command = [sys.executable, "-m", "caravan", "model", "fake", "-o", str(path), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def _show(samples: dict[str, list[float]]) -> None:
    print("\n| set-up | t/s |\n| --- | ---: |")
    for name, values in samples.items():
        print(f"| {name} | {spread(values)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the medians there too")
    args = parser.parse_args()
    print(machine(), file=sys.stderr)
    rows: list[Row] = []
    for name in args.parts or PARTS:
        print(f"\n## {name}")
        rows += PARTS[name](args.rounds)
    medians = print_ratios(rows) if rows else {}
    if args.json:
        args.json.write_text(json.dumps(medians, indent=2))


if __name__ == "__main__":
    main()
