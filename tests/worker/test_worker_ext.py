"""A real worker over the extension: memory, graphs, order, errors that leave the connection up."""

from __future__ import annotations

import time

import numpy as np
import pytest

from caravan.wire import extension
from caravan.wire.commands import Ext
from caravan.wire.extension import GRAPH_LRU, Status
from worker.raw_client import ADD, F32, ExtClient, linear_rows, row


@pytest.fixture
def client(worker):
    with ExtClient(worker.endpoint) as client:
        yield client


def product(client, base, at, seed=0):
    """Upload new inputs of the linear graph; the result that it should have."""
    rng = np.random.default_rng(seed)
    w, x, b = (rng.standard_normal(s, np.float32) for s in ((4, 8), (3, 8), (4,)))
    for name, data in (("w", w), ("x", x), ("b", b)):
        client.set(base + at[name], data.tobytes())
    return x @ w.T + b


def result(client, base, at):
    return np.frombuffer(client.get(base + at["y"], 48), np.float32).reshape(3, 4)


def long_graph(client, base, n=1500, size=1 << 20):
    """A graph that computes for a while: additions of 4 MiB, one after the other."""
    rows = [row((size,), base, ADD, (n if i == 0 else i - 1, n)) for i in range(n)]
    rows.append(row((size,), base + 4 * size))
    return np.stack(rows), n


def test_session_describes_the_worker(client):
    session = client.session
    assert len(session.session) == 32
    assert session.ops[29] == "MUL_MAT" and len(session.ops) == 101
    assert [d.name for d in session.devices] == ["CPU", "CPU"]
    assert [d.threads for d in session.devices] == [1, 1]
    assert not session.devices[0].pads and session.devices[0].alignment >= 16


def test_addresses_are_made_of_handles(client):
    assert [client.alloc(size) for size in (64, 0, 64)] == [
        (h, h << extension.ADDRESS_SHIFT) for h in (1, 2, 3)
    ]


def test_memory_can_be_written_read_filled_and_copied(client):
    handle, base = client.alloc(1 << 20)
    data = np.random.default_rng(1).bytes(1 << 20)
    client.set(base, data)
    assert client.get(base + 3, 1000) == data[3:1003]
    client.post(Ext.MEMSET, base + 10, 5, 0xAB)
    client.post(Ext.COPY, base + 8, base + 100, 10)
    assert client.get(base + 100, 10) == data[8:10] + b"\xab" * 5 + data[15:18]
    client.post(Ext.CLEAR, handle, 7)
    assert client.get(base, 1 << 20) == b"\7" * (1 << 20)


def test_an_empty_set_and_an_empty_get_are_fine(client):
    handle, base = client.alloc(64)
    client.set(base + 64, b"")
    assert client.get(base + 64, 0) == b""
    client.post(Ext.FREE, handle)
    client.fence()


def test_graph_computes_and_recomputes(client):
    _, base = client.alloc(1 << 16)
    rows, at = linear_rows(base)
    want = product(client, base, at)
    client.graph(rows, 2, uid=7)
    np.testing.assert_allclose(result(client, base, at), want, rtol=1e-5)
    want = product(client, base, at, seed=1)
    client.post(Ext.GRAPH_RECOMPUTE, 7)
    np.testing.assert_allclose(result(client, base, at), want, rtol=1e-5)


def test_graphs_are_kept_by_least_recent_use(client):
    _, base = client.alloc(1 << 16)
    rows, _ = linear_rows(base)
    for uid in range(1, GRAPH_LRU + 1):
        client.graph(rows, 2, uid)
    client.post(Ext.GRAPH_RECOMPUTE, 1)
    client.graph(rows, 2, GRAPH_LRU + 1)
    client.post(Ext.GRAPH_RECOMPUTE, 1)
    client.fence()
    seq = client.post(Ext.GRAPH_RECOMPUTE, 2)
    answer = client.answer_of()
    assert (answer.seq, answer.status) == (seq, Status.UNKNOWN_GRAPH)


def test_a_freed_buffer_takes_its_graphs_along(client):
    (one, base_one), (_, base_two) = client.alloc(1 << 16), client.alloc(1 << 16)
    client.graph(linear_rows(base_one)[0], 2, 1)
    client.graph(linear_rows(base_two)[0], 2, 2)
    client.post(Ext.FREE, one)
    client.post(Ext.GRAPH_RECOMPUTE, 2)
    client.post(Ext.GRAPH_RECOMPUTE, 1)
    assert client.answer_of().status == Status.UNKNOWN_GRAPH


def test_uid_0_is_not_kept(client):
    _, base = client.alloc(1 << 16)
    client.graph(linear_rows(base)[0], 2, 0)
    client.post(Ext.GRAPH_RECOMPUTE, 0)
    assert client.answer_of().status == Status.UNKNOWN_GRAPH


@pytest.mark.parametrize(
    ("number", "values", "tail"),
    [
        (Ext.FREE, (99,), b""),
        (Ext.CLEAR, (99, 0), b""),
        (Ext.SET, (99 << 40,), b"data"),
        (Ext.SET, ((1 << 40) + 60,), b"too long"),
        (Ext.GET, ((1 << 40) + 1, 64), b""),
        (Ext.GET, ((1 << 40) - 1, 1 << 63), b""),
        (Ext.MEMSET, (1 << 40, 65, 0), b""),
        (Ext.COPY, (1 << 40, (1 << 40) + 60, 10), b""),
        (Ext.COPY, (99 << 40, 1 << 40, 10), b""),
        (Ext.GRAPH_COMPUTE, (1, 1, 1), b"short"),
        (Ext.GRAPH_COMPUTE, (1, 0, 0), b""),
        (Ext.INIT_TENSOR, (), b"x" * 5),
        (Ext.ALLOC_SIZE, (), b""),
    ],
)
def test_a_refused_command_is_answered_and_the_connection_goes_on(client, number, values, tail):
    client.alloc(64)
    seq = client.post(number, *values, tail=tail)
    answer = client.answer_of()
    assert (answer.number, answer.seq, answer.status) == (number, seq, Status.BAD_REQUEST)
    assert extension.error_text(answer.body)
    client.fence()


def test_what_does_not_fit_is_out_of_memory(client):
    for size in (1 << 39, (1 << 40) + 1, (1 << 64) - 1):
        client.post(Ext.ALLOC, size)
        assert client.answer_of().status == Status.OUT_OF_MEMORY


def test_unknown_commands_and_wrong_lengths_are_answered(client):
    for number, payload, status in (
        (200, b"abc", Status.UNKNOWN_COMMAND),
        (Ext.SESSION, b"{}", Status.UNKNOWN_COMMAND),
        (Ext.FREE, b"abc", Status.BAD_REQUEST),
    ):
        client.post_raw(number, payload)
        assert client.answer_of().status == status
    client.fence()


def test_an_absurd_length_is_answered_and_closes(client):
    client.send(extension.FRAME.pack(Ext.SET, 0, 0, 5, 1 << 60))
    assert client.answer_of().status == Status.BAD_REQUEST
    client.assert_closed()


def test_an_unsound_graph_is_refused_with_a_reason(client):
    _, base = client.alloc(1 << 16)
    rows, _ = linear_rows(base)
    rows["ne"][2, 0] = 4
    rows["nb"][2] = (4, 16, 64, 64)
    client.graph(rows, 2)
    answer = client.answer_of()
    assert answer.status == Status.REFUSED
    assert "MUL_MAT" in extension.error_text(answer.body)


def test_ping_is_answered_during_a_computation(client):
    _, base = client.alloc(16 << 20)
    rows, n = long_graph(client, base)
    client.graph(rows, n, 1)
    fence = client.post(Ext.FENCE)
    start = time.monotonic()
    ping = client.post(Ext.PING)
    assert client.answer_of().seq == ping
    assert client.answer_of().seq == fence
    assert time.monotonic() - start > 0.05, "the graph was too short to prove anything"


def test_commands_behind_a_computation_keep_their_order(client):
    _, base = client.alloc(16 << 20)
    rows, n = long_graph(client, base, n=300)
    client.graph(rows, n, 1)
    for i in range(50):
        client.set(base + 8 * i, i.to_bytes(8, "little"))
        client.post(Ext.GET, base + 8 * i, 8)
    for i in range(50):
        assert int.from_bytes(client.answer_of().body, "little") == i


def test_a_big_payload_behind_a_computation_waits_its_turn(client):
    _, base = client.alloc(100 << 20)
    rows, n = long_graph(client, base, n=300)
    client.graph(rows, n, 1)
    client.set(base, b"\1" * (80 << 20))
    assert client.get(base + (80 << 20) - 4, 8) == b"\1\1\1\1\0\0\0\0"


def test_two_devices_of_a_session_share_buffers_but_not_queues(worker, client):
    with ExtClient(worker.endpoint, device=1, session=client.key) as other:
        _, one = client.alloc(16 << 20)
        _, two = other.alloc(1 << 16)
        assert two >> 40 == 2
        rows, n = long_graph(client, one)
        client.set(one + (8 << 20), b"from one")
        client.graph(rows, n, 1)
        fence = client.post(Ext.FENCE)
        # the second device is free meanwhile
        linear, at = linear_rows(two)
        want = product(other, two, at)
        other.graph(linear, 2, 1)
        np.testing.assert_allclose(result(other, two, at), want, rtol=1e-5)
        # a push waits for the source's earlier work, and the other device for the push
        other.post(Ext.TAKE, 0, 0, 1, two, 8)
        client.post(Ext.PUSH, 0, 0, 1, one + (8 << 20), 8)
        assert other.get(two, 8) == b"from one"
        client.sock.setblocking(False)
        client.sock.settimeout(5)
        assert client.answer_of().seq == fence
        # and each answers only for its own buffers
        other.set(one, b"x")
        assert other.answer_of().status == Status.BAD_REQUEST
        other.post(Ext.COPY, one, two, 8)
        assert other.answer_of().status == Status.BAD_REQUEST
        other.post(Ext.BYE)
        other.assert_closed()
    client.fence()


def test_joining_is_refused_for_wrong_keys_and_devices(worker, client):
    # asked again, the device that is in use is still in use
    for session, device in (("no such key", 0), *[(client.key, 0)] * 3, (client.key, 7)):
        with ExtClient(worker.endpoint, device, session) as other:
            assert other.answer.status == Status.REFUSED
            other.assert_closed()
    client.fence()


def test_an_unknown_device_is_refused(worker):
    with ExtClient(worker.endpoint, device=2) as other:
        assert other.answer.status == Status.REFUSED
        other.assert_closed()


def test_a_broken_connection_ends_the_whole_session(worker, client):
    with ExtClient(worker.endpoint, device=1, session=client.key):
        client.close()
        # the other one learns of it
    with ExtClient(worker.endpoint) as first:
        second = ExtClient(worker.endpoint, device=1, session=first.key)
        second.close()
        first.assert_closed()


def test_alloc_size_and_init_tensor(client):
    _, base = client.alloc(1 << 16)
    tensor = row((33, 2), base, kind=F32)
    assert client.call(Ext.ALLOC_SIZE, tail=tensor.tobytes()) == (33 * 2 * 4,)
    client.post(Ext.INIT_TENSOR, tail=tensor.tobytes())
    assert client.call(Ext.MEMORY)[1] > 0
