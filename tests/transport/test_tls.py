"""TLS over a socket: two threads at once, records, ends that are none, and links that damage."""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from caravan.errors import ConnectError, ConnectionClosed, LinkDamaged, TransportTimeout
from caravan.transport.certificates import Tls, client_context, fingerprint, server_context
from caravan.transport.reader import Reader
from caravan.transport.tcp import SocketTransport
from caravan.transport.tls import TlsTransport, secure
from damaged_link import TO_HEAD, TO_WORKER, DamagedLink
from tls_ends import PATIENCE, certificates, shake, sockets, tls_pair
from wired import Side, receive, send_all

DAMAGED = "the link damaged what it carried, or somebody changed it"
OVERHEAD = 22  # bytes of a record besides what it carries


@pytest.fixture
def ends(tmp_path):
    with tls_pair(tmp_path) as pair:
        yield pair


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    own = certificates()
    return client_context(own.tls(ca=True)), server_context(own.tls("worker"))


# what travels


def wire_of(transport: TlsTransport) -> list[int]:
    """The sizes of what a transport hands its socket from now on."""
    sizes: list[int] = []
    inner = transport._socket
    send = inner.send

    def noted(parts):
        count = send(parts)
        sizes.append(count)
        return count

    inner.send = noted  # type: ignore[method-assign]
    return sizes


def test_small_parts_travel_in_one_record(ends):
    one, two = ends
    sizes = wire_of(one)
    assert one.send([b"head", b"x" * 100, memoryview(b"tail")]) == 108
    assert sizes == [108 + OVERHEAD]
    assert receive(two, 108) == b"head" + b"x" * 100 + b"tail"


def test_a_payload_with_a_head_travels_in_full_records(ends):
    one, two = ends
    sizes = wire_of(one)
    data = bytes(range(256)) * 256
    one.send([b"h" * 24, data])
    assert sizes == [len(data) + 24 + 5 * OVERHEAD]
    assert receive(two, 24 + len(data)) == b"h" * 24 + data


def test_nothing_of_what_travels_is_readable(ends):
    one, two = ends
    seen = bytearray()
    pull = two._socket.recv_into

    def spied(buffer):
        count = pull(buffer)
        seen.extend(buffer[:count])
        return count

    two._socket.recv_into = spied
    one.send([b"the caravan left the oasis"])
    assert receive(two, 26) == b"the caravan left the oasis"
    assert seen and b"oasis" not in seen


def test_both_ways_at_once_on_two_threads_each(ends):
    size = 24 << 20
    data = [bytes(hashlib.shake_128(name).digest(1 << 20)) * (size >> 20) for name in (b"1", b"2")]
    sides = [
        Side(lambda end=end, what=what: send_all(end, what))
        for end, what in zip(ends, data, strict=True)
    ]
    readers = [Side(lambda end=end: receive(end, size)) for end in ends]
    assert readers[1].join() == data[0]
    assert readers[0].join() == data[1]
    for side in sides:
        side.join()


def test_a_sender_that_waits_does_not_stop_the_receiver(ends):
    one, two = ends
    full = threading.Event()

    def write() -> None:
        data = memoryview(bytes(64 << 20))
        while data:
            sent = one.send([data])
            data = data[sent:]
            if not sent:
                full.set()
                one.wait_writable(PATIENCE)

    side = Side(write)
    assert full.wait(PATIENCE)
    for number in range(100):
        two.send([bytes([number])])
        assert receive(one, 1) == bytes([number])
    assert side.running
    receive(two, 64 << 20)
    side.join()


def test_what_is_decrypted_already_is_something_to_read(ends):
    """The socket has nothing any more, and there is more: of a record, and whole records."""
    one, two = ends
    one.send([b"one"])
    one.send([b"two"])
    one.send([b"x" * 40_000])
    # wait until the socket has all of it
    target = memoryview(bytearray(2))
    with_all = 3 + 3 + 40_000
    left = with_all
    while left:
        assert two.wait_readable(PATIENCE)
        count = two.recv_into(target[: min(2, left)])
        left -= count
        if left and left < 16_000:
            assert two.wait_readable(0)
    assert two.wait_readable(0) is False


def test_who_only_looks_takes_nothing(ends):
    one, two = ends
    reader = Reader(two)
    one.send([b"a" * 10])
    one.send([b"b" * 10])
    assert two.wait_readable(PATIENCE)
    assert reader.read(5) == b"a" * 5
    for _ in range(3):
        two.wait_readable(0)
    assert reader.read(15) == b"a" * 5 + b"b" * 10


def test_tickets_of_a_server_that_sends_them_are_no_bytes(tmp_path):
    client, server = contexts()
    server.num_tickets = 4
    one, two = shake(sockets(), client, server)
    two.send([b"hello"])
    assert receive(one, 5) == b"hello"
    assert one.wait_readable(0) is False
    one.close()
    two.close()


# the end


def test_an_end_in_the_middle_of_a_record_is_an_end():
    one, two = shake(sockets(), *contexts())
    one._socket.send = lambda parts: raw.send(bytes(parts[0])[:-1])  # type: ignore[method-assign]
    with socket.socket(fileno=socket.dup(one.fileno())) as raw:
        one.send([b"never whole"])
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionClosed, match="closed by the other end"):
            receive(two, 1)
    one.close()
    two.close()


def test_an_end_without_a_farewell_is_an_end(ends):
    one, two = ends
    with socket.socket(fileno=socket.dup(one.fileno())) as raw:
        raw.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionClosed, match="closed by the other end"):
        two.recv_into(memoryview(bytearray(1)))


def test_an_end_is_one_for_good(ends):
    one, two = ends
    one.close()
    for _ in range(2):
        with pytest.raises(ConnectionClosed, match="closed by the other end"):
            two.recv_into(memoryview(bytearray(1)))
    assert two.wait_readable(0) is True


# damage


@contextmanager
def damaged_pair() -> Iterator[tuple[DamagedLink, SocketTransport, SocketTransport]]:
    """A link that does harm, and what is at its ends."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        DamagedLink(f"127.0.0.1:{server.getsockname()[1]}") as link,
    ):
        host, _, port = link.endpoint.rpartition(":")
        near = SocketTransport(socket.create_connection((host, int(port))), "worker")
        far = SocketTransport(server.accept()[0], "head")
        try:
            yield link, near, far
        finally:
            near.close()
            far.close()


@pytest.mark.parametrize("way", [TO_WORKER, TO_HEAD])
@pytest.mark.parametrize("at", [3, 4, 5, 100, 400, 30_000])
def test_a_changed_byte_is_never_taken_for_what_was_sent(way, at):
    """In the head of a record (its length, which may be too long now), within, and at its end."""
    with damaged_pair() as (link, *ends):
        one, two = shake((ends[0], ends[1]), *contexts())
        sender, taker = (one, two) if way == TO_WORKER else (two, one)
        # nothing is on its way
        sender.send([b"x"])
        receive(taker, 1)
        link.damage(way, at)
        data = bytes(range(256)) * 4096
        got = bytearray()

        def read() -> None:
            buffer = memoryview(bytearray(50_000))
            while True:
                got.extend(buffer[: taker.recv_into(buffer)])

        side = Side(lambda: send_all(sender, data))
        with pytest.raises(LinkDamaged, match=DAMAGED):
            Side(read).join()
        assert link.damaged == 1
        assert data.startswith(bytes(got))
        assert len(got) < len(data)
        taker.close()
        with pytest.raises(ConnectionClosed):
            side.join()
            receive(sender, 1)
        sender.close()


def test_the_other_end_learns_that_what_it_sent_was_damaged(ends):
    one, two = ends
    with socket.socket(fileno=socket.dup(one.fileno())) as raw:
        raw.send(bytes((23, 3, 3, 0, 40)) + b"x" * 40)
    with pytest.raises(ConnectionClosed, match=DAMAGED):
        receive(two, 1)
    with pytest.raises(ConnectionClosed, match=DAMAGED):
        two.send([b"x"])
    two.close()
    with pytest.raises(ConnectionClosed, match=DAMAGED):
        receive(one, 1)


# the handshake


def test_the_fingerprint_is_that_of_the_other_end(tmp_path):
    own = certificates()
    with tls_pair(tmp_path) as (one, two):
        assert one.fingerprint == fingerprint(own.path("worker"))
        assert two.fingerprint == b""


def attempt(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[Exception | None, ...]:
    """What both ends say of a handshake, the client's first read included."""
    near, far = sockets()
    told: list[Exception | None] = [None, None]

    def serve() -> None:
        try:
            secure(far, server, server=True, timeout=PATIENCE).send([b"x"])
        except Exception as exc:
            told[1] = exc

    side = Side(serve)
    try:
        receive(secure(near, client, server=False, timeout=PATIENCE), 1)
    except Exception as exc:
        told[0] = exc
    near.close()
    side.join()
    far.close()
    return tuple(told)


def test_a_worker_of_another_ca():
    told = attempt(client_context(certificates(1).tls(ca=True)), contexts()[1])
    assert isinstance(told[0], ConnectError)
    assert "its certificate is not of the CA that is trusted here" in str(told[0])
    assert isinstance(told[1], ConnectError)
    assert "does not know the CA" in str(told[1])


def test_a_client_of_another_ca():
    own, other = certificates(), certificates(1)
    server = server_context(own.tls("worker", ca=True))
    foreign = Tls(own.path("ca"), other.path("head"), other.path("head-key"))
    told = attempt(client_context(foreign), server)
    assert "its certificate is not of the CA that is trusted here" in str(told[1])
    assert isinstance(told[0], ConnectionClosed)
    assert "does not know the CA" in str(told[0])


def test_a_client_without_a_certificate_where_one_is_required():
    own = certificates()
    told = attempt(client_context(own.tls(ca=True)), server_context(own.tls("worker", ca=True)))
    assert "shown no certificate" in str(told[1])
    assert isinstance(told[0], ConnectionClosed)
    assert "wants to see a certificate of its CA (--tls-cert, --tls-key)" in str(told[0])


def test_a_head_cannot_pass_for_a_worker():
    own = certificates()
    told = attempt(client_context(own.tls(ca=True)), server_context(own.tls("head")))
    assert isinstance(told[0], ConnectError)
    assert "a head's, say, is none for a worker" in str(told[0])


def test_an_expired_certificate():
    own = certificates()
    told = attempt(client_context(own.tls(ca=True)), server_context(own.tls("expired")))
    assert isinstance(told[0], ConnectError)
    assert "its certificate has expired" in str(told[0])
    assert "has expired" in str(told[1])


@pytest.mark.parametrize("old", ["client", "server"])
def test_an_end_that_speaks_tls_1_2_only(old):
    client, server = contexts()
    context = client if old == "client" else server
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    for told in attempt(client, server):
        assert isinstance(told, ConnectError)
    told = attempt(client, server)
    assert "does not speak TLS 1.3" in str(told[1 if old == "client" else 0])


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(100),
    b"\x16\x03\x01\xff\xff" + bytes(100),
    b"\xff" * 99,
]


@pytest.mark.parametrize("data", GARBAGE)
@pytest.mark.parametrize("server", [True, False])
def test_garbage_instead_of_a_handshake(data, server):
    near, far = sockets()
    near.send([data])
    with pytest.raises(ConnectError, match="no TLS: "):
        secure(far, contexts()[server], server=server, timeout=PATIENCE)
    near.close()


@pytest.mark.parametrize("server", [True, False])
def test_a_handshake_that_stalls(server):
    near, far = sockets()
    near.send([b"\x16\x03\x01\x00"])
    with pytest.raises(TransportTimeout):
        secure(far, contexts()[server], server=server, timeout=0.1)
    near.close()


@pytest.mark.parametrize("server", [True, False])
def test_an_end_in_the_midst_of_the_handshake(server):
    near, far = sockets()
    side = Side(lambda: secure(far, contexts()[server], server=server, timeout=PATIENCE))
    near.close()
    with pytest.raises(ConnectionClosed):
        side.join()


@pytest.mark.parametrize("at", range(0, 700, 13))
def test_a_byte_that_changes_in_the_handshake(at):
    """Both ends go on as if nothing had been, where it means nothing, or neither does."""
    with damaged_pair() as (link, near, far):
        link.damage(at % 2, at)

        def serve() -> None:
            try:
                end = secure(far, contexts()[1], server=True, timeout=1.0)
                assert receive(end, 8) == b"question"
                end.send([b"answer"])
                receive(end, 1)
            finally:
                far.close()

        side = Side(serve)
        try:
            one = secure(near, contexts()[0], server=False, timeout=1.0)
            one.send([b"question"])
            assert receive(one, 6) == b"answer"
        except (ConnectError, ConnectionClosed, TransportTimeout) as exc:
            assert link.damaged
            assert str(exc)
        near.close()
        with pytest.raises((ConnectError, ConnectionClosed, TransportTimeout)):
            side.join()


def test_silence_can_be_bounded(ends):
    one, two = ends
    one.bound_silence(0.2)
    one.bound_unacknowledged(30.0)
    send_all(two, b"data")
    assert receive(one, 4) == b"data"
    with pytest.raises(TransportTimeout, match=r"nothing came for 0\.2 s"):
        one.recv_into(memoryview(bytearray(4)))
    assert one.send([b"x"]) == 1
