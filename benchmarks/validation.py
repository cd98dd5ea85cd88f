"""What it costs a worker to look at a graph before it computes it: once, when it sees it first.

    python benchmarks/validation.py [--model smollm2] [--rounds 200]

The graph is the one that a head with a single worker sends for a prompt: the whole model. It is
checked in this process. Prints median and range in milliseconds, of each step of the worker and of
all together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import caravan
from caravan import engine
from caravan.backend import graph as head
from caravan.llm import Context, ContextParams, Model
from caravan.stream.link import ExtGraph
from caravan.wire.extension import ADDRESS_SHIFT
from caravan.wire.records import EXT_TENSOR
from caravan.worker.buffers import Memory
from caravan.worker.graph import Graph, build_tensors, check_support
from caravan.worker.native import CPU, NativeDevice
from caravan.worker.table import Table, from_extension
from caravan.worker.validate import check
from measure import machine

_PAGE = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    print(machine(), file=sys.stderr)
    n_nodes, body = _graph(args.model)
    n_tensors = len(body) // EXT_TENSOR.itemsize
    table = from_extension(n_nodes, n_tensors, body)
    device = _device()
    memory = _memory(table, device)
    tensors = build_tensors(table, check(table, memory))
    steps: dict[str, Callable[[], object]] = {
        "parse": lambda: from_extension(n_nodes, n_tensors, body),
        "validate": lambda: check(table, memory),
        "ask the device": lambda: check_support(table, tensors, device),
        "all, and build": lambda: Graph(from_extension(n_nodes, n_tensors, body), memory, device),
    }
    print(f"{n_nodes} nodes, {n_tensors} tensors, {len(body)} bytes; {args.rounds} rounds\n")
    print("| step | median, ms | range of the middle 80 %, ms |")
    print("| --- | ---: | ---: |")
    for name, step in steps.items():
        times = _times(step, args.rounds)
        low, high = np.quantile(times, (0.1, 0.9))
        print(f"| {name} | {statistics.median(times):.2f} | {low:.2f} to {high:.2f} |")


def _graph(name: str) -> tuple[int, bytes]:
    """Nodes and rows of the biggest graph that a head sends for a prompt."""
    seen: list[tuple[int, bytes]] = []
    real = head.Graph.ext_payload

    def noted(self: head.Graph) -> ExtGraph:
        sent = real(self)
        seen.append((sent.n_nodes, b"".join(bytes(part) for part in sent.rows)))
        return sent

    head.Graph.ext_payload = noted  # type: ignore[method-assign]
    try:
        with (
            caravan.LocalWorkers(1, threads=1) as workers,
            caravan.connect(workers.endpoints) as cluster,
            Model(caravan.models.resolve(name), devices=cluster.devices) as model,
            Context(model, ContextParams(n_ctx=256, n_ubatch=64)) as context,
        ):
            context.decode(list(range(1, 65)))
            context.logits()
    finally:
        head.Graph.ext_payload = real  # type: ignore[method-assign]
    return max(seen)


def _device() -> NativeDevice:
    loaded = engine.load()
    handle = next(h for h in loaded.ggml.devices() if loaded.ggml.dev_type(h) == CPU)
    return NativeDevice(loaded, handle, 0, 1)


def _memory(table: Table, device: NativeDevice) -> Memory:
    """Buffers for every handle that the graph names; nothing is written to them."""
    handles = np.unique(table.rows["data"] >> np.uint64(ADDRESS_SHIFT))
    handles = handles[handles > 0]
    buffer = device.allocate(_PAGE)
    same = np.ones(len(handles), np.uint64)
    return Memory(
        1,
        handles,
        same << np.uint64(ADDRESS_SHIFT - 1),
        same * np.uint64(buffer.base),
        same * np.uint64(buffer.pointer),
    )


def _times(step: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of each round, after a few to warm up."""
    times = []
    for _ in range(rounds + 5):
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    return times[5:]


if __name__ == "__main__":
    main()
