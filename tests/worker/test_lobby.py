"""The lobby: strangers take each other's places, never that of one who knows what to say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from caravan.trust.token import Token
from caravan.wire import codec, extension
from caravan.wire.commands import Ext
from caravan.wire.extension import FRAME, SessionRequest, Status
from caravan.wire.proof import Claim
from caravan.worker import lobby as lobbies
from caravan.worker import throttle
from caravan.worker.handshake import Terms
from caravan.worker.lobby import Arrival, Lobby
from wired import PATIENCE, wait_until

TOKEN = Token("a token of 24 characters")


class Hall:
    """A lobby, and the client's ends of all connections in it."""

    def __init__(self, terms: Terms) -> None:
        self.arrivals: Queue[Arrival] = Queue()
        self.lobby = Lobby(terms, self.arrivals.put)
        self.clients: list[socket.socket] = []
        self._theirs: list[socket.socket] = []

    def come(self, address: str) -> socket.socket | None:
        """A connection from there; None if it was not taken."""
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE)
        self.clients.append(ours)
        self._theirs.append(theirs)
        refusal = self.lobby.take(len(self.clients), theirs, address, f"{address} client")
        return None if refusal else ours

    def arrival(self) -> Arrival:
        return self.arrivals.get(timeout=PATIENCE)

    def here(self) -> int:
        return len(self.lobby._guests)

    def failed(self) -> int:
        return sum(guest.failed for guest in self.lobby._guests.values())

    def close(self) -> None:
        for sock in (*self.clients, *self._theirs):
            sock.close()
        wait_until(lambda: not greeters())


def greeters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("greet ")]


@pytest.fixture
def hall(monkeypatch) -> Iterator[Hall]:
    monkeypatch.setattr(lobbies, "MOST_OF_ONE", 6)
    monkeypatch.setattr(lobbies, "MOST", 10)
    made = Hall(Terms(timeout=PATIENCE, token=TOKEN))
    yield made
    # who waits for an answer need not wait for the end of the test
    for guest in made.lobby._guests.values():
        guest.shown_out.set()
    made.close()


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, "closed"
        data += part
    return data


def frame(sock: socket.socket) -> tuple[int, int, bytes]:
    number, status, _flags, _seq, length = FRAME.unpack(read(sock, FRAME.size))
    return number, status, read(sock, length)


def prove(sock: socket.socket, key: bytes = TOKEN.key) -> None:
    """HELLO, AUTH and PROVE, whose answer is not waited for."""
    sock.sendall(codec.hello_request(extension.caps()))
    read(sock, 36)
    claim = Claim(key)
    sock.sendall(codec.ext_frame(Ext.AUTH, 1, 32) + claim.nonce)
    _, _, nonce = frame(sock)
    sock.sendall(codec.ext_frame(Ext.PROVE, 2, 32) + claim.prove(nonce))


def come_in(hall: Hall, sock: socket.socket | None) -> None:
    """As a head with the token."""
    assert sock is not None
    prove(sock)
    assert frame(sock)[:2] == (Ext.PROVE, 0)
    data = extension.encode_json(SessionRequest("", 0, "0.1.0", "0.26.0"))
    sock.sendall(codec.ext_frame(Ext.SESSION, 3, len(data)) + data)
    while True:
        arrival = hall.arrival()
        if arrival.greeting is not None:
            assert arrival.greeting.request is not None
            return
        assert arrival.error.startswith("it did not introduce itself before too many others came")


def test_who_introduces_himself_leaves_the_lobby(hall):
    come_in(hall, hall.come("10.0.0.1"))
    assert hall.here() == 0
    wait_until(lambda: not greeters())


def test_one_too_many_of_an_address_takes_the_place_of_the_oldest(hall):
    strangers = [hall.come("10.0.0.1") for _ in range(6)]
    late = hall.come("10.0.0.1")
    arrival = hall.arrival()
    assert (arrival.connection, arrival.greeting) == (1, None)
    assert arrival.source == "10.0.0.1"
    assert strangers[0].recv(1) == b""
    assert hall.here() == 6
    come_in(hall, late)


def test_a_head_gets_in_while_another_address_floods(hall):
    for n in range(100):
        assert hall.come("10.0.0.1") is not None
        if n % 10 == 0:
            come_in(hall, hall.come("10.0.0.2"))
    assert hall.here() == 6
    wait_until(lambda: len(greeters()) == 6)


def test_a_head_gets_in_while_many_addresses_flood(hall):
    # of those who flood, one has more places than any head
    for n in range(40):
        hall.come("10.0.0.1" if n % 2 else f"10.0.1.{n}")
        if n % 10 == 9:
            come_in(hall, hall.come("10.0.0.2"))
    assert hall.here() <= 10


def test_networks_of_ipv6_count_as_one_address(hall):
    for n in range(20):
        hall.come(f"2001:db8::{n + 1:x}")
    assert hall.here() == 6


def test_a_wrong_token_waits_for_its_answer_each_time_longer(hall, monkeypatch):
    waited = []
    monkeypatch.setattr(throttle, "FIRST_DELAY", 0.01)
    failed = hall.lobby._throttle.failed
    monkeypatch.setattr(
        hall.lobby._throttle, "failed", lambda source: waited.append(failed(source)) or waited[-1]
    )
    for _ in range(3):
        sock = hall.come("10.0.0.1")
        prove(sock, b"another one of 28 characters")
        assert frame(sock) == (Ext.PROVE, Status.REFUSED, b"wrong token")
        assert hall.arrival().error == "it does not know the token"
    assert waited == [0.01, 0.02, 0.04]
    # who knows it waits for nothing, and makes all begin anew
    come_in(hall, hall.come("10.0.0.1"))
    prove(hall.come("10.0.0.1"), b"another one of 28 characters")
    hall.arrival()
    assert waited[3:] == [0.01]


def test_who_waits_for_an_answer_keeps_the_place_also_when_he_leaves(hall, monkeypatch):
    monkeypatch.setattr(throttle, "FIRST_DELAY", PATIENCE)
    monkeypatch.setattr(throttle, "LONGEST_DELAY", PATIENCE)
    for n in range(6):
        sock = hall.come("10.0.0.1")
        prove(sock, b"another one of 28 characters")
        wait_until(lambda n=n: hall.failed() == n + 1)
        sock.close()
    assert hall.come("10.0.0.1") is None
    assert hall.here() == 6
    # which is nothing to others
    come_in(hall, hall.come("10.0.0.2"))


def test_those_who_wait_do_not_take_the_places_of_all(hall, monkeypatch):
    monkeypatch.setattr(throttle, "FIRST_DELAY", PATIENCE)
    monkeypatch.setattr(throttle, "LONGEST_DELAY", PATIENCE)
    for n in range(10):
        prove(hall.come(f"10.0.{n % 2}.1"), b"another one of 28 characters")
        wait_until(lambda n=n: hall.failed() == n + 1)
    come_in(hall, hall.come("10.0.0.2"))
    assert hall.here() == 9


def test_a_thread_that_cannot_start_costs_one_connection(hall, monkeypatch):
    class NoThread:
        def __init__(self, **_: object) -> None: ...
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(lobbies.threading, "Thread", NoThread)
        assert hall.come("10.0.0.1") is None
    assert hall.here() == 0
    come_in(hall, hall.come("10.0.0.1"))


def test_a_defect_of_the_greeting_leaves_nothing_behind(hall, monkeypatch):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("open sesame")

    monkeypatch.setattr(lobbies, "greet", fail)
    hall.come("10.0.0.1")
    assert hall.arrival().error == "internal error: ZeroDivisionError"
    assert hall.here() == 0
