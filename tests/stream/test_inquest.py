"""A session that has ended under its head: what the worker says of it, when it is asked."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest

from caravan.errors import (
    ConnectionClosed,
    LinkDamaged,
    SessionEnded,
    TransportTimeout,
    WorkerLost,
)
from caravan.stream import inquest
from caravan.stream.session import Session
from caravan.stream.watchdog import Watchdog
from caravan.wire.extension import NO_DEVICE, Status
from caravan.wire.versions import V7
from servers import Script, close, hello, steps
from stream.scripted import Peer
from stream.test_session import ALONE, DEVICES, GOOD, GOOD_DEVICE, KEY, base, open_to, session, u32
from wired import PATIENCE, Side, wait_until


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    dog = Watchdog(PATIENCE)
    yield dog
    dog.close()


def says(text: str, status: int = Status.ENDED) -> Script:
    return steps(hello(), session(text.encode(), status))


def hears(peer: Peer) -> None:
    peer.table = None
    peer.request("SESSION")


def loss(opened: Session, index: int = 0) -> WorkerLost:
    """The loss of a device, as whoever is told of it sees it."""
    stream = opened.links[index].stream
    wait_until(lambda: stream.lost is not None)
    stream.lost.settle(PATIENCE)
    assert stream.lost._asked is None, "who waits for it waits in vain"
    return stream.lost


def test_the_worker_says_what_happened(serve, watchdog):
    server = serve(steps(hello(), session(ALONE), close), says("the process died by SIGSEGV"))
    opened = open_to(server, watchdog)
    error = loss(opened)
    assert str(error) == (
        f"lost RPC0 at {server.endpoint} during receive: the process died by SIGSEGV"
    )
    assert type(error.cause) is SessionEnded
    # what was seen first is there, too
    assert type(error.cause.__cause__) is ConnectionClosed
    assert error.__cause__ is error.cause
    assert server.peers[1].asked["session"] == KEY
    assert server.peers[1].asked["device"] == NO_DEVICE
    opened.close()


def test_who_has_seen_damage_itself_does_not_ask(serve, watchdog):
    """The worker saw an end, and would say that its head had closed the connection."""
    server = serve(steps(hello(), session(ALONE)), says("a connection to its head broke"))
    opened = open_to(server, watchdog)
    opened.links[0].stream.fail(LinkDamaged("the link damaged it"), "GET")
    assert str(loss(opened).cause) == "the link damaged it"
    opened.close()
    assert len(server.peers) == 1


def test_all_devices_of_a_session_have_one_answer(serve, watchdog):
    server = serve(
        *[steps(hello(), session(replace(GOOD, devices=DEVICES * 2)))] * 4,
        says("it was killed"),
    )
    opened = open_to(server, watchdog)
    for peer in list(server.peers):
        peer.close()
    for index in range(4):
        assert str(loss(opened, index).cause) == "it was killed"
    opened.close()
    assert len(server.peers) == 5


def test_a_loss_that_is_noticed_late_is_explained_at_once(serve, watchdog):
    server = serve(*[steps(hello(), session())] * 2, says("it was killed"))
    opened = open_to(server, watchdog)
    server.peers[0].close()
    assert str(loss(opened, 0).cause) == "it was killed"
    server.peers[1].close()
    assert str(loss(opened, 1).cause) == "it was killed"
    opened.close()
    assert len(server.peers) == 3


def test_one_that_is_just_ending_is_asked_for_again(serve, watchdog):
    server = serve(
        steps(hello(), session(ALONE), close),
        says("the session goes on", Status.BUSY),
        steps(hello(), hears, close),
        says("it was killed"),
    )
    opened = open_to(server, watchdog)
    assert str(loss(opened).cause) == "it was killed"
    opened.close()


@pytest.mark.parametrize(
    "script",
    [
        says("no such session", Status.REFUSED),
        steps(hello(caps=bytes(24))),
        steps(close),
        lambda peer: peer.raw(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3),
    ],
    ids=["unknown", "without the extension", "closed", "another"],
)
def test_who_cannot_say_changes_nothing(serve, watchdog, monkeypatch, script):
    monkeypatch.setattr(inquest, "SECONDS", 0.3)
    server = serve(steps(hello(), session(ALONE), close), script)
    opened = open_to(server, watchdog)
    assert "closed by the other end" in str(loss(opened))
    assert type(opened.links[0].stream.lost.cause) is ConnectionClosed
    opened.close()


def test_a_server_without_the_extension_is_asked_nothing(serve, watchdog):
    heard: list[bytes] = []

    def hears_nothing(peer: Peer) -> None:
        with pytest.raises(ConnectionClosed):
            heard.append(peer.reader.read(1))

    other = steps(hello(caps=bytes(24)), hears_nothing)
    server = serve(steps(hello(), session(ALONE), close), other)
    opened = open_to(server, watchdog)
    assert "closed by the other end" in str(loss(opened))
    opened.close()
    server.finish()
    assert (len(server.peers), heard) == (2, [])


def test_who_does_not_answer_holds_up_nobody_for_long(serve, watchdog, monkeypatch):
    monkeypatch.setattr(inquest, "SECONDS", 0.2)
    server = serve(steps(hello(), session(ALONE), close))
    opened = open_to(server, watchdog)
    assert "closed by the other end" in str(loss(opened))
    opened.close()


def test_a_worker_that_is_gone_is_told_of(serve, watchdog):
    server = serve(steps(hello(), session(ALONE)))
    opened = open_to(server, watchdog)
    server.close()
    assert "no worker listens there any more" in str(loss(opened))
    opened.close()


def test_silence_is_no_end_of_a_session(serve):
    dog = Watchdog(0.3)
    server = serve(steps(hello(), session(ALONE)))
    opened = open_to(server, dog, timeout=0.3)
    assert type(loss(opened).cause) is TransportTimeout
    opened.close()
    dog.close()
    assert len(server.peers) == 1


def test_a_server_of_the_base_protocol_is_not_asked(serve, watchdog):
    server = serve(steps(hello(V7, bytes(24)), base(u32(1), *GOOD_DEVICE), close))
    opened = open_to(server, watchdog)
    assert type(loss(opened).cause) is ConnectionClosed
    opened.close()
    assert len(server.peers) == 1


def test_the_loss_of_another_worker_is_its_own_affair(serve, watchdog):
    server = serve(steps(hello(), session(ALONE)))
    opened = open_to(server, watchdog)
    theirs = WorkerLost("elsewhere:1", "RPC7", "TAKE", ConnectionClosed("gone"))
    opened.links[0].stream.fail(theirs, "TAKE")
    assert loss(opened) is theirs
    opened.close()
    assert len(server.peers) == 1


def test_closing_waits_for_no_answer_that_nobody_gives(serve, watchdog):
    asked: list[Peer] = []
    server = serve(steps(hello(), session(ALONE), close), steps(hello(), asked.append))
    opened = open_to(server, watchdog)
    wait_until(lambda: asked)
    Side(opened.close).join()


def test_an_error_can_be_sent_to_another_process(serve, watchdog):
    server = serve(steps(hello(), session(ALONE), close), says("it was killed"))
    opened = open_to(server, watchdog)
    error = loss(opened)
    opened.close()
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), str(copy.cause)) == (str(error), "it was killed")


def test_a_session_that_takes_leave_asks_nobody(serve, watchdog):
    """The worker may end it before the other connections have taken leave too."""
    server = serve(steps(hello(), session(ALONE)), says("unasked"))
    opened = open_to(server, watchdog)
    opened._inquest.end()
    server.peers[0].close()
    assert type(loss(opened).cause) is ConnectionClosed
    opened.close()
    assert len(server.peers) == 1
