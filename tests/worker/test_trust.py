"""Where llama.cpp's server trusts its client, and dies or writes where it must not: each of these
places, tried at a live worker in both protocols. The worker refuses, in words or by closing the
connection, other sessions go on, and nothing stays behind.
"""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from caravan.errors import RemoteError, TransportError
from caravan.wire import codec
from caravan.wire.commands import Base, Ext
from caravan.wire.extension import Status
from caravan.wire.records import EXT_TENSOR
from caravan.worker import graph
from caravan.worker.base_channel import BaseChannel
from caravan.worker.local import Worker
from caravan.worker.table import Table
from wired import Side, wait_until
from worker.fakes import FakeDevice, lanes
from worker.raw_client import (
    ADD,
    COMPUTE,
    MUL_MAT,
    Q8_0,
    BaseClient,
    Closed,
    ExtClient,
    linear_rows,
    record,
    row,
    strides,
)
from worker.test_channels import serving

UNARY, GLU, CUSTOM = 86, 96, 95
I8 = 24
OVER = 1 << 63
WRAPS = (1 << 64) - 8
# 2^64 + 12 bytes from the first to the last, by dimensions and strides of 32 bits
ROUND_NE, ROUND_NB = (1, (1 << 32) - 1, 1 << 29, 2), (4, (1 << 32) - 1, 24, 30)


# The head that behaves


@pytest.fixture(scope="module")
def witness(worker) -> Iterator[Callable[[], None]]:
    """Checks that a session beside goes on, and that the worker has not grown."""
    with ExtClient(worker.endpoint) as client:
        _, base = client.alloc(1 << 16)
        rows, at = linear_rows(base)
        rng = np.random.default_rng(3)
        for name, shape in (("w", (4, 8)), ("x", (3, 8)), ("b", (4,))):
            client.set(base + at[name], rng.standard_normal(shape, np.float32).tobytes())
        client.graph(rows, 2, uid=1)
        expected = client.get(base + at["y"], 48)
        before = size(worker.pid)

        def check() -> None:
            client.post(Ext.MEMSET, base + at["y"], 48, 0)
            client.post(Ext.GRAPH_RECOMPUTE, 1)
            assert client.get(base + at["y"], 48) == expected
            with BaseClient(worker.endpoint) as other:
                assert other.call(Base.DEVICE_COUNT) == (2,)
            assert size(worker.pid) < before + (8 << 20)

        yield check


def size(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


# The base protocol: the connection is closed

BaseCase = Callable[[BaseClient, int, int], object]


def change(tensor: np.ndarray, **fields: object) -> np.ndarray:
    for name, value in fields.items():
        tensor[name] = value
    return tensor


def length(number: int, count: int) -> BaseCase:
    return lambda c, h, b: c.send(codec.base_request(number, count))


def compute(*tensors: np.ndarray, nodes: list[int] | None = None) -> BaseCase:
    def send(client: BaseClient, handle: int, base: int) -> None:
        placed = [place(t, handle, base) for t in tensors]
        client.graph(nodes if nodes is not None else [int(placed[0]["id"])], placed)

    return send


def place(tensor: np.ndarray, handle: int, base: int) -> np.ndarray:
    """Test tensors are made for handle 1; the same for any."""
    tensor = tensor.copy()
    if tensor["buffer"] and int(tensor["data"]):
        tensor["data"] = int(tensor["data"]) - (1 << 40) + base
        tensor["buffer"] = handle
    return tensor


def two_d(number: int, offset: int, size: int, n_rows: int, stride: int) -> BaseCase:
    """Rows of a tensor of 256 bytes, within a buffer of 4096."""

    def send(client: BaseClient, handle: int, base: int) -> None:
        tail = bytes(size * 2) if number == Base.SET_TENSOR_2D else b""
        tensor = record(1, (64,), handle, base + 1024).tobytes()
        client.post(number, tensor, offset, size, n_rows, stride, tail=tail)

    return send


B = 1 << 40


def chain(count: int, loop: bool = False) -> BaseCase:
    """One node, and behind it sources of sources."""

    def send(client: BaseClient, handle: int, base: int) -> None:
        tensors = np.tile(record(1, (4,), handle, base), count)
        tensors["id"] = np.arange(1, count + 1)
        tensors["src"][:, :2] = np.roll(tensors["id"], -1)[:, None]
        tensors["op"], tensors["flags"] = ADD, COMPUTE
        if not loop:
            tensors["src"][-1] = 0
        client.graph([1], list(tensors))

    return send


BASE: dict[str, BaseCase] = {
    **{
        f"{Base(n).name} of {count:#x} bytes": length(n, count)
        for n in (Base.SET_TENSOR, Base.GRAPH_COMPUTE)
        for count in (OVER, 1 << 45)
    },
    "data before its buffer": lambda c, h, b: c.set(record(1, (4,), h, b - 4), bytes(4)),
    "data behind its buffer": lambda c, h, b: c.set(record(1, (4,), h, b + 4096), bytes(4)),
    "data that wraps": lambda c, h, b: c.set(record(1, (4,), h, (1 << 64) - 4), bytes(8)),
    "a graph's data behind its buffer": compute(
        record(1, (4,), 1, B + 4090, ADD, (2, 2)), record(2, (4,), 1, B)
    ),
    "ne with a product of 2^63": lambda c, h, b: c.get(
        change(record(1, (4,), h, b), ne=(1 << 31, 1 << 31, 2, 1)), 5000
    ),
    "a graph's ne with a product of 2^63": compute(
        change(record(1, (4,), 1, B, ADD, (2, 2)), ne=(1 << 31, 1 << 31, 2, 1)),
        record(2, (4,), 1, B),
    ),
    "nb with a sum that is huge": lambda c, h, b: c.get(
        change(record(1, (4, 2, 2, 2), h, b), nb=[0xFFFFFFFF] * 4), 5000
    ),
    "COPY by nb with a sum that wraps": lambda c, h, b: c.call(
        Base.COPY_TENSOR,
        change(record(1, (1,), h, b), ne=ROUND_NE, nb=ROUND_NB).tobytes(),
        record(2, (1,), h, b + 2048).tobytes(),
    ),
    "a graph's nb with a sum that wraps": compute(
        change(record(1, (1,), 1, B, ADD, (2, 2)), ne=ROUND_NE, nb=ROUND_NB),
        change(record(2, (1,), 1, B), ne=ROUND_NE, nb=ROUND_NB),
    ),
    "ne of half a block": compute(
        record(1, (4, 1), 1, B, MUL_MAT, (2, 3)),
        change(record(2, (33, 4), 1, B, kind=Q8_0), nb=strides((33, 4, 1, 1), 34, 32)),
        record(3, (33, 1), 1, B),
    ),
    "blocks apart": compute(
        record(1, (4, 1), 1, B, MUL_MAT, (2, 3)),
        change(record(2, (32, 4), 1, B, kind=Q8_0), nb=(40, 40, 160, 160)),
        record(3, (32, 1), 1, B),
    ),
    "SET past the tensor, within the buffer": lambda c, h, b: c.set(
        record(1, (4,), h, b), bytes(17)
    ),
    "GET past the tensor, within the buffer": lambda c, h, b: c.get(record(1, (4,), h, b), 17),
    "SET at an offset that wraps": lambda c, h, b: c.set(
        record(1, (64,), h, b + 64), bytes(8), WRAPS
    ),
    "GET at an offset that wraps": lambda c, h, b: c.get(record(1, (64,), h, b + 64), 8, WRAPS),
    "MEMSET at an offset that wraps": lambda c, h, b: c.post(
        Base.MEMSET_TENSOR, record(1, (64,), h, b + 64).tobytes(), WRAPS, 8, 1
    ),
    **{
        f"{name} of rows that {words}": two_d(number, *values)
        for name, number in (("SET", Base.SET_TENSOR_2D), ("GET", Base.GET_TENSOR_2D))
        for words, values in {
            "pass the tensor": (0, 8, 4, 84),
            "begin at an offset that wraps": (WRAPS, 8, 2, 16),
            "have a stride that wraps": (0, 8, 2, WRAPS),
            "are so many that they wrap": (0, 8, (1 << 60) + 1, 16),
        }.items()
    },
    "COPY of 400 bytes onto 4": lambda c, h, b: c.call(
        Base.COPY_TENSOR, record(1, (100,), h, b).tobytes(), record(2, (1,), h, b + 2048).tobytes()
    ),
    "GET_ALLOC_SIZE with a source of no type": lambda c, h, b: c.call(
        Base.GET_ALLOC_SIZE,
        0,
        record(1, (4,), h, b, ADD, (2, 2)).tobytes(),
        record(2, (4,), h, b, kind=77).tobytes() + bytes(9 * 296),
    ),
    "op 101": compute(record(1, (4,), 1, B, 101, (2, 2)), record(2, (4,), 1, B)),
    "op 65535": compute(record(1, (4,), 1, B, 65535, (2, 2)), record(2, (4,), 1, B)),
    "UNARY of no kind": compute(
        change(record(1, (4,), 1, B, UNARY, (2,)), op_params=[999] + [0] * 15),
        record(2, (4,), 1, B),
    ),
    "GLU of no kind": compute(
        change(record(1, (4,), 1, B, GLU, (2,)), op_params=[77] + [0] * 15), record(2, (8,), 1, B)
    ),
    **{
        f"op {op}, which calls a function of the client's": compute(
            change(record(1, (4,), 1, B, op, (2,)), op_params=[0x41414141] * 16),
            record(2, (4,), 1, B),
        )
        for op in range(92, CUSTOM + 1)
    },
    "node 0": compute(record(1, (4,), 1, B), nodes=[0]),
    "an op without its source": compute(record(1, (4,), 1, B, ADD)),
    "a leaf at address 0": compute(
        record(1, (4,), 1, B, ADD, (2, 2)), change(record(2, (4,), 1, B), buffer=0, data=0)
    ),
    "a source of more sources than there may be tensors": chain(131_073),
    "a node listed twice": compute(
        record(1, (4,), 1, B, ADD, (2, 2)), record(2, (4,), 1, B), nodes=[1, 1]
    ),
    "a node that is its own source": compute(record(1, (4,), 1, B, ADD, (1, 1))),
    "two nodes that are each other's sources": compute(
        record(1, (4,), 1, B, ADD, (2, 2)), record(2, (4,), 1, B, ADD, (1, 1)), nodes=[1, 2]
    ),
    "a view of itself": compute(
        change(record(1, (4,), 1, B, ADD, (2, 2)), view_src=1), record(2, (4,), 1, B)
    ),
    "2^32 - 1 nodes": lambda c, h, b: c.post(
        Base.GRAPH_COMPUTE, *([0, 0] if c.version.major >= 8 else [0]), 0xFFFFFFFF, tail=bytes(64)
    ),
    "2^32 - 1 tensors": lambda c, h, b: c.post(
        Base.GRAPH_COMPUTE,
        *([0, 0] if c.version.major >= 8 else [0]),
        1,
        tail=struct.pack("<QI", 1, 0xFFFFFFFF) + bytes(296),
    ),
    "nothing to multiply": compute(
        record(1, (4, 3), 1, B, MUL_MAT, (2, 3)),
        change(record(2, (8, 4), 1, B), ne=(8, 0, 1, 1)),
        record(3, (8, 3), 1, B),
    ),
}


# Graphs look different in protocol 7; all else is the same.
OF_7 = ("2^32 - 1 nodes", "2^32 - 1 tensors", "node 0", "a node listed twice", "op 101")


@pytest.mark.parametrize(("major", "name"), [*((8, n) for n in BASE), *((7, n) for n in OF_7)])
def test_over_llama_cpps_protocol_it_is_refused(major, name, worker, worker7, witness):
    endpoint = (worker7 if major == 7 else worker).endpoint
    with BaseClient(endpoint) as client:
        handle, base = client.alloc(4096)
        client.post(Base.BUFFER_CLEAR, handle, 7)
        try:
            BASE[name](client, handle, base)
            client.assert_closed()
        except Closed:
            pass
    witness()


@pytest.mark.parametrize("loop", [True, False])
def test_a_long_chain_of_sources_is_no_way_down_the_stack(loop, worker, witness):
    """Only nodes are computed: what other tensors came from is never followed."""
    with BaseClient(worker.endpoint) as client:
        handle, base = client.alloc(4096)
        numbers = np.arange(4, dtype=np.float32)
        client.set(record(1, (4,), handle, base), numbers.tobytes())
        chain(100_000, loop)(client, handle, base)
        result = np.frombuffer(client.get(record(1, (4,), handle, base), 16), np.float32)
        assert np.array_equal(result, 2 * numbers)
    witness()


def test_a_long_chain_of_nodes_is_no_way_down_the_stack_either(worker, witness):
    with BaseClient(worker.endpoint) as client:
        handle, base = client.alloc(4096)
        client.post(Base.BUFFER_CLEAR, handle, 0)
        tensors = np.tile(record(1, (4,), handle, base), 30_000)
        tensors["id"] = np.arange(1, len(tensors) + 1)
        # the last of them comes first, as it does in a graph
        tensors["src"][:, :2] = np.roll(tensors["id"], -1)[:, None]
        tensors["op"], tensors["flags"] = ADD, COMPUTE
        # each has a place of its own, for a while; the last one is where it begins
        tensors["data"] = base + 16 * (np.arange(len(tensors)) % 8)
        tensors["src"][-1], tensors["op"][-1] = 0, 0
        client.graph(tensors["id"][-2::-1].tolist(), list(tensors))
        assert client.get(record(1, (4,), handle, base), 16) == bytes(16)
    witness()


def test_a_copy_onto_itself_is_as_if_by_way_of_elsewhere(worker):
    data = bytes(range(200))
    moved = data[:50] + data[:150]
    with BaseClient(worker.endpoint) as client:
        handle, base = client.alloc(4096)
        source, target = (record(1, (150,), handle, base + at, kind=I8) for at in (0, 50))
        whole = record(1, (200,), handle, base, kind=I8)
        for tensor in (source, target, whole):
            tensor["nb"] = strides(tensor["ne"].tolist(), 1)
        client.set(whole, data)
        assert client.call(Base.COPY_TENSOR, source.tobytes(), target.tobytes()) == (1,)
        assert client.get(whole, 200) == moved
    with ExtClient(worker.endpoint) as client:
        _, base = client.alloc(4096)
        client.set(base, data)
        client.post(Ext.COPY, base, base + 50, 150)
        assert client.get(base, 200) == moved


# The extension: an answer with an error, and the connection goes on

ExtCase = Callable[[ExtClient, int], object]


def rows(*tensors: np.ndarray, n_nodes: int = 1) -> ExtCase:
    def send(client: ExtClient, base: int) -> None:
        table = np.stack(tensors)
        table["data"] = np.where(table["data"] == 0, 0, table["data"] + np.uint64(base - B))
        client.graph(table, n_nodes)

    return send


def sizes(n_nodes: int, n_tensors: int) -> ExtCase:
    return lambda c, b: c.post(Ext.GRAPH_COMPUTE, 1, n_nodes, n_tensors, tail=bytes(268))


EXT: dict[str, ExtCase] = {
    "data before its buffer": lambda c, b: c.set(b - 4, bytes(8)),
    "data behind its buffer": lambda c, b: c.set(b + 4096, bytes(4)),
    "data that wraps": lambda c, b: c.set(WRAPS, bytes(16)),
    "a size that wraps": lambda c, b: c.post(Ext.GET, b + 16, WRAPS),
    "MEMSET of a size that wraps": lambda c, b: c.post(Ext.MEMSET, b + 16, WRAPS, 1),
    "COPY to the end": lambda c, b: c.post(Ext.COPY, b, b + 4000, 400),
    "a graph's data behind its buffer": rows(row((4,), B + 4090, ADD, (1, 1)), row((4,), B)),
    "a graph's data of no buffer": rows(row((4,), 77 << 40, ADD, (1, 1)), row((4,), B)),
    "ne with a product of 2^63": rows(
        change(row((4,), B, ADD, (1, 1)), ne=(1 << 31, 1 << 31, 2, 1)), row((4,), B)
    ),
    "ne below 0": rows(change(row((4,), B, ADD, (1, 1)), ne=(-4, 1, 1, 1)), row((4,), B)),
    "nb that wraps": rows(row((4, 2), B, ADD, (1, 1), nb=(4, OVER, OVER, OVER)), row((4, 2), B)),
    "ne of half a block": rows(
        row((4, 1), B, MUL_MAT, (1, 2)),
        row((33, 4), B, kind=Q8_0, nb=strides((33, 4, 1, 1), 34, 32)),
        row((33, 1), B),
    ),
    "blocks apart": rows(
        row((4, 1), B, MUL_MAT, (1, 2)),
        row((32, 4), B, kind=Q8_0, nb=(40, 40, 160, 160)),
        row((32, 1), B),
    ),
    "ALLOC_SIZE with a source of no type": lambda c, b: c.post(
        Ext.ALLOC_SIZE, tail=np.stack([row((4,), b, ADD, (1, 1)), row((4,), b, kind=77)]).tobytes()
    ),
    "op 101": rows(row((4,), B, 101, (1, 1)), row((4,), B)),
    "op 65535": rows(row((4,), B, 65535, (1, 1)), row((4,), B)),
    "UNARY of no kind": rows(row((4,), B, UNARY, (1,), op_params=[999] + [0] * 15), row((4,), B)),
    "GLU of no kind": rows(row((4,), B, GLU, (1,), op_params=[77] + [0] * 15), row((8,), B)),
    **{
        f"op {op}, which calls a function of the head's": rows(
            row((4,), B, op, (1,), op_params=[0x41414141] * 16), row((4,), B)
        )
        for op in range(92, CUSTOM + 1)
    },
    "an op without its source": rows(row((4,), B, ADD)),
    "a leaf at address 0": rows(row((4,), B, ADD, (1, 1)), row((4,), 0)),
    "a node that is its own source": rows(row((4,), B, ADD, (0, 0))),
    "two nodes that are each other's sources": rows(
        row((4,), B, ADD, (1, 1)), row((4,), B, ADD, (0, 0)), n_nodes=2
    ),
    "a view of itself": rows(row((4,), B, ADD, (1, 1), view_src=0), row((4,), B)),
    "a source that does not exist": rows(row((4,), B, ADD, (7, 1)), row((4,), B)),
    "no nodes": sizes(0, 1),
    "2^32 - 1 nodes": sizes(0xFFFFFFFF, 1),
    "2^32 - 1 tensors": sizes(1, 0xFFFFFFFF),
    "more tensors than there may be": lambda c, b: c.graph(
        np.tile(row((4,), b, ADD, (1, 1)), 131_073), 1
    ),
    "nothing to multiply": rows(
        row((4, 3), B, MUL_MAT, (1, 2)), change(row((8, 4), B), ne=(8, 0, 1, 1)), row((8, 3), B)
    ),
}


@pytest.fixture(scope="module")
def head(worker) -> Iterator[ExtClient]:
    """One for all cases: its connection goes on."""
    with ExtClient(worker.endpoint) as client:
        yield client


@pytest.mark.parametrize("name", EXT)
def test_over_the_extension_it_is_answered(name, head, witness):
    handle, base = head.alloc(4096)
    head.post(Ext.CLEAR, handle, 7)
    EXT[name](head, base)
    answer = head.answer_of()
    assert answer.status in (Status.BAD_REQUEST, Status.REFUSED), answer
    # nothing was written
    assert head.get(base, 4096) == b"\7" * 4096
    witness()


# Replies that nobody takes


def test_a_client_that_leaves_before_its_reply_is_no_signal(worker, witness):
    with BaseClient(worker.endpoint) as client:
        handle, base = client.alloc(64 << 20)
        tensor = record(1, (16 << 20,), handle, base)
        client.post(Base.GET_TENSOR, tensor.tobytes(), 0, 64 << 20)
    with ExtClient(worker.endpoint) as client:
        _, base = client.alloc(64 << 20)
        client.post(Ext.GET, base, 64 << 20)
    witness()
    # no signal, and no word about it
    wait_until(lambda: not any("died" in line for line in worker.messages()))


def test_a_connection_that_cannot_be_accepted_is_not_the_end(witness):
    """Of a worker that has as many files open as it may have."""
    with Worker("CPU:1") as worker:
        before = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (1, before[1]))
        waiting = Side(lambda: ExtClient(worker.endpoint))
        wait_until(lambda: any("cannot accept" in line for line in worker.messages()))
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, before)
        with waiting.join() as client:
            client.alloc(64)


# What the engine says of a graph


def test_a_computation_that_fails_over_llama_cpps_protocol_closes_the_connection():
    """The extension answers it: see the channels' tests."""
    device = FakeDevice()
    with serving(BaseChannel, [device], 8) as (peer, _):
        handle, base = peer.base_alloc(4096, 0)
        device.status = -1
        tensors = [record(1, (4,), handle, base, ADD, (2, 2)), record(2, (4,), handle, base)]
        tail = struct.pack("<QI", 1, 2) + b"".join(tensor.tobytes() for tensor in tensors)
        peer.base(Base.GRAPH_COMPUTE, 0, 0, 1, tail=tail)
        with pytest.raises(TransportError):
            peer.reply()
        assert len(device.computed) == 1


# What pads a tensor, on devices that do


@pytest.mark.parametrize(("offset", "fits"), [(0, True), (64, False)])
def test_padding_stays_within_the_buffer(offset, fits):
    device = FakeDevice()
    _, buffers = lanes(device)
    buffer = buffers.allocate(device, 128)
    calls: list[int] = []
    device.alloc_size = lambda tensor: 100
    device.init_tensor = lambda native, tensor: calls.append(tensor) or 0
    tensor = row((4,), buffer.base + offset)
    table = Table(np.array([tensor], EXT_TENSOR), 1)
    if fits:
        graph.init_tensor(device, table, buffer, buffers.memory(0))
    else:
        with pytest.raises(RemoteError, match="needs 100 bytes with its padding, and has 64"):
            graph.init_tensor(device, table, buffer, buffers.memory(0))
    assert bool(calls) == fits
