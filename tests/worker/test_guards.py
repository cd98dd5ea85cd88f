"""Numbers that only kernels see: out of range they end one session, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from caravan import engine
from caravan.engine.layouts import FLAG_COMPUTE
from caravan.errors import RemoteError
from caravan.worker.graph import Graph
from caravan.worker.local import Worker
from caravan.worker.native import NativeDevice
from caravan.worker.table import Table
from worker.corpus import GOODS, I32, Good, T, data_of
from worker.raw_client import Closed, ExtClient, linear_rows
from worker.test_corpus import BASE, memory_of

GUARDED = ("MUL_MAT_ID", "SSM_SCAN", "ARGSORT")
# by number: which source says what is read or written, and numbers that are out of range
BY_NUMBER = {
    "GET_ROWS": (1, (5,)),
    "GET_ROWS of half": (1, (-1,)),
    "GET_ROWS of blocks": (1, (5,)),
    "SET_ROWS": (1, (9, -1)),
    "ADD_ID": (2, (-1,)),
    "MUL_MAT_ID": (2, (5, -1, 10**9)),
    "SSM_SCAN": (6, (5, -1)),
}


@pytest.fixture(scope="module")
def device() -> Iterator[NativeDevice]:
    loaded = engine.load()
    handle = next(h for h in loaded.ggml.devices() if loaded.ggml.dev_type(h) == 0)
    yield NativeDevice(loaded, handle, 0, 2)


def computed(device: NativeDevice, good: Good, data: dict[int, bytes]) -> tuple[bytes, bytes]:
    """The result, and the memory around it."""
    places = good.places()
    buffer = device.allocate(places[-1])
    buffer.clear(0)
    for k, (tensor, at) in enumerate(zip(good.tensors, places, strict=False)):
        buffer.write(at, data.get(k, data_of(tensor)))
    graph = Graph(good.table(BASE), memory_of(buffer.size, buffer.base, buffer.pointer), device)
    assert device.compute(graph) == 0
    whole = bytes(buffer.read(0, places[-1]))
    buffer.free()
    end = places[0] + good.d.nbytes
    return whole[places[0] : end], whole[: places[0]] + whole[end : end + 64]


@pytest.mark.parametrize("name", GUARDED)
def test_a_guard_changes_no_result(name, device, monkeypatch) -> None:
    good = GOODS[name]
    guarded, _ = computed(device, good, {})
    monkeypatch.setattr(device, "guarded", False)
    assert computed(device, good, {})[0] == guarded
    assert any(guarded)


class Anything:
    """A device that supports every op, and wants guards."""

    guarded = True

    def supports(self, tensor: int) -> bool:
        return True

    def estimate(self, table: Table) -> int:
        return 0


def test_one_guard_serves_all_nodes_with_the_same_ids() -> None:
    good = GOODS["MUL_MAT_ID"]
    table = good.table(BASE)
    rows = np.stack([table.rows[0], *table.rows])
    rows["src"][:2, :3] = 2, 3, 4
    graph = Graph(replace(table, rows=rows, n_nodes=2), memory_of(1 << 20), Anything())
    _, tensors, nodes, *_ = graph._keep
    assert len(tensors) == len(rows) + 3
    assert nodes.tolist() == [tensors[k : k + 1].ctypes.data for k in (len(rows), 0, 1)]
    assert graph.n_nodes == 2


@pytest.mark.parametrize("flags", [(0, FLAG_COMPUTE), (FLAG_COMPUTE, 0), (0, 0)])
def test_a_guard_is_computed_if_one_of_its_nodes_is(flags, device) -> None:
    good = GOODS["MUL_MAT_ID"]
    places = good.places()
    buffer = device.allocate(places[-1])
    for tensor, at in zip(good.tensors, places, strict=False):
        buffer.write(at, data_of(tensor))
    table = good.table(BASE)
    rows = np.stack([table.rows[0], *table.rows])
    rows["src"][:2, :3] = 2, 3, 4
    rows["flags"][:2] = flags
    memory = memory_of(buffer.size, buffer.base, buffer.pointer)
    graph = Graph(replace(table, rows=rows, n_nodes=2), memory, device)
    checked = graph._keep[-3]
    checked[:] = 0
    assert device.compute(graph) == 0
    ids = np.frombuffer(data_of(good.tensors[3]), np.int32)
    assert ids.any()
    assert (checked[: len(ids)] == (ids if any(flags) else 0)).all()
    buffer.free()


def test_sorting_with_numbers_that_are_none_stays_within_the_row(device) -> None:
    good = Good("ARGSORT", T((64, 3), I32), (T((64, 3)),), {0: 1})
    keys = np.random.default_rng(7).standard_normal((3, 64)).astype(np.float32)
    keys[:, ::3] = math.nan
    result, around = computed(device, good, {1: keys.tobytes()})
    rows = np.frombuffer(result, np.int32).reshape(3, 64)
    assert (np.sort(rows, axis=1) == np.arange(64)).all()
    assert not any(around)


def test_what_sorting_would_take_is_bounded() -> None:
    keys = T((64, 1 << 26), nb=(4, 0, 0, 0))
    good = Good("ARGSORT", T((64, 1 << 26), I32, (4, 0, 0, 0)), (keys,), {0: 1})
    with pytest.raises(RemoteError, match="scratch memory"):
        Graph(good.table(BASE), memory_of(1 << 20), Anything())


def test_many_graphs_have_one_table_of_numbers() -> None:
    """A few bytes of a graph name as many experts as they like, if those lie on one another."""

    def of_experts(count: int) -> Graph:
        experts = T((32, 3, count), nb=(4, 128, 0, 0))
        good = Good("MUL_MAT_ID", T((3, 1, 1)), (experts, T((32, 1, 1)), T((1, 1), I32)))
        return Graph(good.table(BASE), memory_of(1 << 20), Anything())

    kept = [of_experts(count)._keep[-1] for count in (1_000_000, 1_000_001, 1 << 20)]
    assert kept[0] is kept[1] is kept[2]
    with pytest.raises(RemoteError, match="ids below 8388608: there may be 4194304"):
        of_experts(1 << 23)


def test_a_graph_says_what_its_guards_take() -> None:
    good = GOODS["ARGSORT"]
    assert Graph(good.table(BASE), memory_of(1 << 20), Anything()).scratch == good.d.nbytes
    good = GOODS["CLAMP"]
    assert Graph(good.table(BASE), memory_of(1 << 20), Anything()).scratch == 0


# through a worker


def compute(client: ExtClient, good: Good, data: dict[int, bytes]) -> bytes:
    """Raises Closed when the session ends."""
    places = good.places()
    _, base = client.alloc(places[-1])
    for k, (tensor, at) in enumerate(zip(good.tensors, places, strict=False)):
        if tensor.at is None and k:
            client.set(base + at, data.get(k, data_of(tensor)))
    client.graph(good.table(base).rows, 1)
    return client.get(base + places[0], good.d.nbytes)


@pytest.mark.parametrize("name", BY_NUMBER)
def test_a_number_out_of_range_ends_that_session_only(name, worker: Worker) -> None:
    source, numbers_out = BY_NUMBER[name]
    good = GOODS[name]
    ids = good.tensors[source + 1]
    with ExtClient(worker.endpoint) as neighbour:
        rows, _ = linear_rows(neighbour.alloc(1 << 16)[1])
        for wrong in numbers_out:
            numbers = np.frombuffer(data_of(ids), np.int32 if ids.kind == I32 else np.int64).copy()
            numbers[-1] = wrong
            with ExtClient(worker.endpoint) as client, pytest.raises(Closed):
                compute(client, good, {source + 1: numbers.tobytes()})
        neighbour.graph(rows, 2)
        assert len(neighbour.get(int(rows["data"][1]), 48)) == 48
        with ExtClient(worker.endpoint) as client:
            assert len(compute(client, good, {})) == good.d.nbytes
