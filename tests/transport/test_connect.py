"""Opening connections, and every way in which that fails."""

from __future__ import annotations

import socket
import time

import pytest

from caravan.errors import ConnectError, TransportTimeout
from caravan.transport import tcp
from caravan.transport.endpoint import Endpoint
from caravan.transport.tcp import SocketTransport, connect
from wired import KINDS, Side, receive, send_all

SOON = 0.3
GENEROUS = 20.0


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def endpoint_of(server: socket.socket) -> Endpoint:
    return Endpoint("127.0.0.1", server.getsockname()[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_unknown_host():
    with pytest.raises(ConnectError, match=r"nobody\.invalid:50052: unknown host"):
        connect(Endpoint.parse("nobody.invalid"), GENEROUS)


def test_refused():
    with pytest.raises(ConnectError, match=r"cannot connect to 127\.0\.0\.1:\d+: .*refused"):
        connect(Endpoint("127.0.0.1", free_port()), GENEROUS)


@pytest.mark.parametrize("host", ["a" * 300, "a..b", "a\0b"])
def test_what_can_be_no_host_name(host):
    with pytest.raises(ConnectError):
        connect(Endpoint(host, 1), GENEROUS)


@pytest.mark.parametrize("name", ["absent.sock", "x" * 200, "nul\0"])
def test_unix_socket_that_cannot_be_reached(tmp_path, name):
    with pytest.raises(ConnectError, match="cannot connect to unix:"):
        connect(Endpoint("", 0, str(tmp_path / name)), GENEROUS)


def test_a_connection_that_nobody_takes(monkeypatch):
    def never(address, timeout):
        assert timeout == SOON
        raise TimeoutError("timed out")

    monkeypatch.setattr(tcp.socket, "create_connection", never)
    with pytest.raises(ConnectError, match=r"no answer within 0\.3 s"):
        connect(Endpoint("127.0.0.1", 1), SOON)


def test_ipv6():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with server:
        connect(Endpoint("::1", server.getsockname()[1]), GENEROUS).close()


def test_small_messages_leave_at_once(listener):
    transport = connect(endpoint_of(listener), GENEROUS)
    accepted, _ = listener.accept()
    for end in (transport, SocketTransport(accepted, "head")):
        with socket.socket(fileno=socket.dup(end.fileno())) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        end.close()


def test_an_accepted_connection_that_never_answers(listener):
    transport = connect(endpoint_of(listener), GENEROUS)
    transport.set_timeout(SOON)
    started = time.monotonic()
    with pytest.raises(TransportTimeout):
        transport.recv_into(memoryview(bytearray(1)))
    assert time.monotonic() - started < GENEROUS
    transport.close()


def test_a_timeout_bounds_all_reads_together(listener):
    """A peer that drips single bytes does not stretch the handshake."""
    transport = connect(endpoint_of(listener), GENEROUS)
    accepted, _ = listener.accept()
    transport.set_timeout(SOON)

    def read():
        started = time.monotonic()
        while True:
            accepted.send(b"x")
            transport.recv_into(memoryview(bytearray(1)))
            assert time.monotonic() - started < GENEROUS
            time.sleep(SOON / 10)

    with accepted, pytest.raises(TransportTimeout):
        Side(read).join()
    transport.close()


def test_a_timeout_can_be_taken_back(listener):
    transport = connect(endpoint_of(listener), GENEROUS)
    accepted, _ = listener.accept()
    transport.set_timeout(1e-3)
    transport.set_timeout(None)
    with accepted:
        side = Side(lambda: transport.recv_into(memoryview(bytearray(1))))
        time.sleep(0.05)
        accepted.send(b"x")
        assert side.join() == 1
    transport.close()


def test_repr(listener):
    transport = connect(endpoint_of(listener), GENEROUS)
    assert repr(transport) == f"<SocketTransport to {endpoint_of(listener)}>"
    transport.close()
    assert "closed" in repr(transport)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_silence_can_be_bounded(kind, tmp_path):
    with KINDS[kind](tmp_path) as (one, two):
        one.bound_silence(0.2)
        one.bound_unacknowledged(30.0)
        send_all(two, b"data")
        # what is there is not too late, and nothing else is bounded
        time.sleep(0.3)
        assert receive(one, 4) == b"data"
        with pytest.raises(TransportTimeout, match=r"nothing came for 0\.2 s"):
            one.recv_into(memoryview(bytearray(4)))
        assert one.send([b"x"]) == 1


def test_the_system_breaks_connections_that_take_nothing(tmp_path):
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        pytest.skip("this system has no such option")
    with KINDS["tcp"](tmp_path) as (one, _):
        one.bound_unacknowledged(1.5)
        assert one._sock.getsockopt(socket.IPPROTO_TCP, option) == 1500
