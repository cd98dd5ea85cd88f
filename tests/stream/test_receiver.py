"""Who reads the replies: the receiver's thread, or whoever waits for one."""

from __future__ import annotations

import threading
import time

import pytest

from caravan import interrupt
from caravan.errors import TransportTimeout, UsageError, WorkerLost
from caravan.stream import receiver
from caravan.stream.receiver import check_poll
from caravan.stream.ticket import Ticket
from stream.scripted import Rig
from wired import PATIENCE, Side, wait_until


def resolved_by(ticket: Ticket) -> list[str]:
    """Filled with the name of the thread that settles it."""
    names: list[str] = []
    ticket._waiters.append(lambda: names.append(threading.current_thread().name))
    return names


def wait_on(ticket: Ticket, name: str = "waiting") -> Side:
    def wait() -> bytes | bytearray:
        threading.current_thread().name = name
        return ticket.wait()

    return Side(wait)


def being_read(rig: Rig) -> bool:
    return rig.stream._receiver._turn.locked()


def stays_away(rig: Rig) -> bool:
    """Whether the thread waits to be fetched."""
    return bool(rig.stream._receiver._look._cond._waiters)  # type: ignore[attr-defined]


def answer_to_a_waiter(rig: Rig) -> list[str]:
    """One reply that somebody waits for before it comes; who settled it."""
    ticket = rig.get(3)
    names = resolved_by(ticket)
    side = wait_on(ticket)
    request = rig.peer.request("GET")
    wait_until(lambda: being_read(rig))
    rig.peer.reply(request, b"abc")
    assert side.join() == b"abc"
    return names


def answered(rig: Rig) -> tuple[Ticket, list[str]]:
    """A reply that is on its way before anybody waits for it, and who settles it."""
    ticket = rig.get(3)
    names = resolved_by(ticket)
    rig.peer.reply(rig.peer.request(), b"abc")
    return ticket, names


@pytest.fixture
def aloof(monkeypatch) -> None:
    """Once somebody has read, the thread does not come by itself."""
    monkeypatch.setattr(receiver, "_LINGER", 3600.0)


def test_who_waits_reads(rig: Rig, aloof) -> None:
    for _ in range(3):
        assert answer_to_a_waiter(rig) == ["waiting"]


def test_the_thread_reads_for_who_does_not_wait(rig: Rig) -> None:
    ticket, names = answered(rig)
    wait_until(lambda: ticket.done)
    assert names[0].startswith("caravan-recv")


def test_the_thread_reads_for_the_main_thread(rig: Rig, aloof) -> None:
    """Ctrl-C could come out of the middle of a reply there."""
    answer_to_a_waiter(rig)
    ticket, names = answered(rig)
    assert ticket.wait(PATIENCE) == b"abc"
    assert names[0].startswith("caravan-recv")


def test_the_main_thread_reads_where_ctrl_c_is_held_back(rig: Rig, aloof) -> None:
    answer_to_a_waiter(rig)
    ticket, names = answered(rig)
    with interrupt.deferred():
        assert interrupt.shielded()
        assert ticket.wait(PATIENCE) == b"abc"
    assert not interrupt.shielded()
    assert names == ["MainThread"]


def test_who_waits_settles_what_comes_before(rig: Rig, aloof) -> None:
    first, second = rig.get(1), rig.get(2)
    side = wait_on(second)
    requests = [rig.peer.request() for _ in range(2)]
    rig.peer.reply(requests[0], b"a")
    wait_until(lambda: first.done)
    assert not second.done
    rig.peer.reply(requests[1], b"bc")
    assert side.join() == b"bc"


def test_two_wait_and_one_reads(rig: Rig, aloof) -> None:
    """The other one's reply comes when nobody reads any more but the thread."""
    first, second = rig.get(1), rig.get(2)
    one = wait_on(first)
    wait_until(lambda: being_read(rig))
    other = wait_on(second)
    requests = [rig.peer.request() for _ in range(2)]
    rig.peer.reply(requests[0], b"a")
    assert one.join() == b"a"
    rig.peer.reply(requests[1], b"bc")
    assert other.join() == b"bc"


def test_what_others_depend_on_fetches_the_thread(rig: Rig, aloof) -> None:
    answer_to_a_waiter(rig)
    wait_until(lambda: stays_away(rig))
    ticket, called = rig.get(3), threading.Event()
    ticket.on_done(called.set)
    rig.peer.reply(rig.peer.request(), b"abc")
    assert called.wait(PATIENCE)


def test_what_others_depend_on_fetches_the_thread_after_a_wait(rig: Rig, aloof) -> None:
    """Registered while somebody reads, due when that one has gone."""
    first, second = rig.get(1), rig.get(2)
    side = wait_on(first)
    wait_until(lambda: being_read(rig))
    called = threading.Event()
    second.on_done(called.set)
    requests = [rig.peer.request() for _ in range(2)]
    rig.peer.reply(requests[0], b"a")
    side.join()
    rig.peer.reply(requests[1], b"bc")
    assert called.wait(PATIENCE)


def test_the_thread_comes_back_by_itself(rig: Rig) -> None:
    """An error that nobody asked for is noticed though somebody has just read."""
    answer_to_a_waiter(rig)
    rig.set(b"x")
    request = rig.peer.request("SET")
    rig.peer.reply(request, b"no", status=1)
    wait_until(lambda: rig.stream.lost is not None)


def test_a_reply_that_somebody_has_read_too_far_is_not_forgotten(rig: Rig, aloof) -> None:
    """It lies in the reader's buffer, where no socket tells of it."""
    first, second = rig.get(1), rig.get(2)
    side = wait_on(first)
    requests = [rig.peer.request() for _ in range(2)]
    wait_until(lambda: being_read(rig))
    with rig.peer.transport._outgoing.changed:
        rig.peer.reply(requests[0], b"a")
        rig.peer.reply(requests[1], b"bc")
    assert side.join() == b"a"
    assert second.wait(PATIENCE) == b"bc"


def test_a_bounded_wait_ends(rig: Rig) -> None:
    ticket = rig.get(3)
    with pytest.raises(TransportTimeout):
        Side(lambda: ticket.wait(0.02)).join()
    rig.peer.reply(rig.peer.request(), b"abc")
    assert ticket.wait(PATIENCE) == b"abc"


def test_a_loss_while_somebody_reads(rig: Rig, aloof) -> None:
    ticket, mourned = rig.get(3), threading.Event()
    where: list[str] = []

    def mourn(loss: WorkerLost) -> None:
        where.append(threading.current_thread().name)
        mourned.set()

    rig.stream.on_loss(mourn)
    side = wait_on(ticket)
    wait_until(lambda: being_read(rig))
    rig.peer.close()
    with pytest.raises(WorkerLost, match="during GET"):
        side.join()
    assert mourned.wait(PATIENCE)
    assert where[0].startswith("caravan-recv")


def test_closing_while_somebody_reads(rig: Rig, aloof) -> None:
    side = wait_on(rig.get(3))
    wait_until(lambda: being_read(rig))
    rig.stream.close()
    with pytest.raises(Exception, match="was closed"):
        side.join()


def test_a_wait_that_is_stopped_leaves_the_reply_to_the_thread(rig: Rig) -> None:
    target = bytearray(b"...")
    ticket, stop = rig.get(3, memoryview(target)), threading.Event()
    side = Side(lambda: ticket.settle(stop.is_set))
    wait_until(lambda: being_read(rig))
    stop.set()
    side.join()
    rig.peer.reply(rig.peer.request(), b"abc")
    assert ticket.wait(PATIENCE) == b"abc"
    assert target == bytes(3)


def test_who_waits_in_slices_goes_on_reading(rig: Rig, aloof) -> None:
    ticket, stop = rig.get(3), threading.Event()
    names, slices = resolved_by(ticket), []

    def asked() -> bool:
        threading.current_thread().name = "waiting"
        slices.append(1)
        return stop.is_set()

    side = Side(lambda: ticket.settle(asked))
    request = rig.peer.request("GET")
    wait_until(lambda: len(slices) >= 2 and being_read(rig))
    assert not rig.stream._receiver._look.is_set()
    assert rig.stream._receiver._others_until > time.monotonic() + 60
    rig.peer.reply(request, b"abc")
    side.join()
    assert names == ["waiting"]


class Waits:
    """A transport that notes for how long it was to look without sleeping."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.spins: list[float] = []

    def wait_readable(self, timeout: float, spin: float = 0.0) -> bool:
        if threading.current_thread().name == "waiting":
            self.spins.append(spin)
        return self._inner.wait_readable(timeout)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def spins(rig: Rig) -> list[float]:
    waits = Waits(rig.near)
    rig.stream._receiver.wrap(waits)
    answer_to_a_waiter(rig)
    return waits.spins


@pytest.mark.parametrize(("level", "seconds"), [(0, 0.0), (50, 0.01), (100, 0.02)])
def test_how_long_is_looked_without_sleeping(rig: Rig, level: int, seconds: float) -> None:
    rig.stream.poll = level
    rig.stream._receiver._waited = 0.0
    assert spins(rig)[0] == pytest.approx(seconds)


def test_what_takes_longer_is_slept_for(rig: Rig) -> None:
    rig.stream._receiver._waited = 0.5
    assert spins(rig)[0] == 0.0


@pytest.mark.parametrize("level", [-1, 101])
def test_no_level(level: int) -> None:
    with pytest.raises(UsageError, match=r"0\.\.\.100"):
        check_poll(level)
