"""Each op's rule: what the engine makes passes and is computed, what is wrong is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from caravan import engine
from caravan.engine.layouts import OP_NAMES
from caravan.errors import RemoteError
from caravan.worker.buffers import Memory
from caravan.worker.graph import Graph
from caravan.worker.native import NativeDevice
from caravan.worker.rules.registry import RULES
from caravan.worker.validate import VIEW_OPS, check
from worker.corpus import GOODS, Good, bad_graphs, data_of

BASE = 1 << 40
BAD = {name: (good, words) for name, good, words in bad_graphs()}


def memory_of(size: int, address: int = 0x7000_0000, pointer: int = 0x6000_0000) -> Memory:
    u64 = [np.array([value], np.uint64) for value in (1, size, address, pointer)]
    return Memory(1, *u64)


@pytest.fixture(scope="module")
def device() -> Iterator[NativeDevice]:
    loaded = engine.load()
    handle = next(h for h in loaded.ggml.devices() if loaded.ggml.dev_type(h) == 0)
    yield NativeDevice(loaded, handle, 0, 2)


@pytest.mark.parametrize("name", GOODS)
def test_what_the_engine_makes_is_computed_within_its_result(name, device) -> None:
    good = GOODS[name]
    places = good.places()
    buffer = device.allocate(places[-1])
    try:
        buffer.clear(0)
        for tensor, at in zip(good.tensors, places, strict=False):
            if tensor.at is None:
                buffer.write(at, data_of(tensor))
        before = np.frombuffer(bytes(buffer.read(0, places[-1])), np.uint8)
        memory = memory_of(buffer.size, buffer.base, buffer.pointer)
        graph = Graph(good.table(BASE), memory, device)
        assert device.compute(graph) == 0
        after = np.frombuffer(bytes(buffer.read(0, places[-1])), np.uint8)
        changed = np.flatnonzero(before != after)
        assert len(changed) == 0 or changed[0] >= places[0]
        assert len(changed) == 0 or changed[-1] < places[0] + good.d.nbytes
    finally:
        buffer.free()


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_refused(name) -> None:
    good, words = BAD[name]
    memory = memory_of(1 << 38 if "scratch" in words else good.places()[-1])
    with pytest.raises(RemoteError, match=words) as caught:
        check(good.table(BASE), memory)
    assert "'the node'" in str(caught.value) or "'source" in str(caught.value)


def test_every_rule_is_in_the_corpus() -> None:
    known = {good.op for good in GOODS.values()}
    views = {OP_NAMES[number] for number in np.flatnonzero(VIEW_OPS)}
    assert {OP_NAMES[number] for number in RULES} == known | views
    # and what breaks it
    assert {good.op for good, _ in BAD.values()} == known
    assert len(BAD) >= 60


NO_INFERENCE = [name for number, name in enumerate(OP_NAMES) if number not in RULES]


def test_what_is_no_inference() -> None:
    backward = {name for name in OP_NAMES if name.endswith("_BACK")} - {"ROPE_BACK"}
    calls = {"MAP_CUSTOM1", "MAP_CUSTOM2", "MAP_CUSTOM3", "CUSTOM"}
    training = {"CROSS_ENTROPY_LOSS", "OPT_STEP_ADAMW", "OPT_STEP_SGD", "COUNT_EQUAL", "OUT_PROD"}
    assert set(NO_INFERENCE) == backward | calls | training


@pytest.mark.parametrize("op", NO_INFERENCE)
def test_what_is_no_inference_is_refused(op) -> None:
    good = Good(op, GOODS["ADD"].d, GOODS["ADD"].s)
    with pytest.raises(RemoteError, match=rf"{op} 'the node'\): this op is never computed"):
        check(good.table(BASE), memory_of(1 << 20))
