"""What the kernels do with the bad graphs of the corpus when nobody checks them.

    PYTHONPATH=src:tests python -m worker.unchecked [WORDS...]

Each is computed in a process of its own. Prints what came of it: the signal that ended the process,
the number of bytes outside of the result that changed, or that nothing is to be seen, which may
mean that too much was read. `test_unchecked` runs some, if asked to.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter

import numpy as np

from caravan import engine
from caravan.worker import validate
from caravan.worker.graph import Graph
from caravan.worker.native import CPU, NativeDevice
from worker.corpus import Good, bad_graphs, data_of
from worker.test_corpus import BASE, memory_of

# memory behind the last tensor, and what fills all memory that is no tensor's
_BEHIND, _FILL = 1 << 16, 0xA5
_SECONDS = 20


def outcome(good: Good) -> str:
    """Computes it in a child process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _compute(good, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return signal.Signals(status).name if os.WIFSIGNALED(status) else said


def _compute(good: Good, writer: int) -> None:
    """Never returns."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.alarm(_SECONDS)
    said = "harmless"
    try:
        loaded = engine.load()
        handle = next(h for h in loaded.ggml.devices() if loaded.ggml.dev_type(h) == CPU)
        device = NativeDevice(loaded, handle, 0, 1)
        device.guarded = False
        places = good.places()
        buffer = device.allocate(places[-1] + _BEHIND)
        buffer.clear(_FILL)
        for tensor, at in zip(good.tensors, places, strict=False):
            buffer.write(at, data_of(tensor))
        before = np.frombuffer(bytes(buffer.read(0, buffer.size)), np.uint8)
        graph = Graph(good.table(BASE), memory_of(buffer.size, buffer.base, buffer.pointer), device)
        device.compute(graph)
        after = np.frombuffer(bytes(buffer.read(0, buffer.size)), np.uint8)
        changed = before != after
        changed[places[0] : places[0] + good.d.nbytes] = False
        if changed.any():
            said = f"{int(changed.sum())} bytes outside of the result"
    except Exception as exc:
        said = f"refused: {exc}"
    os.write(writer, said.encode())
    os._exit(0)


def without_rules() -> None:
    """From here on only what holds for every tensor is checked."""
    validate._check_rules = lambda table, facts, empty: None
    os.environ["GGML_NO_BACKTRACE"] = "1"


def main() -> None:
    without_rules()
    counts: Counter[str] = Counter()
    for name, good, _ in bad_graphs():
        if all(word in name for word in sys.argv[1:]):
            came = outcome(good)
            kind = "bytes outside" if "outside" in came else came.partition(":")[0]
            counts[kind] += 1
            print(f"{came[:60]:36} {name}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
