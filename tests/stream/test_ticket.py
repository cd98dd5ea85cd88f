"""Tickets: settled once, whoever comes first."""

from __future__ import annotations

import threading
import traceback

import pytest

from caravan.errors import CaravanError, TransportTimeout
from caravan.stream.ticket import Ticket
from wired import PATIENCE, Side


def test_a_reply_is_kept():
    ticket = Ticket("GET", 3)
    assert not ticket.done
    ticket.resolve(b"abc")
    assert ticket.done
    assert ticket.wait() == ticket.data == b"abc"
    assert ticket.error is None


def test_a_failure_is_raised_by_every_wait():
    ticket, error = Ticket("GET", 3), CaravanError("no")
    ticket.fail(error)
    for _ in range(2):
        with pytest.raises(CaravanError) as caught:
            ticket.wait()
        assert caught.value is error
    ticket.settle()


def test_a_failure_does_not_keep_the_frames_of_all_who_were_told():
    ticket, error, depths = Ticket("GET", 3), CaravanError("no"), []
    ticket.fail(error)
    for _ in range(5):
        with pytest.raises(CaravanError):
            ticket.wait()
        depths.append(sum(1 for _ in traceback.walk_tb(error.__traceback__)))
    assert len(set(depths)) == 1


def test_a_wait_ends_when_it_is_told_to():
    ticket, asked = Ticket("GET", 3), []
    with pytest.raises(CaravanError, match="GET is not waited for any longer"):
        ticket.wait(stop=lambda: bool(asked) or asked.append(1))
    ticket.resolve(b"abc")
    assert ticket.wait(stop=lambda: True) == b"abc"


def test_a_failed_read_gives_zeros():
    target = bytearray(b"abcdef")
    ticket = Ticket("GET", 4, memoryview(target)[1:5])
    ticket.fail(CaravanError("no"))
    assert target == b"a\0\0\0\0f"
    assert ticket.take_target() is None


def test_only_the_first_settlement_counts():
    target = bytearray(b"read")
    ticket = Ticket("GET", 4, memoryview(target))
    ticket.resolve(b"")
    ticket.fail(CaravanError("late"))
    ticket.resolve(b"later")
    assert (target, ticket.error, ticket.data) == (b"read", None, b"")
    ticket = Ticket("GET", 4)
    ticket.fail(CaravanError("first"))
    ticket.resolve(b"data")
    assert ticket.data == b""
    assert str(ticket.error) == "first"


def test_waits_in_other_threads_end():
    ticket = Ticket("GET", 1)
    sides = [Side(ticket.wait) for _ in range(4)] + [Side(ticket.settle)]
    ticket.resolve(b"x")
    assert [side.join() for side in sides] == [b"x"] * 4 + [None]


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_a_bounded_wait(timeout):
    with pytest.raises(TransportTimeout, match="no answer to GET within"):
        Ticket("GET", 1).wait(timeout)


def test_on_done_before_and_after():
    ticket, calls = Ticket("GET", 1), []
    ticket.on_done(lambda: calls.append((1, ticket.done)))
    assert calls == []
    ticket.resolve(b"x")
    assert calls == [(1, True)]
    ticket.on_done(lambda: calls.append((2, ticket.done)))
    assert calls == [(1, True), (2, True)]


def test_on_done_of_a_failure():
    ticket, calls = Ticket("GET", 1), []
    ticket.on_done(lambda: calls.append(ticket.error))
    error = CaravanError("no")
    ticket.fail(error)
    assert calls == [error]


def test_settled_from_many_threads_at_once():
    for _ in range(50):
        target = bytearray(8)
        ticket = Ticket("GET", 8, memoryview(target))
        calls: list[int] = []
        ticket.on_done(lambda calls=calls: calls.append(1))
        sides = [
            *(Side(lambda t=ticket: t.resolve(b"x")) for _ in range(2)),
            *(Side(lambda t=ticket: t.fail(CaravanError("no"))) for _ in range(2)),
        ]
        for side in sides:
            side.join()
        assert calls == [1]
        assert (ticket.error is None) == (ticket.data == b"x")


def test_a_caller_who_gives_up_gets_zeros_for_good():
    target = bytearray(b"old")
    ticket = Ticket("GET", 3, memoryview(target))
    ticket.settle(lambda: True)
    assert target == bytes(3)
    assert not ticket.done
    assert ticket.take_target() is None
    ticket.resolve(b"new")
    assert (ticket.wait(), target) == (b"new", bytes(3))


def test_a_caller_goes_on_waiting_until_told_to_stop():
    ticket, asked = Ticket("GET", 3, memoryview(bytearray(3))), threading.Event()

    def stop() -> bool:
        asked.set()
        return False

    side = Side(lambda: ticket.settle(stop))
    assert asked.wait(PATIENCE)
    assert side.running
    ticket.resolve(b"")
    side.join()


def test_memory_that_is_being_filled_is_not_given_up():
    target = bytearray(b"old")
    ticket = Ticket("GET", 3, memoryview(target))
    assert ticket.take_target() is not None
    ticket.abandon()
    assert target == b"old"


def test_repr_shows_the_state():
    ticket = Ticket("GET", 7)
    ticket.seq = 3
    assert repr(ticket) == "<Ticket GET #3 7 B waiting>"
    ticket.fail(CaravanError("no"))
    assert "failed" in repr(ticket)
