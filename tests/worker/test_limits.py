"""What one head can make a worker keep for it is bounded, and what passes a bound is told."""

from __future__ import annotations

import contextlib
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from caravan.errors import RemoteError
from caravan.trace.recorder import Recorder
from caravan.trace.spans import Kind
from caravan.transport import memory
from caravan.transport.reader import Reader
from caravan.wire import codec, extension
from caravan.wire.commands import EXT, Ext, base_table
from caravan.wire.extension import Status
from caravan.wire.records import EXT_TENSOR
from caravan.worker import outlet, peers, pool, replies, table
from caravan.worker.ext_channel import NOT_HERE, ExtChannel
from caravan.worker.lane import GraphStore
from caravan.worker.outlet import Outlet
from caravan.worker.peers import Peers
from caravan.worker.replies import Replies
from wired import PATIENCE, Side, wait_until
from worker.fakes import FakeDevice
from worker.raw_client import BaseClient, Closed, ExtClient, Wire
from worker.test_channels import hold, serving

U = 1 << 20


def resident(pid: int | str, field: str = "VmRSS") -> int:
    """Bytes of memory that a process has."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


def sessions(supervisor: int) -> list[int]:
    return [
        int(p) for p in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    ]


# replies that nobody reads


@pytest.fixture
def small(monkeypatch) -> None:
    monkeypatch.setattr(outlet, "CROWD_BYTES", 1000)
    monkeypatch.setattr(outlet, "CROWD_PARTS", 20)
    monkeypatch.setattr(replies, "_MOST_SLOTS", 50)


@pytest.mark.parametrize("size", [1, 400])
def test_replies_that_nobody_reads_hold_up_the_next_request(small, size):
    near, far = memory.pair(8)
    sender = Replies(near)
    done: list[int] = []

    def serve() -> None:
        for n in range(100):
            sender.complete(sender.reserve(), (bytes([n]) * size,))
            done.append(n)

    side = Side(serve)
    wait_until(lambda: sender._outlet.crowded)
    assert len(done) < 60
    reader = Reader(far)
    assert [reader.read(size)[0] for _ in range(100)] == list(range(100))
    side.join()
    sender.close()


def test_answers_ahead_of_the_others_wait_too(small):
    near, far = memory.pair(8)
    sender = Replies(near)
    side = Side(lambda: [sender.now((b"x" * 100,)) for _ in range(100)])
    wait_until(lambda: sender._outlet.crowded)
    assert Reader(far).read(10_000) == b"x" * 10_000
    side.join()
    sender.close()


def test_who_waits_for_a_reader_goes_on_when_the_connection_ends(small):
    near, _far = memory.pair(8)
    sender = Replies(near)
    side = Side(lambda: [sender.now((b"x" * 100,)) for _ in range(100)])
    wait_until(lambda: sender._outlet.crowded)
    near.close()
    side.join()


def test_commands_that_wait_for_a_device_are_bounded(small):
    device = FakeDevice()
    with serving(ExtChannel, [device]) as (peer, made):
        hold(peer, device, peer.alloc(1 << 16))

        def ask() -> None:
            for _ in range(500):
                peer.ext(Ext.FENCE)

        asking = Side(ask)
        wait_until(lambda: made[0].executor.pending >= 50)
        asking.join()
        assert made[0].executor.pending <= 51
        device.gate.set()
        for _ in range(500):
            assert peer.answer()[:2] == (Ext.FENCE, 0)


def test_a_reply_too_big_to_be_copied_goes_at_the_readers_pace(monkeypatch):
    monkeypatch.setattr(outlet, "MAX_COPY", 1000)
    near, far = memory.pair(300)
    sender = Outlet(near, Recorder(), Kind.REPLY)
    device = bytearray(range(250)) * 40
    sender.send((b"before" * 50,))
    side = Side(lambda: sender.send((b"head", memoryview(device))))
    reader = Reader(far)
    assert reader.read(300) == b"before" * 50
    assert reader.read(4) == b"head"
    wait_until(lambda: near.sends and sum(near.sends) > 600)
    # what has not left yet has not been copied
    device[8000:9000] = bytes(1000)
    data = reader.read(10_000)
    side.join()
    assert data[8000:9000] == bytes(1000)
    assert data[:8000] == (bytes(range(250)) * 40)[:8000]
    sender.close()


def test_a_reader_that_leaves_in_a_big_reply_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(outlet, "MAX_COPY", 1000)
    near, far = memory.pair(300)
    sender = Outlet(near, Recorder(), Kind.REPLY)
    side = Side(lambda: sender.send((bytes(10_000),)))
    wait_until(lambda: sum(near.sends) == 300)
    far.close()
    side.join()
    assert sender.broken


# copies that nobody takes


def test_what_waits_to_be_taken_in_a_session_has_a_bound(monkeypatch):
    monkeypatch.setattr(peers, "_MOST_WAITING", 1000)
    monkeypatch.setattr(outlet, "PATIENCE", 0.0)
    ways = Peers()
    near, far = memory.pair(0)
    ways.add_out(5, near, Recorder())
    ways.push(5, 1, (bytes(300),))
    for ticket in (1, 2):
        ways.push(peers.WITHIN, ticket, (bytes(300),))
    for route in (5, peers.WITHIN):
        with pytest.raises(RemoteError, match="wait to be taken") as caught:
            ways.push(route, 9, (bytes(300),))
        assert caught.value.code == Status.BUSY
    assert len(ways._parcels.take(1)) == 300
    ways.push(peers.WITHIN, 3, (bytes(300),))
    # a way that has ended holds nothing
    near.close()
    far.close()
    wait_until(lambda: ways._out[5].broken)
    ways.push(peers.WITHIN, 4, (bytes(300),))


def test_empty_pushes_have_a_bound(monkeypatch):
    monkeypatch.setattr(peers, "_MOST_PIECES", 10)
    ways = Peers()
    for ticket in range(10):
        ways.push(peers.WITHIN, ticket, ())
    with pytest.raises(RemoteError, match="10 pieces"):
        ways.push(peers.WITHIN, 10, ())
    ways._parcels.take(0)
    ways.push(peers.WITHIN, 10, ())


# graphs


class Kept:
    def __init__(self, n_tensors: int, scratch: int = 0) -> None:
        self.n_tensors = n_tensors
        self.scratch = scratch
        self.handles = frozenset({n_tensors})


@pytest.mark.parametrize("lru", [True, False])
def test_graphs_that_are_kept_have_a_bound_of_tensors(lru):
    store = GraphStore(8, lru, 100)
    for uid in (1, 2, 3):
        store.put(uid, Kept(30))
    told = "no room for a graph of 20 tensors: 3 graphs of 90 are kept"
    with pytest.raises(RemoteError, match=told) as caught:
        store.put(4, Kept(20))
    assert caught.value.code == Status.OUT_OF_MEMORY
    # another one of the same uid, and those of a buffer that is freed, leave room
    store.put(3, Kept(40))
    store.drop_users(30)
    store.put(4, Kept(60))
    with pytest.raises(RemoteError, match="no room"):
        store.put(5, Kept(1))
    assert store.get(3).n_tensors == 40


@pytest.mark.parametrize("lru", [True, False])
def test_graphs_that_are_kept_have_a_bound_of_scratch_memory(lru):
    """A few bytes of a graph can want gigabytes, if its rows lie on one another."""
    store = GraphStore(8, lru, 100, 1000)
    store.put(1, Kept(1, 600))
    store.put(2, Kept(2, 300))
    with pytest.raises(RemoteError, match="900 are kept, and at most 1000") as caught:
        store.put(3, Kept(3, 200))
    assert caught.value.code == Status.OUT_OF_MEMORY
    store.drop_users(1)
    store.put(3, Kept(3, 700))


@pytest.mark.parametrize("lru", [True, False])
def test_graphs_that_went_do_not_count(lru):
    store = GraphStore(4, lru, 100)
    for uid in range(100):
        store.put(uid, Kept(25))
    assert store.get(99).n_tensors == 25


def test_a_graph_of_too_many_tensors_is_refused(monkeypatch):
    rows = np.zeros(5, EXT_TENSOR)
    monkeypatch.setattr(table, "MAX_TENSORS", 4)
    with pytest.raises(RemoteError, match="a graph of 5 tensors: there may be 4"):
        table.from_extension(1, 5, rows.tobytes())
    many_nodes = np.ones(5, "<u8").tobytes() + bytes(4)
    many_tensors = bytes(8) + b"\5\0\0\0"
    for n_nodes, body in ((5, many_nodes), (1, many_tensors)):
        with pytest.raises(RemoteError, match="a graph of 5 tensors: there may be 4"):
            table.from_base(n_nodes, body)


# memory before anything has arrived


def test_a_promise_costs_no_memory():
    """Memory for a big message grows with what has arrived of it."""
    near, far = memory.pair(8 * U)
    reader = Reader(far)
    tracemalloc.start()
    side = Side(lambda: reader.read(64 * U))
    near.send([b"a" * U])
    wait_until(lambda: reader.received >= U)
    assert tracemalloc.get_traced_memory()[0] < 32 * U
    tracemalloc.stop()
    for _ in range(63):
        while not near.send([b"b" * U]):
            near.wait_writable(PATIENCE)
    assert side.join() == b"a" * U + b"b" * (63 * U)


@pytest.mark.parametrize("number", [*Ext, 200])
def test_a_header_that_promises_a_terabyte_costs_nothing(worker, number):
    if number == Ext.BYE:
        pytest.skip("it ends the connection, and its text is not read then")
    refused = Status.BAD_REQUEST
    if number == 200 or number in NOT_HERE:
        refused = Status.UNKNOWN_COMMAND
    with ExtClient(worker.endpoint) as client:
        client.alloc(64)
        client.send(codec.ext_frame(number, 7, codec.MAX_PAYLOAD), bytes(64 << 10))
        answer = client.answer_of()
        assert (answer.number, answer.seq, answer.status) == (number, 7, refused)
        assert all(resident(pid) < 600 * U for pid in sessions(worker.pid))


@pytest.mark.parametrize("number", base_table(8))
def test_so_it_is_over_llama_cpps_protocol(worker, number):
    with BaseClient(worker.endpoint) as client:
        client.alloc(64)
        with pytest.raises(Closed):
            client.send(codec.base_request(number, 1 << 40), bytes(64 << 10))
            client.read(1)


# memory of devices


def test_buffers_that_nobody_has_written_to_count(worker):
    """A kernel promises memory that it does not have, as long as nobody writes to it."""
    with ExtClient(worker.endpoint) as client:
        total = client.call(Ext.MEMORY)[1]
        size = 60 * U
        asked = total // size + 1
        for _ in range(asked):
            client.post(Ext.ALLOC, size)
        answers = [client.answer_of() for _ in range(asked)]
        assert {a.status for a in answers[:-1]} == {0}
        assert answers[-1].status == Status.OUT_OF_MEMORY
        text = extension.error_text(answers[-1].body)
        assert f"of the device's {total}" in text
        client.post(Ext.FREE, 1)
        client.alloc(size)


def test_a_new_buffer_shows_nothing_of_what_the_process_had_in_memory(worker):
    with ExtClient(worker.endpoint) as client:
        for size in (64, 1000, 5000, 100_000, 3 * U):
            for _ in range(50 if size < U else 2):
                _, base = client.alloc(size)
                assert client.get(base, size) == bytes(size)


# connections


def test_connections_of_one_session_have_a_bound(monkeypatch):
    monkeypatch.setattr(pool, "_MOST_CONNECTIONS", 2)

    made = pool.Pool((), 1, None, print)
    process = SimpleNamespace(key="k" * 32, peer_key="p" * 32, connections={1})
    made._processes.append(process)
    assert made.peer("p" * 32)[0] is process
    process.connections.add(2)
    for found in (made.peer("p" * 32), made.session("k" * 32)):
        assert found == (None, "the session has 2 connections already")


@pytest.mark.parametrize("number", [Ext.SESSION, Ext.PEER])
def test_a_stranger_s_first_words_are_short(worker, number):
    with Wire(worker.endpoint) as wire:
        wire.hello(extension.caps())
        size = extension.MAX_QUESTION + 1
        wire.send(codec.ext_frame(number, 1, size), b'{"session":"' + b"[" * 100)
        wire.assert_closed()


# floods, at a live worker


def flood(client: ExtClient, message: bytes, count: int) -> int:
    """Send it so often, or until the worker has stopped reading; how often it was."""
    block = message * max(1, (64 << 10) // len(message))
    client.sock.settimeout(2.0)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < count * len(message):
            sent += client.sock.send(block)
    return sent // len(message)


def test_answers_that_nobody_reads_fill_no_memory(worker):
    with ExtClient(worker.endpoint) as client, ExtClient(worker.endpoint) as other:
        _, base = client.alloc(U)
        before = residents(worker.pid)
        body = EXT[Ext.GET].request.pack(base, U)
        flood(client, codec.ext_frame(Ext.GET, 1, len(body)) + body, 4000)
        wait_until(lambda: grown(worker.pid, before) > 200 * U)
        for _ in range(2000):
            other.fence()
            assert grown(worker.pid, before) < 400 * U


def test_commands_behind_one_that_waits_fill_no_memory(worker):
    with ExtClient(worker.endpoint) as client:
        _, base = client.alloc(64)
        before = residents(worker.pid)
        client.post(Ext.TAKE, 0, 0, 1, base, 8)
        assert flood(client, codec.ext_frame(Ext.FENCE, 1, 0), 1_000_000) < 1_000_000
        assert grown(worker.pid, before) < 200 * U


def residents(supervisor: int) -> dict[int, int]:
    """Of its session processes; one of an earlier session may be about to end."""
    found = {}
    for pid in sessions(supervisor):
        with contextlib.suppress(OSError, AssertionError):
            found[pid] = resident(pid)
    return found


def grown(supervisor: int, before: dict[int, int]) -> int:
    now = residents(supervisor)
    return max(now[pid] - size for pid, size in before.items() if pid in now)
