"""Connections over fake devices and an in-memory pipe: order, queues, where payloads go."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from caravan.transport import memory
from caravan.transport.reader import Reader
from caravan.wire import codec
from caravan.wire.commands import BASE_8, EXT, Base, Ext
from caravan.wire.extension import FRAME, Status
from caravan.worker.base_channel import BaseChannel
from caravan.worker.channel import Channel
from caravan.worker.ext_channel import ExtChannel
from worker.fakes import FakeDevice, lanes
from worker.raw_client import linear_records, linear_rows, record


class Peer:
    """The client's end of the pipe."""

    def __init__(self, transport) -> None:
        self.transport = transport
        self.reader = Reader(transport)
        self.seq = 0

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self.transport.wait_writable(5)
            view = view[self.transport.send([view]) :]

    def ext(self, number: int, *values, tail: bytes = b"") -> int:
        self.seq += 1
        payload = EXT[number].request.pack(*values) + tail
        self.send(codec.ext_frame(number, self.seq, len(payload)) + payload)
        return self.seq

    def answer(self) -> tuple[int, int, int, bytes]:
        """(number, status, seq, body)."""
        number, status, _, seq, length = FRAME.unpack(self.reader.read(FRAME.size))
        return number, status, seq, self.reader.read(length)

    def alloc(self, size: int) -> int:
        self.ext(Ext.ALLOC, size)
        return EXT[Ext.ALLOC].reply.unpack(self.answer()[3])[1]

    def base(self, number: int, *values, tail: bytes = b"") -> None:
        payload = BASE_8[number].request.pack(*values) + tail
        self.send(codec.base_request(number, len(payload)) + payload)

    def reply(self) -> bytes:
        (length,) = struct.unpack("<Q", self.reader.read(8))
        return self.reader.read(length)

    def base_alloc(self, size: int, device: int) -> tuple[int, int]:
        self.base(Base.ALLOC_BUFFER, device, size)
        handle = struct.unpack("<QQ", self.reply())[0]
        return handle, handle << 40


@contextmanager
def serving(channel_class, devices, *extra) -> Iterator[tuple[Peer, list]]:
    ours, theirs = memory.pair()
    made, buffers = lanes(*devices)
    if channel_class is ExtChannel:
        channel = ExtChannel(ours, made[0], made, buffers, *extra)
    else:
        channel = BaseChannel(ours, made, buffers, *extra)
    thread = threading.Thread(target=channel.serve)
    thread.start()
    try:
        yield Peer(theirs), made
    finally:
        for device in devices:
            if isinstance(device, FakeDevice):
                device.gate.set()
        theirs.close()
        thread.join(5)
        channel.replies.close()
        for lane in made:
            lane.executor.close()


@pytest.mark.parametrize("extension", [True, False])
def test_a_message_that_there_is_no_memory_for_ends_the_connection(extension, monkeypatch, capsys):
    """In a line, and without a hang: where the next message begins nobody knows."""

    def starved(reader: Reader, size: int) -> bytes:
        raise MemoryError

    near, far = memory.pair()
    made, buffers = lanes(FakeDevice())
    if extension:
        channel: Channel = ExtChannel(near, made[0], made, buffers)
    else:
        channel = BaseChannel(near, made, buffers, 8)
    monkeypatch.setattr(Reader, "read", starved)
    assert channel.serve() is False
    assert "no memory for what its head sends" in str(channel.broke)
    assert capsys.readouterr().err.endswith("out of memory\n")
    channel.replies.close()
    far.close()
    for lane in made:
        lane.executor.close()


@pytest.mark.parametrize("extension", [True, False])
def test_what_is_kept_of_a_broken_connection_holds_nothing(extension):
    near, far = memory.pair()
    made, buffers = lanes(FakeDevice())
    if extension:
        channel: Channel = ExtChannel(near, made[0], made, buffers)
    else:
        channel = BaseChannel(near, made, buffers, 8)
    far.close()
    channel.serve()
    broke = channel.broke
    assert broke is not None
    # an error that is the cause has frames, too, and those hold their callers'
    assert (broke.__traceback__, broke.__cause__, broke.__context__) == (None, None, None)
    channel.replies.close()
    for lane in made:
        lane.executor.close()


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def peer(device) -> Iterator[Peer]:
    with serving(ExtChannel, [device]) as (peer, made):
        peer.lane = made[0]
        yield peer


def wait_for(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def hold(peer: Peer, device: FakeDevice, base: int) -> None:
    """Start a computation that lasts until the gate opens."""
    device.gate.clear()
    device.computing.clear()
    rows, _ = linear_rows(base)
    peer.ext(Ext.GRAPH_COMPUTE, 1, 2, 5, tail=rows.tobytes())
    assert device.computing.wait(5)


def test_an_idle_device_is_served_by_the_reader_itself(peer, device) -> None:
    base = peer.alloc(1 << 16)
    peer.ext(Ext.SET, base, tail=b"payload")
    peer.ext(Ext.MEMSET, base + 7, 3, 1)
    peer.ext(Ext.GET, base, 10)
    assert peer.answer()[3] == b"payload\1\1\1"
    assert peer.lane.executor._thread is None


def test_commands_queue_behind_a_computation_and_pings_do_not(peer, device) -> None:
    base = peer.alloc(1 << 16)
    hold(peer, device, base)
    peer.ext(Ext.SET, base, tail=b"after")
    first = peer.ext(Ext.GET, base, 5)
    ping = peer.ext(Ext.PING)
    assert peer.answer() == (Ext.PING, 0, ping, b"")
    assert bytes(device.buffers[0].data[:5]) == bytes(5)
    device.gate.set()
    assert peer.answer() == (Ext.GET, 0, first, b"after")


def test_errors_of_silent_commands_come_at_their_place(peer, device) -> None:
    base = peer.alloc(1 << 16)
    hold(peer, device, base)
    order = [
        (peer.ext(Ext.GET, base, 1), Status.OK),
        (peer.ext(Ext.FREE, 99), Status.BAD_REQUEST),
        (peer.ext(Ext.SET, base + (1 << 16), tail=b"x"), Status.BAD_REQUEST),
        (peer.ext(Ext.GRAPH_RECOMPUTE, 5), Status.UNKNOWN_GRAPH),
        (peer.ext(Ext.FENCE), Status.OK),
    ]
    device.gate.set()
    assert [(seq, status) for _, status, seq, _ in (peer.answer() for _ in order)] == order


def test_a_failed_computation_is_answered(peer, device) -> None:
    base = peer.alloc(1 << 16)
    device.status = -1
    rows, _ = linear_rows(base)
    seq = peer.ext(Ext.GRAPH_COMPUTE, 1, 2, 5, tail=rows.tobytes())
    assert peer.answer()[:3] == (Ext.GRAPH_COMPUTE, Status.COMPUTE_FAILED, seq)


def test_a_buffer_freed_in_the_queue_is_gone_for_what_follows(peer, device) -> None:
    base = peer.alloc(1 << 16)
    hold(peer, device, base)
    peer.ext(Ext.FREE, 1)
    peer.ext(Ext.SET, base, tail=b"x" * 100)
    rows, _ = linear_rows(base)
    peer.ext(Ext.GRAPH_COMPUTE, 2, 2, 5, tail=rows.tobytes())
    assert not device.buffers[0].freed
    device.gate.set()
    assert peer.answer()[:2] == (Ext.SET, Status.BAD_REQUEST)
    assert peer.answer()[:2] == (Ext.GRAPH_COMPUTE, Status.REFUSED)
    assert device.buffers[0].freed and len(device.computed) == 1


def test_a_graph_is_built_ahead_and_again_when_buffers_changed(peer, device) -> None:
    base = peer.alloc(1 << 16)
    hold(peer, device, base)
    rows, _ = linear_rows(base)
    peer.ext(Ext.GRAPH_COMPUTE, 2, 2, 5, tail=rows.tobytes())
    peer.ext(Ext.PING)
    peer.answer()
    assert peer.lane.counters.graphs_built == 2
    peer.ext(Ext.ALLOC, 64)
    peer.ext(Ext.GRAPH_COMPUTE, 3, 2, 5, tail=rows.tobytes())
    peer.ext(Ext.FENCE)
    peer.ext(Ext.PING)
    assert peer.answer()[0] == Ext.PING
    device.gate.set()
    assert [peer.answer()[0] for _ in range(2)] == [Ext.ALLOC, Ext.FENCE]
    assert peer.lane.counters.graphs_built == 4
    assert len(device.computed) == 3 and len(peer.lane.graphs) == 3


def test_a_graph_that_is_computed_again_is_not_checked_again(peer, device, monkeypatch) -> None:
    base = peer.alloc(1 << 16)
    device.gate.set()
    rows, _ = linear_rows(base)
    peer.ext(Ext.GRAPH_COMPUTE, 7, 2, 5, tail=rows.tobytes())
    peer.ext(Ext.FENCE)
    assert peer.answer()[:2] == (Ext.FENCE, Status.OK)
    monkeypatch.setattr("caravan.worker.graph.check", None)
    for _ in range(3):
        peer.ext(Ext.GRAPH_RECOMPUTE, 7)
    peer.ext(Ext.FENCE)
    assert peer.answer()[:2] == (Ext.FENCE, Status.OK)
    assert len(device.computed) == 4


def test_memory_that_the_host_cannot_see_is_written_through_the_engine() -> None:
    device = FakeDevice(host=False)
    with serving(ExtChannel, [device]) as (peer, _):
        base = peer.alloc(1 << 16)
        peer.ext(Ext.SET, base + 1, tail=b"abc")
        peer.ext(Ext.COPY, base + 1, base + 10, 3)
        peer.ext(Ext.GET, base, 13)
        assert peer.answer()[3] == b"\0abc" + bytes(6) + b"abc"


def test_a_copy_across_waits_for_the_sources_work_only() -> None:
    one, two = FakeDevice(0), FakeDevice(1)
    with serving(BaseChannel, [one, two], 8) as (peer, made):
        (first, base_one), (second, base_two) = (peer.base_alloc(1 << 16, i) for i in (0, 1))
        nodes, parts = linear_records(first, base_one)
        source, target = record(1, (4,), first, base_one), record(2, (4,), second, base_two)
        one.gate.clear()
        tail = np.array(nodes, "<u8").tobytes() + struct.pack("<I", 5)
        tail += b"".join(part.tobytes() for part in parts.values())
        peer.base(Base.GRAPH_COMPUTE, 0, 7, 2, tail=tail)
        assert one.computing.wait(5)
        peer.base(Base.SET_TENSOR, source.tobytes(), 0, 0, tail=b"before the copy.")
        peer.base(Base.COPY_TENSOR, source.tobytes(), target.tobytes())
        peer.base(Base.SET_TENSOR, source.tobytes(), 0, 0, tail=b"after the copy..")
        peer.base(Base.GET_TENSOR, target.tobytes(), 0, 16)
        peer.base(Base.DEVICE_COUNT)
        wait_for(lambda: made[1].executor.pending > 0)
        one.gate.set()
        assert [peer.reply() for _ in range(3)] == [b"\1", b"before the copy.", b"\2\0\0\0"]


def test_replies_of_two_devices_come_in_the_order_of_the_requests() -> None:
    one, two = FakeDevice(0), FakeDevice(1)
    with serving(BaseChannel, [one, two], 7) as (peer, _):
        (first, base_one), (second, base_two) = (peer.base_alloc(1 << 16, i) for i in (0, 1))
        nodes, parts = linear_records(first, base_one)
        one.gate.clear()
        payload = struct.pack("<II", 0, 2) + np.array(nodes, "<u8").tobytes()
        payload += struct.pack("<I", 5) + b"".join(part.tobytes() for part in parts.values())
        peer.send(codec.base_request(Base.GRAPH_COMPUTE, len(payload)) + payload)
        assert one.computing.wait(5)
        slow, quick = record(1, (1,), first, base_one), record(2, (1,), second, base_two)
        peer.base(Base.SET_TENSOR, quick.tobytes(), 0, 0, tail=b"fast")
        peer.base(Base.GET_TENSOR, slow.tobytes(), 0, 4)
        peer.base(Base.GET_TENSOR, quick.tobytes(), 0, 4)
        # the second device has long done its part, but the first answer is not there yet
        peer.base(Base.MEMSET_TENSOR, quick.tobytes(), 0, 4, 0)
        one.gate.set()
        assert [peer.reply(), peer.reply()] == [bytes(4), b"fast"]


def test_a_base_error_closes_and_is_told(capsys) -> None:
    with serving(BaseChannel, [FakeDevice()], 8) as (peer, _):
        peer.base(Base.FREE_BUFFER, 5)
        with pytest.raises(Exception, match="closed"):
            peer.reply()
    assert "closing the connection" in capsys.readouterr().err
