"""The same stream over real sockets: large transfers both ways at once, and their ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from caravan.errors import ConnectionClosed, WorkerLost
from caravan.stream.dispatcher import Stream
from caravan.stream.framing import ExtFraming
from caravan.stream.ticket import Ticket
from stream.scripted import GET, SET, Peer, Rig, stream_threads
from wired import PATIENCE, Side, tcp_pair

BIG = 24 << 20


@pytest.fixture
def rigs(tmp_path) -> Iterator[list[Rig]]:
    with tcp_pair(tmp_path) as first, tcp_pair(tmp_path) as second:
        made = []
        for number, (near, far) in enumerate((first, second)):
            stream = Stream(near, ExtFraming(), near.peer, f"RPC{number}", PATIENCE)
            made.append(Rig(stream, Peer(far), near))
        yield made
        for rig in made:
            rig.take_leave()
    assert stream_threads() == []


@pytest.fixture
def rig(rigs) -> Rig:
    return rigs[0]


def test_a_large_payload_leaves_from_the_callers_memory(rig):
    data = bytearray(bytes(range(256)) * (BIG >> 8))
    expected = bytes(data)

    def write():
        rig.set(memoryview(data), wait_sent=True)
        data[:] = bytes(len(data))

    side = Side(write)
    assert rig.peer.request("SET").payload[8:] == expected
    side.join()


def test_a_peer_that_is_busy_replying_does_not_stop_the_head(rig):
    """Both directions are full at once: the head reads while it has more to send."""
    ticket = rig.get(BIG)
    for number in range(8):
        rig.set(bytes([number]) * (BIG // 8))
    get = rig.peer.request("GET")
    # nothing else is read until all of the reply is out
    rig.peer.reply(get, b"r" * BIG)
    assert ticket.wait(PATIENCE) == b"r" * BIG
    for number in range(8):
        assert rig.peer.request("SET").payload[8:] == bytes([number]) * (BIG // 8)


def test_a_large_relay(rigs):
    one, two = rigs
    two.stream.post(SET, [SET.request.pack(0), one.get(BIG)])
    two.set(b"after")
    one.peer.reply(one.peer.request("GET"), b"\x2a" * BIG)
    assert two.peer.request("SET").payload[8:] == b"\x2a" * BIG
    assert two.peer.request("SET").payload[8:] == b"after"


def test_a_peer_that_vanishes_while_much_is_sent(rig):
    ticket = Ticket("GET", 4)
    side = Side(lambda: rig.set(b"x" * BIG, wait_sent=True))
    rig.peer.reader.read(1000)
    rig.peer.close()
    side.join()
    rig.stream.post(GET, [GET.request.pack(0, 4)], ticket)
    with pytest.raises(WorkerLost) as caught:
        ticket.wait(PATIENCE)
    assert isinstance(caught.value.cause, ConnectionClosed)


def test_a_connection_that_is_reset(rig):
    ticket = rig.get(4)
    rig.peer.request("GET")
    with socket.socket(fileno=socket.dup(rig.peer.transport.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        # the last handle on it must be this one for the reset to leave
        rig.peer.transport._sock.close()
    with pytest.raises(WorkerLost, match="connection reset by peer"):
        ticket.wait(PATIENCE)


def test_close_with_replies_due(rig):
    ticket = rig.get(4)
    rig.stream.close()
    with pytest.raises(ConnectionClosed):
        ticket.wait(PATIENCE)
    assert rig.peer.request("GET").seq == 1
    with pytest.raises(ConnectionClosed):
        rig.peer.request()
