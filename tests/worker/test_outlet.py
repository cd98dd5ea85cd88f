"""Whole messages onto one connection, whoever sends them and however slowly they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from caravan.trace.recorder import Recorder
from caravan.trace.spans import Kind
from caravan.transport import memory
from caravan.worker import outlet as outlets
from caravan.worker.outlet import Outlet
from wired import KINDS, Side, receive, wait_until


@pytest.fixture
def pipe() -> Iterator[tuple[memory.MemoryTransport, memory.MemoryTransport]]:
    near, far = memory.pair(64)
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def outlet(pipe) -> Iterator[Outlet]:
    made = Outlet(pipe[0], Recorder(), Kind.REPLY)
    yield made
    made.close()


def test_what_the_pipe_takes_leaves_at_once_and_in_one(pipe, outlet):
    outlet.send((b"head", b"", memoryview(b"body")))
    assert pipe[0].sends == [8]
    assert receive(pipe[1], 8) == b"headbody"
    assert outlet.drain(0)


def test_a_slow_reader_holds_up_nobody_and_gets_what_was_sent(pipe, outlet):
    memories = [bytearray([n]) * 100 for n in range(50)]
    for data in memories:
        outlet.send((data[:3], memoryview(data)[3:]))
        # it is the sender's again once `send` has returned
        data[:] = bytes(100)
    assert not outlet.drain(0)
    for n in range(50):
        assert receive(pipe[1], 100) == bytes([n]) * 100
    assert outlet.drain(10)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_several_threads_are_not_mixed(kind, tmp_path):
    with KINDS[kind](tmp_path) as (near, far):
        outlet = Outlet(near, Recorder(), Kind.REPLY)

        def send(number: int) -> None:
            for _ in range(50):
                outlet.send((bytes([number]) * 500, bytes([number]) * 4500))

        sides = [Side(lambda n=number: send(n)) for number in range(4)]
        seen = [receive(far, 5000) for _ in range(200)]
        assert all(message == message[:1] * 5000 for message in seen)
        for side in sides:
            side.join()
        outlet.close()


@pytest.fixture
def patient(monkeypatch) -> None:
    """However busy the machine is: nobody goes on because the wait was long enough."""
    monkeypatch.setattr(outlets, "PATIENCE", 3600.0)


def test_who_has_waited_long_enough_goes_on_beyond_the_limit(pipe, monkeypatch):
    monkeypatch.setattr(outlets, "PATIENCE", 0.01)
    outlet = Outlet(pipe[0], Recorder(), Kind.REPLY, limit=10)
    for n in range(5):
        outlet.send((bytes([n]) * 100,))
    assert [receive(pipe[1], 100) for _ in range(5)] == [bytes([n]) * 100 for n in range(5)]
    outlet.close()


def test_beyond_its_limit_a_backlog_makes_the_sender_wait(pipe, patient):
    outlet = Outlet(pipe[0], Recorder(), Kind.REPLY, limit=1000)
    sent = threading.Semaphore(0)

    def send() -> None:
        for n in range(30):
            outlet.send((bytes([n]) * 100,))
            sent.release()

    side = Side(send)
    # 64 bytes are in the pipe, and the last message that may pass goes above the limit
    for _ in range(11):
        assert sent.acquire(timeout=10)
    wait_until(lambda: outlet._size > 1000)
    assert side.running and not sent.acquire(blocking=False)
    for n in range(30):
        assert receive(pipe[1], 100) == bytes([n]) * 100
    side.join()
    outlet.close()


def test_a_message_above_the_limit_passes(pipe):
    outlet = Outlet(pipe[0], Recorder(), Kind.REPLY, limit=10)
    outlet.send((bytes(5000),))
    side = Side(lambda: outlet.send((b"x",)))
    assert receive(pipe[1], 5001) == bytes(5000) + b"x"
    side.join()
    outlet.close()


@pytest.mark.parametrize("how", ["close", "break"])
def test_who_waits_for_room_is_let_go_at_the_end(pipe, how, patient):
    outlet = Outlet(pipe[0], Recorder(), Kind.REPLY, limit=10)
    outlet.send((bytes(500),))
    side = Side(lambda: outlet.send((b"x",)))
    wait_until(lambda: side.running)
    outlet.close() if how == "close" else pipe[1].close()
    side.join()
    wait_until(lambda: outlet.broken)
    outlet.send((b"dropped without a word",))
    assert outlet.drain(0)


def test_a_connection_that_is_gone_is_noticed_by_the_first_message(pipe, outlet):
    pipe[1].close()
    outlet.send((b"x",))
    assert outlet.broken
