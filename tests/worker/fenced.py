"""Changes sound graphs at random, and computes what still passes, with a fence around each tensor.

    PYTHONPATH=src:tests python -m worker.fenced [--rounds 1000] [--seed 1] [--op WORD]

Every tensor has a buffer of its own, which ends, or begins, at memory that may not be touched. What
passes the checks must neither run into that nor end the process otherwise. Prints what does, and
fails then. Each is computed in a process of its own; the seed of a round reproduces it.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import replace

import numpy as np

from caravan import engine
from caravan.engine.layouts import TYPE_BLOCK
from caravan.errors import RemoteError
from caravan.wire.extension import ADDRESS_SHIFT
from caravan.worker.buffers import Memory
from caravan.worker.graph import Graph
from caravan.worker.native import CPU, NativeDevice
from caravan.worker.table import Table
from caravan.worker.validate import check
from worker.corpus import GOODS, Good, T, data_of

_PAGE = mmap.PAGESIZE
_MOST = 8 << 20
_SECONDS = 5
# with fewer rows, those that the numbers of the sound graph name are not there: an assertion
_BY_NUMBER = ("_ROWS", "ADD_ID", "MUL_MAT_ID", "SSM_SCAN")
_KINDS = [number for number, block in enumerate(TYPE_BLOCK) if block]
_NUMBERS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 255, 1 << 16, (1 << 31) - 1)


def changed(good: Good, dice: random.Random) -> Good:
    """One to three changes; some of them to several tensors alike, which may be sound again."""
    for _ in range(dice.randint(1, 3)):
        tensors: dict[int, T] = {
            -1: good.d,
            **{k: s for k, s in enumerate(good.s) if s is not None},
        }
        some = dice.sample(list(tensors), dice.randint(1, min(3, len(tensors))))
        how, axis, to = dice.choice("nnsspkmtr"), dice.randrange(4), dice.choice(_NUMBERS)
        kind = dice.choice(_KINDS)
        if how == "p":
            place = dice.choice([*good.p, dice.randrange(12)])
            value: float = dice.choice((to, -to, -1)) if dice.random() < 0.8 else dice.random()
            good = replace(good, p={**good.p, place: value})
            continue
        if how == "m":
            good = replace(good, s=(*good.s, None)[: len(good.s)])
        for k in some:
            new = _other(tensors[k], how, axis, to, kind)
            if k < 0:
                good = replace(good, d=new)
            else:
                good = replace(good, s=(*good.s[:k], new, *good.s[k + 1 :]))
    return good


def _other(tensor: T, how: str, axis: int, to: int, kind: int) -> T:
    ne, nb = list(tensor.sizes), list(tensor.strides)
    if how == "n":
        ne[axis] = to
        return replace(tensor, ne=tuple(ne), nb=None)
    if how == "s":
        nb[axis] = nb[to % 4] if to % 3 else to * 4
        return replace(tensor, nb=tuple(nb))
    if how == "k":
        return replace(tensor, kind=kind, nb=None)
    if how == "t":
        other = to % 4
        ne[axis], ne[other] = ne[other], ne[axis]
        nb[axis], nb[other] = nb[other], nb[axis]
        return replace(tensor, ne=tuple(ne), nb=tuple(nb))
    if how == "r":
        ne[axis] = max(1, ne[axis] * (1 + to % 3))
        return replace(tensor, ne=tuple(ne), nb=None)
    return tensor


def table_of(good: Good) -> Table:
    """The tensors in a buffer each, by handles 1, 2, …"""
    table = good.table(0)
    for k, tensor in enumerate(good.tensors):
        handle = (tensor.at if tensor.at is not None else k) + 1
        table.rows["data"][k] = (handle << ADDRESS_SHIFT) + tensor.shift
    return table


def memory_of(good: Good, bases: list[int], pointer: int) -> Memory:
    count = len(good.tensors)
    sizes = [max(_whole(t), 0) for t in good.tensors]
    columns = (list(range(1, count + 1)), sizes, bases, [pointer] * count)
    return Memory(1, *(np.array(column, np.uint64) for column in columns))


def _whole(tensor: T) -> int:
    return -(-tensor.nbytes // 8) * 8


class Fences:
    """Memory between pages that nobody may touch; never given back."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_long,
        ]
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def around(self, data: bytes, at_end: bool) -> int:
        """The address of a copy."""
        pages = max(1, -(-len(data) // _PAGE))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = self._libc.mmap(None, (pages + 2) * _PAGE, 3, flags, -1, 0)
        for fence in (start, start + (pages + 1) * _PAGE):
            assert self._libc.mprotect(fence, _PAGE, 0) == 0
        address = start + _PAGE + (pages * _PAGE - len(data) if at_end else 0)
        ctypes.memmove(address, data, len(data))
        return int(address)


def passes(good: Good) -> bool:
    """Whether the checks let it through."""
    if sum(max(t.nbytes, 0) for t in good.tensors) > _MOST:
        return False
    try:
        check(table_of(good), memory_of(good, [1 << 20] * len(good.tensors), 1 << 20))
    except RemoteError:
        return False
    return True


def run(good: Good, at_end: bool) -> str:
    """Computes it in a child process; what came of it."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(_SECONDS)
        os._exit(_compute(good, at_end))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return "computed" if os.WEXITSTATUS(status) == 0 else "refused by the device"


def _compute(good: Good, at_end: bool) -> int:
    """0 when it was computed, 1 when it was refused after all; or the process ends."""
    loaded = engine.load()
    handle = next(h for h in loaded.ggml.devices() if loaded.ggml.dev_type(h) == CPU)
    device = NativeDevice(loaded, handle, 0, 2)
    fences = Fences()
    bases = [fences.around(data_of(t).ljust(_whole(t), b"\0"), at_end) for t in good.tensors]
    memory = memory_of(good, bases, device.allocate(_PAGE).pointer)
    try:
        graph = Graph(table_of(good), memory, device)
    except RemoteError:
        return 1
    return device.compute(graph)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--op", default="")
    args = parser.parse_args()
    os.environ["GGML_NO_BACKTRACE"] = "1"
    names = [name for name in GOODS if args.op in name]
    counts: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.rounds):
        dice = random.Random(seed)
        name = dice.choice(names)
        good = changed(GOODS[name], dice)
        came = run(good, bool(seed % 2)) if passes(good) else "refused at once"
        if came == "SIGABRT" and any(op in name for op in _BY_NUMBER):
            came = "a number out of range"
        elif came == "SIGALRM":
            came = "takes long"
        counts[came] += 1
        if came.startswith("SIG"):
            print(f"{came} seed {seed} {name}: {good.d} {good.s} {good.p}", flush=True)
    print(dict(counts))
    return int(any(came.startswith("SIG") for came in counts))


if __name__ == "__main__":
    sys.exit(main())
