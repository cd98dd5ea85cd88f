"""Pushes and takes: within a session, and on connections from one worker to another."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from caravan.errors import RemoteError
from caravan.trace.recorder import Recorder
from caravan.transport import memory
from caravan.wire import codec
from caravan.wire.commands import EXT, Ext
from caravan.wire.extension import TICKET_BITS, Status
from caravan.worker import outlet, peers
from caravan.worker.buffers import Buffer
from caravan.worker.ext_channel import ExtChannel
from caravan.worker.peers import WITHIN, Parcels, Peers
from wired import KINDS, Side, send_all, wait_until
from worker.fakes import FakeBuffer, FakeDevice
from worker.test_channels import Peer, hold, serving

IN, OUT = 7, 8
SPANS = Recorder()


def buffer(size: int = 64, host: bool = True) -> Buffer:
    return Buffer(1, 0, size, FakeBuffer(1, size, host))


def content(made: Buffer) -> bytes:
    return bytes(made.native.data)


def data(ticket: int, content: bytes, *, number: int = Ext.DATA, length: int | None = None):
    """A DATA frame as a worker sends it."""
    length = 8 + len(content) if length is None else length
    return codec.ext_frame(number, 0, length) + EXT[Ext.DATA].request.pack(ticket) + content


# within a session


def test_what_is_pushed_can_be_taken_in_any_order():
    ways, target = Peers(), buffer()
    for ticket in (1, 2, 3):
        ways.push(WITHIN, ticket, (b"from ", bytes([48 + ticket])))
    for ticket in (2, 3, 1):
        ways.take(WITHIN, ticket, 6, target, 10 * ticket, SPANS)
    assert content(target)[10:16] == b"from 1"
    assert content(target)[20:26] == b"from 2"
    assert content(target)[30:36] == b"from 3"


def test_a_take_waits_for_its_push():
    ways, target = Peers(), buffer()
    side = Side(lambda: ways.take(WITHIN, 5, 4, target, 0, SPANS))
    ways.push(WITHIN, 4, (b"else",))
    assert side.running
    ways.push(WITHIN, 5, (b"mine",))
    side.join()
    assert content(target)[:4] == b"mine"


def test_what_is_pushed_is_a_copy():
    ways, source, target = Peers(), buffer(), buffer()
    source.native.write(0, b"early")
    ways.push(WITHIN, 1, (source.native.read(0, 5),))
    source.native.write(0, b"later")
    ways.take(WITHIN, 1, 5, target, 0, SPANS)
    assert content(target)[:5] == b"early"


def test_a_take_of_another_size_is_refused():
    ways = Peers()
    ways.push(WITHIN, 1, (b"four",))
    with pytest.raises(RemoteError, match="5 bytes to take, 4 pushed"):
        ways.take(WITHIN, 1, 5, buffer(), 0, SPANS)


def test_a_ticket_is_pushed_once():
    ways = Peers()
    ways.push(WITHIN, 1, (b"x",))
    with pytest.raises(RemoteError, match="ticket 1 is pushed twice"):
        ways.push(WITHIN, 1, (b"x",))


def test_a_push_waits_where_too_much_has_not_been_taken(monkeypatch):
    monkeypatch.setattr(outlet, "PATIENCE", 3600.0)
    parcels = Parcels(limit=100)
    parcels.put(1, bytes(60))
    parcels.put(2, bytes(60))
    side = Side(lambda: parcels.put(3, bytes(60)))
    # other takes than the oldest make room too
    wait_until(lambda: parcels._changed._waiters)
    assert side.running
    assert parcels.take(2) == bytes(60)
    side.join()
    assert parcels.take(3) == parcels.take(1) == bytes(60)


def test_a_push_does_not_wait_for_ever_for_room(monkeypatch):
    """A taker that froze would keep the source from all else."""
    monkeypatch.setattr(outlet, "PATIENCE", 0.01)
    parcels = Parcels(limit=100)
    for ticket in range(4):
        parcels.put(ticket, bytes(60))
    assert [len(parcels.take(ticket)) for ticket in range(4)] == [60] * 4


def test_pushes_from_one_device_to_another_do_not_wait_for_those_between_others(monkeypatch):
    monkeypatch.setattr(outlet, "PATIENCE", 3600.0)
    parcels = Parcels(limit=100)
    other = 1 << TICKET_BITS
    for n in range(2):
        parcels.put(n, bytes(60))
        parcels.put(other + n, bytes(60))
    side = Side(lambda: parcels.put(2, bytes(60)))
    wait_until(lambda: parcels._changed._waiters)
    assert parcels.take(other) == parcels.take(other + 1) == bytes(60)
    assert side.running
    parcels.take(1)
    side.join()


def test_a_push_of_nothing_within_an_empty_buffer():
    ways = Peers()
    ways.push(WITHIN, 1, ())
    ways.take(WITHIN, 1, 0, Buffer(1, 0, 0, None), 0, SPANS)


# from another worker


@pytest.fixture
def pipe() -> Iterator[tuple[memory.MemoryTransport, memory.MemoryTransport]]:
    near, far = memory.pair()
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def ways(pipe) -> Peers:
    """With a way IN whose other end is the pipe's second."""
    made = Peers()
    made.add_in(IN, pipe[0])
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", [True, False])
def test_what_one_worker_pushes_another_takes(kind, host, tmp_path):
    size = 1 << 20
    with KINDS[kind](tmp_path) as (near, far):
        source, target = Peers(), Peers()
        source.add_out(OUT, near, SPANS)
        target.add_in(OUT, far)
        sent, got = buffer(size), buffer(size, host)
        sent.native.write(0, bytes(range(256)) * (size // 256))
        expected = bytearray(size)
        # more than any pipe holds, and nobody takes yet
        for ticket in range(1, 9):
            source.push(OUT, ticket, (sent.native.read(ticket, size // 2),))
        sent.native.clear(0)
        for ticket in range(1, 9):
            target.take(OUT, ticket, size // 2, got, ticket * 1000, SPANS)
            part = (bytes(range(256)) * (size // 256))[ticket : ticket + size // 2]
            expected[ticket * 1000 : ticket * 1000 + size // 2] = part
        assert content(got) == bytes(expected)
        source._out[OUT].close()


def test_signs_of_life_are_no_pushes(pipe):
    near, far = pipe
    source, target = Peers(), Peers()
    source.add_out(OUT, near, SPANS)
    target.add_in(IN, far)
    got = buffer()
    for _ in range(3):
        source.beat()
    source.push(OUT, 1, (b"data",))
    source.beat()
    source.push(OUT, 2, (b"more",))
    target.take(IN, 1, 4, got, 0, SPANS)
    target.take(IN, 2, 4, got, 4, SPANS)
    assert content(got)[:8] == b"datamore"


def test_signs_of_life_are_left_out_where_other_things_wait(pipe):
    near, far = pipe
    source, target = Peers(), Peers()
    near.set_capacity(100)
    source.add_out(OUT, near, SPANS)
    source.push(OUT, 1, (bytes(1000),))
    for _ in range(1000):
        source.beat()
    assert source._out[OUT]._size < 1000
    near.set_capacity(1 << 20)
    target.add_in(IN, far)
    target.take(IN, 1, 1000, buffer(1000), 0, SPANS)
    source._out[OUT].close()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_way_that_has_frozen_holds_up_nobody_for_ever(kind, tmp_path):
    with KINDS[kind](tmp_path) as (near, far):
        source, target = Peers(), Peers()
        source.add_out(OUT, near, SPANS)
        far.bound_silence(0.5)
        target.add_in(IN, far)
        # a source that computes for longer than that is there all the same
        side = Side(lambda: target.take(IN, 1, 4, buffer(), 0, SPANS))
        for _ in range(6):
            time.sleep(0.1)
            source.beat()
        source.push(OUT, 1, (b"data",))
        side.join()
        with pytest.raises(RemoteError, match=r"nothing came for 0\.5 s") as caught:
            target.take(IN, 2, 4, buffer(), 0, SPANS)
        assert caught.value.code == Status.PEER_LOST


def test_a_push_of_nothing(ways, pipe):
    send_all(pipe[1], data(1, b""))
    ways.take(IN, 1, 0, Buffer(1, 0, 0, None), 0, SPANS)


def test_a_take_waits_for_the_whole_push(ways, pipe):
    target = buffer()
    side = Side(lambda: ways.take(IN, 1, 8, target, 0, SPANS))
    for byte in data(1, b"one by 1"):
        assert side.running
        pipe[1].send([bytes([byte])])
    side.join()
    assert content(target)[:8] == b"one by 1"


WRONG = {
    "ticket": (data(2, b"four"), "ticket 1 of 4 bytes is due, and 4 bytes came for ticket 2"),
    "shorter": (data(1, b"the"), "ticket 1 of 4 bytes is due, and 3 bytes came"),
    "longer": (data(1, b"fours"), "ticket 1 of 4 bytes is due, and 5 bytes came"),
    "absurd length": (data(1, b"four", length=2**63), "is due"),
    "no length": (data(1, b"four", length=0), "is due"),
    "command": (data(1, b"four", number=Ext.SET), "is due"),
    "nonsense": (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 2, "is due"),
    "end": (b"", "closed by the other end"),
    "end in the head": (data(1, b"four")[:20], "closed by the other end"),
    "end in the bytes": (data(1, b"four")[:-1], "closed by the other end"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_due_breaks_the_way(ways, pipe, name):
    sent, text = WRONG[name]
    send_all(pipe[1], sent)
    if name.startswith("end"):
        pipe[1].close()
    with pytest.raises(RemoteError, match=text) as caught:
        ways.take(IN, 1, 4, buffer(), 0, SPANS)
    assert caught.value.code == Status.PEER_LOST
    assert caught.value.text.startswith("a copy from the worker at memory:")
    # where the next push begins nobody knows
    for ticket in (2, 3):
        with pytest.raises(RemoteError, match=text) as caught:
            ways.take(IN, ticket, 4, buffer(), 0, SPANS)
        assert caught.value.code == Status.PEER_LOST


def test_a_failure_to_write_breaks_the_way_too(ways, pipe, monkeypatch):
    def no_room(*_: object) -> None:
        raise MemoryError

    send_all(pipe[1], data(1, b"four") + data(2, b"more"))
    target = buffer(host=False)
    monkeypatch.setattr(target.native, "write", no_room)
    for ticket, taker in ((1, target), (2, buffer())):
        with pytest.raises(RemoteError) as caught:
            ways.take(IN, ticket, 4, taker, 0, SPANS)
        assert caught.value.code == Status.PEER_LOST


def test_a_push_on_a_broken_way_is_no_error(pipe):
    ways = Peers()
    ways.add_out(OUT, pipe[0], SPANS)
    pipe[1].close()
    for ticket in (1, 2):
        ways.push(OUT, ticket, (b"nobody will miss this here",))


def test_a_way_that_there_is_not_is_refused(ways):
    for route in (IN, OUT):
        with pytest.raises(RemoteError, match=f"no route {route} out of this worker") as caught:
            ways.push(route, 1, (b"x",))
        assert caught.value.code == Status.BAD_REQUEST
    with pytest.raises(RemoteError, match=f"no route {OUT} into this worker") as caught:
        ways.take(OUT, 1, 1, buffer(), 0, SPANS)
    assert caught.value.code == Status.BAD_REQUEST


def test_a_route_is_opened_once_in_each_direction(ways, pipe):
    ways.add_out(IN, pipe[0], SPANS)
    for add in (ways.add_in, lambda *way: ways.add_out(*way, SPANS)):
        with pytest.raises(RemoteError, match=f"no room for route {IN}") as caught:
            add(IN, pipe[1])
        assert caught.value.code == Status.REFUSED


def test_there_is_a_bound_on_routes(ways, pipe, monkeypatch):
    monkeypatch.setattr(peers, "_MAX_ROUTES", 2)
    ways.add_in(1, pipe[0])
    with pytest.raises(RemoteError, match="no room for route 2"):
        ways.add_in(2, pipe[0])
    ways.add_out(2, pipe[0], SPANS)


# at their device's turn


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def worker(device) -> Iterator[Peer]:
    with serving(ExtChannel, [device]) as (peer, made):
        peer.lane = made[0]
        yield peer


def test_a_broken_copy_is_an_error_at_its_place(worker, pipe):
    base = worker.alloc(64)
    worker.lane.peers.add_in(IN, pipe[0])
    first = worker.ext(Ext.GET, base, 4)
    good = worker.ext(Ext.TAKE, IN, 0, 1, base, 4)
    second = worker.ext(Ext.GET, base, 4)
    bad = worker.ext(Ext.TAKE, IN, 0, 2, base + 4, 4)
    third = worker.ext(Ext.GET, base, 8)
    assert worker.answer() == (Ext.GET, 0, first, bytes(4))
    send_all(pipe[1], data(1, b"good") + data(2, b"gone")[:-2])
    assert worker.answer() == (Ext.GET, 0, second, b"good")
    pipe[1].close()
    number, status, seq, text = worker.answer()
    assert (number, status, seq) == (Ext.TAKE, Status.PEER_LOST, bad)
    assert b"closed by the other end" in text
    # half of it has come; the head is told, and what it does next is its affair
    assert worker.answer() == (Ext.GET, 0, third, b"goodgo\0\0")
    assert good == second - 1


def test_a_ping_is_answered_while_a_take_waits(worker, pipe):
    base = worker.alloc(64)
    worker.lane.peers.add_in(IN, pipe[0])
    worker.ext(Ext.TAKE, IN, 0, 1, base, 4)
    fence = worker.ext(Ext.FENCE)
    ping = worker.ext(Ext.PING)
    assert worker.answer()[2] == ping
    send_all(pipe[1], data(1, b"data"))
    assert worker.answer()[2] == fence


def test_a_ping_is_answered_while_a_push_waits_for_room(worker, pipe, monkeypatch):
    monkeypatch.setattr(peers, "_BACKLOG", 1000)
    monkeypatch.setattr(outlet, "PATIENCE", 3600.0)
    pipe[0].set_capacity(100)
    base = worker.alloc(5000)
    worker.lane.peers.add_out(OUT, pipe[0], SPANS)
    for ticket in (1, 2):
        worker.ext(Ext.PUSH, OUT, 0, ticket, base, 5000)
    fence = worker.ext(Ext.FENCE)
    ping = worker.ext(Ext.PING)
    assert worker.answer()[2] == ping
    assert worker.lane.executor.pending
    side = Side(lambda: [pipe[1].recv_into(memoryview(bytearray(64))) for _ in range(200)])
    assert worker.answer()[2] == fence
    pipe[1].close()
    with pytest.raises(Exception, match="closed"):
        side.join()


def test_a_push_waits_for_the_work_before_it(worker, device, pipe):
    base = worker.alloc(1 << 16)
    worker.lane.peers.add_out(OUT, pipe[0], SPANS)
    hold(worker, device, base)
    worker.ext(Ext.SET, base, tail=b"computed")
    worker.ext(Ext.PUSH, OUT, 0, 3, base, 8)
    worker.ext(Ext.SET, base, tail=b"the next")
    worker.ext(Ext.PING)
    worker.answer()
    assert pipe[0].sends == []
    device.gate.set()
    worker.ext(Ext.FENCE)
    worker.answer()
    got = bytearray(100)
    assert bytes(got[: pipe[1].recv_into(memoryview(got))]) == data(3, b"computed")


@pytest.mark.parametrize("number", [Ext.PUSH, Ext.TAKE])
@pytest.mark.parametrize(
    ("route", "dtype", "address", "size"),
    [
        (9, 0, 1 << 40, 4),
        (0, 9, 1 << 40, 4),
        (0, 0, 99 << 40, 4),
        (0, 0, 1 << 40, 65),
        (0, 0, (1 << 40) + 64, 1),
        (0, 0, 1 << 40, 2**64 - 1),
    ],
)
def test_copies_that_make_no_sense_are_answered(worker, number, route, dtype, address, size):
    worker.alloc(64)
    seq = worker.ext(number, route, dtype, 1, address, size)
    fence = worker.ext(Ext.FENCE)
    assert worker.answer()[:3] == (number, Status.BAD_REQUEST, seq)
    assert worker.answer()[:3] == (Ext.FENCE, 0, fence)


@pytest.mark.parametrize("number", [Ext.PEER, Ext.DATA, Ext.SESSION])
def test_what_is_spoken_elsewhere_is_unknown_here(worker, number):
    seq = worker.ext(number, *([1] if number == Ext.DATA else []), tail=b"{}")
    assert worker.answer()[:3] == (number, Status.UNKNOWN_COMMAND, seq)
