"""Who may keep a session process busy before anything is known of him, and for how long."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from caravan.stream.caller import Caller, Identity
from caravan.transport.certificates import TlsClient
from caravan.transport.endpoint import Endpoint
from caravan.wire import extension
from caravan.wire.commands import Ext
from caravan.wire.extension import TlsRequest
from caravan.worker.doorway import MOST, PLACES, SECONDS, Doorway
from caravan.worker.handshake import Greeting
from caravan.worker.lobby import Arrival
from caravan.worker.local import Worker
from tls_ends import PATIENCE, certificates
from worker.raw_client import Wire


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Comers:
    """Connections, by number."""

    def __init__(self) -> None:
        self.ends: dict[int, socket.socket] = {}
        self._ours: list[socket.socket] = []

    def make(self, source: str) -> Arrival:
        ours, theirs = socket.socketpair()
        number = len(self.ends) + 1
        self.ends[number] = theirs
        self._ours.append(ours)
        return Arrival(number, ours, source, source, Greeting(TlsRequest()))

    def is_out(self, number: int) -> bool:
        end = self.ends[number]
        end.setblocking(False)
        try:
            return end.recv(1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        for sock in (*self._ours, *self.ends.values()):
            sock.close()


@pytest.fixture
def comers() -> Iterator[Comers]:
    comers = Comers()
    yield comers
    comers.close()


def fill(doorway: Doorway, comers: Comers, count: int, source: str = "a") -> None:
    for _ in range(count):
        arrival = comers.make(source)
        assert doorway.add(arrival) is None
        if doorway.may_enter(arrival.connection):
            doorway.enter(arrival.connection)


def test_who_stays_long_goes_when_others_wait(comers):
    clock = Clock()
    doorway = Doorway(clock)
    fill(doorway, comers, PLACES)
    clock.now += SECONDS
    # nobody waits
    assert not any(comers.is_out(n) for n in comers.ends)
    waiting = comers.make("a")
    doorway.add(waiting)
    for _ in range(3):
        assert not doorway.may_enter(waiting.connection)
    assert [n for n in comers.ends if comers.is_out(n)] == [1]
    doorway.remove(1)
    assert doorway.may_enter(waiting.connection)


def test_nobody_goes_at_once(comers):
    doorway = Doorway(Clock())
    fill(doorway, comers, PLACES + 1)
    assert not any(comers.is_out(n) for n in comers.ends)
    assert doorway.patience() is not None


def test_who_has_come_in_leaves_the_place_to_others(comers):
    doorway = Doorway(Clock())
    fill(doorway, comers, PLACES + 1)
    assert not doorway.may_enter(PLACES + 1)
    doorway.remove(3)
    assert 3 not in doorway
    assert doorway.may_enter(PLACES + 1)


def test_an_address_that_has_fewer_places_goes_first(comers):
    doorway = Doorway(Clock())
    fill(doorway, comers, PLACES + 5, "flood")
    head = comers.make("head")
    doorway.add(head)
    doorway.remove(1)
    assert not doorway.may_enter(PLACES + 1)
    assert doorway.may_enter(head.connection)


def test_of_too_many_those_go_whose_address_has_most(comers):
    clock = Clock()
    doorway = Doorway(clock)
    fill(doorway, comers, 1, "head")
    fill(doorway, comers, MOST - 1, "flood")
    # one with a process is noticed by that
    assert doorway.add(comers.make("flood")) is None
    assert comers.is_out(2)
    for _ in range(PLACES - 2):
        doorway.add(comers.make("flood"))
    gone = doorway.add(comers.make("flood"))
    assert gone is not None
    assert gone.connection == PLACES + 1
    assert gone.connection not in doorway
    assert not comers.is_out(1)


def test_a_process_is_soon_free_again_if_a_stranger_has_it(comers):
    doorway = Doorway(Clock())
    assert not doorway.make_room()
    fill(doorway, comers, 1)
    assert doorway.make_room()
    assert not comers.is_out(1)


def test_strangers_without_a_certificate_keep_no_head_out():
    """More of them than there may be sessions; each says what it wants, and no more."""
    own = certificates()
    tls = own.tls("worker", ca=True)
    options = ("--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca)
    strangers: list[Wire] = []
    with Worker("CPU:1", options=options) as worker:
        for _ in range(20):
            stranger = Wire(worker.endpoint)
            strangers.append(stranger)
            stranger.hello(extension.caps())
            request = extension.encode_json(TlsRequest())
            stranger.send(extension.FRAME.pack(Ext.TLS, 0, 0, 1, len(request)), request)
        context = TlsClient(own.tls("head", ca=True))
        caller = Caller(
            Endpoint.parse(f"tls://{worker.endpoint}"),
            Identity("test", "test", ()),
            PATIENCE,
            tls=context,
        )
        caller.enter().transport.close()
        for stranger in strangers:
            stranger.close()
