"""A real worker over llama.cpp's own protocol, 7 and 8."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from caravan.wire import codec
from caravan.wire.commands import Base
from wired import wait_until
from worker.raw_client import BaseClient, Closed, linear_records, record


@pytest.fixture(params=[7, 8])
def endpoint(request, worker7, worker):
    return (worker7 if request.param == 7 else worker).endpoint


@pytest.fixture
def client(endpoint):
    with BaseClient(endpoint) as client:
        yield client


def upload(client, parts, seed=0):
    rng = np.random.default_rng(seed)
    w, x, b = (rng.standard_normal(s, np.float32) for s in ((4, 8), (3, 8), (4,)))
    for name, data in (("w", w), ("x", x), ("b", b)):
        client.set(parts[name], data.tobytes())
    return x @ w.T + b


def result(client, parts):
    return np.frombuffer(client.get(parts["y"], 48), np.float32).reshape(3, 4)


def test_hello_and_questions(client):
    assert client.caps == bytes(24)
    assert client.call(Base.DEVICE_COUNT) == (2,)
    assert client.call(Base.GET_ALIGNMENT, 0)[0] >= 16
    assert client.call(Base.GET_MAX_SIZE, 1)[0] > 1 << 32
    free, total = client.call(Base.GET_DEVICE_MEMORY, 0)
    assert 0 < free <= total
    assert client.call(Base.ALLOC_BUFFER, 0, 1 << 50) == (0, 0)
    assert client.alloc(0)[0] > 0


def test_memory_can_be_written_read_filled_and_copied(client):
    handle, base = client.alloc(4096)
    tensor, other = record(1, (256,), handle, base), record(2, (256,), handle, base + 2048)
    data = np.random.default_rng(1).bytes(1024)
    client.set(tensor, data)
    client.post(Base.MEMSET_TENSOR, tensor.tobytes(), 4, 4, 9)
    assert client.call(Base.COPY_TENSOR, tensor.tobytes(), other.tobytes()) == (1,)
    assert client.get(other, 1020, 4) == b"\x09" * 4 + data[8:]
    assert client.call(Base.SET_TENSOR_HASH, tensor.tobytes(), 0, 123) == (0,)
    client.post(Base.INIT_TENSOR, tensor.tobytes())
    client.post(Base.BUFFER_CLEAR, handle, 3)
    assert client.get(tensor, 1024) == b"\3" * 1024
    client.post(Base.FREE_BUFFER, handle)
    client.call(Base.DEVICE_COUNT)


def test_graph_computes_and_recomputes(client):
    handle, base = client.alloc(1 << 16)
    nodes, parts = linear_records(handle, base)
    want = upload(client, parts)
    client.graph(nodes, [*parts.values(), parts["w"]], uid=5)
    np.testing.assert_allclose(result(client, parts), want, rtol=1e-5)
    want = upload(client, parts, seed=1)
    client.recompute(uid=5)
    np.testing.assert_allclose(result(client, parts), want, rtol=1e-5)


def test_devices_have_queues_of_their_own_and_replies_keep_their_order(client):
    for device in (0, 1):
        handle, base = client.alloc(1 << 16, device)
        nodes, parts = linear_records(handle, base)
        want = upload(client, parts, seed=device)
        client.graph(nodes, list(parts.values()), device)
        np.testing.assert_allclose(result(client, parts), want, rtol=1e-5)
    (one, base_one), (two, base_two) = client.alloc(4096, 0), client.alloc(4096, 1)
    source, target = record(1, (4,), one, base_one), record(2, (4,), two, base_two)
    client.set(source, b"sixteen bytes ok")
    client.post(Base.COPY_TENSOR, source.tobytes(), target.tobytes())
    client.post(Base.GET_TENSOR, target.tobytes(), 0, 16)
    client.post(Base.DEVICE_COUNT)
    assert [client.reply() for _ in range(3)] == [b"\1", b"sixteen bytes ok", struct.pack("<I", 2)]


def test_get_alloc_size(client):
    tensor = record(1, (33, 2), 0, 0)
    got = client.call(Base.GET_ALLOC_SIZE, 0, tensor.tobytes(), bytes(2960))
    assert got == (33 * 2 * 4,)


def test_2d_transfers(worker):
    with BaseClient(worker.endpoint) as client:
        handle, base = client.alloc(4096)
        tensor = record(1, (256,), handle, base)
        client.post(Base.BUFFER_CLEAR, handle, 0)
        client.post(Base.SET_TENSOR_2D, tensor.tobytes(), 8, 4, 3, 16, tail=b"aaaabbbbcccc")
        assert client.get(tensor, 48, 8)[::16] == b"abc"
        assert client.call(Base.GET_TENSOR_2D, tensor.tobytes(), 8, 4, 3, 16)[0] == b"aaaabbbbcccc"


def test_free_drops_the_graphs_that_use_the_buffer(endpoint):
    """Only those: llama.cpp's client asks for the others again."""
    with BaseClient(endpoint) as client:
        handle, base = client.alloc(1 << 16)
        spare, _ = client.alloc(64)
        nodes, parts = linear_records(handle, base)
        upload(client, parts)
        client.graph(nodes, list(parts.values()), uid=5)
        client.post(Base.FREE_BUFFER, spare)
        client.recompute(uid=5)
        assert client.call(Base.DEVICE_COUNT) == (2,)
        client.post(Base.FREE_BUFFER, handle)
        client.recompute(uid=5)
        client.assert_closed()


BAD = {
    "unknown command": lambda c, h, b: c.send(codec.base_request(99, 0)),
    "wrong length": lambda c, h, b: c.send(codec.base_request(Base.DEVICE_COUNT, 4), b"1234"),
    "second hello": lambda c, h, b: c.send(codec.hello_request(bytes(24))),
    "huge length": lambda c, h, b: c.send(codec.base_request(Base.GRAPH_COMPUTE, 1 << 62)),
    "huge set": lambda c, h, b: c.send(
        codec.base_request(Base.SET_TENSOR, 1 << 39),
        c.table[Base.SET_TENSOR].request.pack(record(1, (4,), h, b).tobytes(), 0, 0),
    ),
    "set past the tensor": lambda c, h, b: c.set(record(1, (4,), h, b), bytes(17)),
    "set past the buffer": lambda c, h, b: c.set(record(1, (4,), h, b + 4090), bytes(16)),
    "offset that wraps": lambda c, h, b: c.set(record(1, (4,), h, b), b"x", (1 << 64) - 8),
    "unknown buffer": lambda c, h, b: c.post(Base.FREE_BUFFER, 77),
    "unknown device": lambda c, h, b: c.post(Base.ALLOC_BUFFER, 9, 64),
    "no such type": lambda c, h, b: c.get(record(1, (4,), h, b, kind=31), 4),
    "copy out of range": lambda c, h, b: c.call(
        Base.COPY_TENSOR,
        record(1, (100,), h, b).tobytes(),
        record(2, (1,), h, b + 4092).tobytes(),
    ),
    "recompute of nothing": lambda c, h, b: c.recompute(uid=3),
    "source unknown": lambda c, h, b: c.graph([1], [record(1, (4,), h, b, 2, (7, 8))]),
    "node twice": lambda c, h, b: c.graph([1, 1], [record(1, (4,), h, b)]),
    "op out of range": lambda c, h, b: c.graph([1], [record(1, (4,), h, b, 101)]),
    "custom op": lambda c, h, b: c.graph([1], [record(1, (4,), h, b, 92)]),
    "cycle": lambda c, h, b: c.graph([1], [record(1, (4,), h, b, 2, (1, 1))]),
    "missing source": lambda c, h, b: c.graph([1], [record(1, (4,), h, b, 2)]),
}


@pytest.mark.parametrize("name", BAD)
def test_nonsense_closes_the_connection_and_nothing_else(endpoint, name):
    with BaseClient(endpoint) as client:
        handle, base = client.alloc(4096)
        try:
            BAD[name](client, handle, base)
            client.assert_closed()
        except Closed:
            pass
    with BaseClient(endpoint) as client:
        assert client.call(Base.DEVICE_COUNT) == (2,)


def test_collectives_are_refused_in_words_and_the_client_goes_on(worker):
    with BaseClient(worker.endpoint) as client:
        assert client.call(Base.COMM_INIT, 0, 0, 2, 0, bytes(64)) == (0,)
        client.post(Base.COMM_FREE, 0)
        assert client.call(Base.DEVICE_COUNT) == (2,)
        client.post(Base.COMM_ALLREDUCE, 0, bytes(296))
        client.assert_closed()
    # the lines come through a pipe of their own, in their own time
    for name in ("COMM_INIT", "COMM_ALLREDUCE"):
        text = f"{name}: collective operations are not offered by this worker"
        wait_until(lambda text=text: any(text in line for line in worker.messages()))


def test_the_commands_of_protocol_8_are_unknown_to_7(worker7):
    with BaseClient(worker7.endpoint) as client:
        client.send(codec.base_request(Base.SET_TENSOR_2D, 328), bytes(328))
        client.assert_closed()
    wait_until(lambda: any("command 18" in line for line in worker7.messages()))
