"""What the planner says beside what is so.

    python benchmarks/planning.py [PART ...] [--rounds 3] [--json FILE]

accuracy   1 to 4 workers with a simulated device each, all of different speed, behind links of 0, 2
           and 10 ms each way: prompts of 64 to 4,096 tokens and decoding of the sample model, as
           predicted and as measured, and the prompt length from which each cluster beats its best
           device alone
cpu        the same with real devices: one and two workers with one CPU thread each
split      two simulated devices, one three times as fast as the other, and a model with a heavy
           output layer: what `--split auto` takes against every other split, the even one and the
           one by memory among them
time       planning 16 devices for a model of 80 layers

Predictions come before measurements, from the same code that `caravan plan` runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import caravan
from caravan.backend import Cluster, RemoteDevice
from caravan.llm import Context, ContextParams, Model, ModelParams
from caravan.llm.placement import whole_layers
from caravan.llm.splitter import Splitter
from caravan.models import resolve
from caravan.models.fake import FakeModel
from caravan.plan.auto import AutoSplit, EvenSplit
from caravan.plan.job import Job
from caravan.plan.measure import measure_cluster, times_of
from caravan.plan.memory import MemoryModel
from caravan.plan.pipeline import Pipeline, Setting
from caravan.plan.planner import make_plan
from caravan.plan.predict import prompt_seconds, step_seconds
from caravan.plan.profile import ClusterProfile, DeviceProfile, LinkProfile
from caravan.plan.split import best_counts
from caravan.plan.work import ModelWork
from measure import Tokens, decode_speed, machine, prompt_speed
from pipeline import Bench

SPEEDS = (
    "sim:GFLOPS=900,GBPS=30,GIB=8",
    "sim:GFLOPS=400,GBPS=20,GIB=8",
    "sim:GFLOPS=1300,GBPS=45,GIB=8",
    "sim:GFLOPS=600,GBPS=15,GIB=8",
)
DELAYS = (0.0, 2.0, 10.0)
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096)
N_GEN = 24
N_CTX = 4352


@dataclass
class Row:
    """One prediction, in seconds, and what was measured of it."""

    what: str
    predicted: float
    measured: list[float]

    @property
    def error(self) -> float:
        return self.predicted / statistics.median(self.measured) - 1

    def __str__(self) -> str:
        middle = statistics.median(self.measured)
        low, high = min(self.measured), max(self.measured)
        return (
            f"| {self.what} | {self.predicted * 1e3:.1f} | {middle * 1e3:.1f}"
            f" | {low * 1e3:.1f} to {high * 1e3:.1f} | {self.error:+.1%} |"
        )


def setting_of(
    model: Path, devices: Sequence[RemoteDevice], params: ContextParams, sizes: Sequence[int]
) -> tuple[Setting, MemoryModel]:
    """What the planner knows of a model on these devices, all of it measured now."""
    load = ModelParams(repack=False)
    work = ModelWork.of(model, load, params, sizes=sizes)
    cluster = measure_cluster(devices, fresh=True)
    times = times_of(devices, work, cluster, fresh=True)
    setting = Setting(
        cluster,
        times,
        work.traffic,
        work.head,
        work.n_layer,
        n_ubatch=params.n_ubatch,
        n_batch=params.n_batch,
        n_ctx=params.n_ctx,
    )
    return setting, MemoryModel.of(model, load, params)


def measured(
    bench: Bench,
    cluster: Cluster,
    model: Path,
    pipeline: Pipeline,
    params: ContextParams,
    prompts: Sequence[int],
) -> Iterator[tuple[str, list[float]]]:
    """Seconds of each prompt, and of a token in decoding after the shortest one."""
    devices = [cluster.devices[i] for i in pipeline.devices]
    load = ModelParams(repack=False, tensor_split=tuple(map(float, pipeline.counts)))
    with (
        Model(model, load, devices=devices, fit=False) as loaded,
        Context(loaded, params) as context,
    ):
        tokens = Tokens(loaded.n_vocab)
        again = range(bench.rounds + 1)
        for n_prompt in prompts:
            prompt = tokens.some(n_prompt)
            yield f"pp{n_prompt}", [first_logits(context, prompt) for _ in again][1:]
        text = tokens.some(N_GEN)
        yield f"tg{N_GEN}", [1 / decode_speed(context, text) for _ in again][1:]


def first_logits(context: Context, prompt: list[int]) -> float:
    """Seconds of a prompt that comes after something else, so that its graphs are new ones."""
    context.clear()
    context.decode(prompt[:1])
    context.synchronize()
    return len(prompt) / prompt_speed(context, prompt)


def compare(
    bench: Bench, endpoints: list[str], name: str, prompts: Sequence[int] = PROMPTS
) -> list[Row]:
    """Predictions for all devices in order, split as planned, and for the best one alone."""
    model = resolve("smollm2")
    params = ContextParams(n_ctx=N_CTX, n_threads=1)
    rows = []
    with caravan.connect(endpoints) as cluster:
        cluster.routes()
        setting, memory = setting_of(model, cluster.devices, params, prompts)
        numbers = list(range(len(cluster.devices)))
        alone = {i: Pipeline(setting, (i,), (setting.n_layer + 1,)) for i in numbers}
        best = min(numbers, key=lambda i: prompt_seconds(alone[i], 2048))
        todo = {f"{name}, best alone": alone[best]}
        if len(numbers) > 1:
            room = memory.room([(d.memory_free, d.memory_total) for d in setting.cluster.devices])
            counts = best_counts(setting, numbers, [Job(2048, 0)], memory.layers, room)
            assert counts is not None
            splits = [counts]
            if 0 in counts:
                # what is best may leave devices out: see that they are understood, too
                even = whole_layers(setting.n_layer, -1, [1.0] * len(numbers))
                splits.append(tuple(map(int, even)))
            for some in splits:
                title = f"{name}, split {'/'.join(map(str, some))}"
                todo[title] = Pipeline(setting, tuple(numbers), some)
        for title, pipeline in todo.items():
            for what, seconds in measured(bench, cluster, model, pipeline, params, prompts):
                # nothing is sampled here
                predicted = (
                    step_seconds(pipeline, 256) - setting.head.sample
                    if what.startswith("tg")
                    else prompt_seconds(pipeline, int(what[2:]))
                )
                rows.append(Row(f"{title}, {what}", predicted, seconds))
                print(rows[-1], flush=True)
    return rows


def crossing(prompts: Sequence[int], alone: Sequence[float], together: Sequence[float]) -> float:
    """The prompt length from which `together` is faster, between the measured ones; nan: never."""
    ratios = [a / t for a, t in zip(alone, together, strict=True)]
    for i in reversed(range(len(ratios))):
        if ratios[i] <= 1:
            if i + 1 == len(ratios):
                return math.nan
            low, high = math.log(ratios[i]), math.log(ratios[i + 1])
            part = -low / (high - low)
            return prompts[i] * (prompts[i + 1] / prompts[i]) ** part
    return float(prompts[0])


def accuracy(rounds: int, prompts: Sequence[int] = PROMPTS) -> dict[str, object]:
    rows: list[Row] = []
    evens = []
    for delay in DELAYS:
        for n in range(1, len(SPEEDS) + 1):
            with Bench(rounds) as bench:
                if delay:
                    endpoints = [bench.behind_links(SPEEDS[i], 1, delay)[0] for i in range(n)]
                else:
                    endpoints = [bench.worker(SPEEDS[i]) for i in range(n)]
                name = f"{n} x {delay:g} ms"
                found = compare(bench, endpoints, name, prompts)
                rows += found
                if n > 1:
                    each = len(prompts) + 1
                    one, other = found[: each - 1], found[each : 2 * each - 1]
                    said = crossing(
                        prompts, *([r.predicted for r in side] for side in (one, other))
                    )
                    so = crossing(
                        prompts,
                        *([statistics.median(r.measured) for r in side] for side in (one, other)),
                    )
                    evens.append((name, said, so))
                    print(f"{name}: break-even predicted {said:.0f}, measured {so:.0f}", flush=True)
    return told(rows, evens)


def cpu(rounds: int, prompts: Sequence[int] = PROMPTS) -> dict[str, object]:
    rows: list[Row] = []
    for n in (1, 2):
        with Bench(rounds) as bench:
            rows += compare(bench, bench.workers(n), f"{n} CPU", [p for p in prompts if p <= 1024])
    return told(rows, [])


def told(rows: list[Row], evens: list[tuple[str, float, float]]) -> dict[str, object]:
    errors = sorted(abs(row.error) for row in rows)
    worst = max(rows, key=lambda row: abs(row.error))
    print(f"\n{len(rows)} predictions: median error {statistics.median(errors):.1%}", end="")
    print(f", nine of ten within {errors[int(0.9 * (len(errors) - 1))]:.1%}", end="")
    print(f", worst {worst.error:+.1%} ({worst.what})")
    for name, said, so in evens:
        print(f"{name}: break-even predicted {said:.0f}, measured {so:.0f}: {said / so:.2f}")
    return {
        "rows": [(r.what, r.predicted, r.measured) for r in rows],
        "break_even": evens,
    }


def split(rounds: int) -> dict[str, object]:
    """Every split of 16 layers over two devices, by prompt and by decoding."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, Bench(rounds) as bench:
        model = Path(folder) / "heavy.gguf"
        FakeModel(
            layers=16, embd=1024, heads=16, kv_heads=4, ff=2816, vocab=65536, type="Q4_0"
        ).write(model)
        params = ContextParams(n_ctx=1280, n_ubatch=128, n_threads=1)
        slow, fast = "sim:GFLOPS=800,GBPS=20,GIB=16", "sim:GFLOPS=2400,GBPS=60,GIB=8"
        for name, order in (("slow first", (slow, fast)), ("fast first", (fast, slow))):
            with caravan.connect([bench.worker(device) for device in order]) as cluster:
                cluster.routes()
                found |= splits_of(bench, name, cluster, model, params)
    return found


def splits_of(
    bench: Bench, name: str, cluster: Cluster, model: Path, params: ContextParams
) -> dict[str, object]:
    """What `--split auto`, `even` and `memory` take, and what every split is worth."""
    jobs = {"prompt of 1,024": Job(1024, 0), "decoding": Job(1, 64), "both": Job(1024, 64)}
    chosen = {what: shares(cluster, model, params, AutoSplit([job])) for what, job in jobs.items()}
    even, memory = shares(cluster, model, params, EvenSplit()), shares(cluster, model, params, None)
    setting, _ = setting_of(model, cluster.devices, params, [128])
    seconds: dict[tuple[int, ...], dict[str, float]] = {}
    for first in range(setting.n_layer + 2):
        counts = (first, setting.n_layer + 1 - first)
        pipeline = Pipeline(setting, (0, 1), counts)
        times = dict(measured(bench, cluster, model, pipeline, params, [1024]))
        pp, tg = (statistics.median(times[what]) for what in ("pp1024", f"tg{N_GEN}"))
        seconds[counts] = dict(zip(jobs, (pp, tg, pp + 64 * tg), strict=True))
        print(counts, f"pp {pp * 1e3:.1f} ms, tg {tg * 1e3:.2f} ms", flush=True)
    found: dict[str, object] = {}
    for what in jobs:
        best = min(seconds, key=lambda counts: seconds[counts][what])
        worth = {
            mode: seconds[best][what] / seconds[counts][what]
            for mode, counts in (("auto", chosen[what]), ("even", even), ("memory", memory))
        }
        told = ", ".join(f"{mode} {share:.3f}" for mode, share in worth.items())
        print(f"{name}, {what}: best {best}, auto {chosen[what]}; of the best: {told}")
        found[f"{name}, {what}"] = {"best": best, "auto": chosen[what], **worth}
    return found


def shares(
    cluster: Cluster, model: Path, params: ContextParams, splitter: Splitter | None
) -> tuple[int, ...]:
    """The layers of each device as a model is loaded."""
    with Model(model, devices=cluster.devices, context=params, splitter=splitter) as loaded:
        return tuple(round(share) for share in loaded.shares)


def plan_time(rounds: int) -> dict[str, object]:
    """Seconds of planning for a cluster that is not there."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "large.gguf"
        FakeModel().write(model)
        devices = tuple(
            DeviceProfile(f"D{i}", 8000.0 + 500 * i, 300.0 + 20 * i, 1e-4, 2e-4, 24 << 30, 24 << 30)
            for i in range(16)
        )
        link = LinkProfile(1e-4, 1.1e9)
        between = {(i, j): link for i in range(16) for j in range(16) if i != j}
        cluster = ClusterProfile(devices, (link,) * 16, between)
        for _ in range(rounds):
            began = time.perf_counter()
            params = ContextParams(n_ctx=8192)
            work = ModelWork.of(model, ModelParams(), params, sizes=[512], sequences=[1, 8])
            setting = Setting(
                cluster,
                tuple(work.times(device) for device in devices),
                work.traffic,
                work.head,
                work.n_layer,
                n_ctx=8192,
            )
            memory = MemoryModel.of(model, ModelParams(), params)
            plan = make_plan(setting, memory, prompts=[512, 4096], concurrency=[1, 8])
            seconds.append(time.perf_counter() - began)
    print(f"16 devices, 80 layers: {statistics.median(seconds):.2f} s; {plan.advice}")
    return {"seconds": seconds}


PARTS = {"accuracy": accuracy, "cpu": cpu, "split": split, "time": plan_time}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all numbers there too")
    args = parser.parse_args()
    print(machine(), file=sys.stderr)
    found = {}
    for part in args.parts or PARTS:
        print(f"\n## {part}", flush=True)
        found[part] = PARTS[part](args.rounds)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
