"""What the head believes a worker to remember, against simple models of the workers' rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan.stream.graphs import GraphMemory, LastGraph, LruGraphs, ManyGraphs
from caravan.wire.extension import GRAPH_LRU

CAPACITY = 4


class LruWorker:
    """The extension: the most recently used stay; a freed buffer takes its graphs along."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: list[tuple[int, frozenset[int]]] = []

    def has(self, uid: int) -> bool:
        return any(known == uid for known, _ in self.used)

    def recompute(self, uid: int) -> None:
        (entry,) = [item for item in self.used if item[0] == uid]
        self.used.remove(entry)
        self.used.append(entry)

    def compute(self, uid: int, handles: frozenset[int]) -> None:
        self.used = [item for item in self.used if item[0] != uid]
        self.used.append((uid, handles))
        self.used = self.used[-self.capacity :]

    def free(self, handle: int) -> None:
        self.used = [item for item in self.used if handle not in item[1]]


class Worker7:
    """ggml-rpc 7: the last graph of the device, until any buffer is freed."""

    def __init__(self) -> None:
        self.stored: int | None = None

    def has(self, uid: int) -> bool:
        return self.stored == uid

    def recompute(self, uid: int) -> None:
        assert self.stored is not None

    def compute(self, uid: int, handles: frozenset[int]) -> None:
        self.stored = uid

    def free(self, handle: int) -> None:
        self.stored = None


class Worker8:
    """ggml-rpc 8: a map that is cleared when it is full, and whose graphs a free leaves empty."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stored: dict[int, str | None] = {}

    def has(self, uid: int) -> bool:
        return self.stored.get(uid) is not None

    def recompute(self, uid: int) -> None:
        assert self.stored[uid] is not None

    def compute(self, uid: int, handles: frozenset[int]) -> None:
        if uid == 0:
            return
        if len(self.stored) >= self.capacity:
            self.stored.clear()
        self.stored[uid] = "a graph"

    def free(self, handle: int) -> None:
        for uid in self.stored:
            self.stored[uid] = None


class SmallMany(ManyGraphs):
    CAPACITY = CAPACITY


PAIRS: dict[str, Any] = {
    "extension": lambda: (LruGraphs(CAPACITY), LruWorker(CAPACITY)),
    "7": lambda: (LastGraph(), Worker7()),
    "8": lambda: (SmallMany(), Worker8(CAPACITY)),
}


def compute(memory: GraphMemory, worker: Any, uid: int, handles: frozenset[int]) -> bool:
    """What a link does; whether a recompute was enough."""
    known = memory.known(uid)
    assert known == worker.has(uid)
    if known:
        worker.recompute(uid)
    else:
        worker.compute(uid, handles)
        memory.add(uid, handles)
    return known


graph_steps = st.lists(
    st.tuples(st.just("compute"), st.integers(1, 9), st.frozensets(st.integers(1, 4), max_size=2))
    | st.tuples(st.just("free"), st.integers(1, 4), st.just(frozenset())),
    max_size=60,
)


@pytest.mark.parametrize("name", PAIRS)
@given(steps=graph_steps)
@settings(max_examples=200)
def test_head_and_worker_never_disagree(name, steps):
    memory, worker = PAIRS[name]()
    for kind, number, handles in steps:
        if kind == "compute":
            compute(memory, worker, number, handles)
        else:
            memory.freed(number)
            worker.free(number)
    for uid in range(1, 10):
        assert memory.known(uid) == worker.has(uid)


def test_the_real_capacities():
    assert GRAPH_LRU == 64
    assert ManyGraphs.CAPACITY == 1024


def test_lru_holds_exactly_its_capacity():
    memory = LruGraphs()
    for uid in range(1, 65):
        memory.add(uid, frozenset())
    assert memory.known(1)
    memory.add(65, frozenset())
    assert memory.known(1) and not memory.known(2) and memory.known(65)


def test_version_8_forgets_all_when_one_more_comes():
    memory = ManyGraphs()
    for uid in range(1, 1025):
        memory.add(uid, frozenset())
    assert memory.known(1) and memory.known(1024)
    memory.add(1025, frozenset())
    assert not memory.known(1) and memory.known(1025)


def test_version_8_counts_what_a_free_has_emptied():
    memory, worker = ManyGraphs(), Worker8(1024)
    for uid in range(1, 1025):
        compute(memory, worker, uid, frozenset())
    memory.freed(1)
    worker.free(1)
    assert not memory.known(5)
    compute(memory, worker, 5, frozenset())
    compute(memory, worker, 2000, frozenset())
    assert memory.known(5) and memory.known(2000) and not memory.known(6)


def test_version_7_keeps_the_last_one_only():
    memory = LastGraph()
    memory.add(5, frozenset())
    assert memory.known(5)
    memory.add(6, frozenset())
    assert not memory.known(5) and memory.known(6)
    # a graph without a name replaces it too
    memory.add(0, frozenset())
    assert not memory.known(6)
