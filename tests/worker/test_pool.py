"""The pool of session processes, with processes that are none: how many are started, and when."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from typing import ClassVar

import pytest

from caravan.wire.extension import public_id
from caravan.worker import control, pool
from caravan.worker.pool import Pool
from wired import wait_until

READY = control.Ready(engine="0.0.0", protocol=8)


class Process:
    """Starts when the test says so, and ends when it is asked to."""

    made: ClassVar[list[Process]] = []

    def __init__(self, arguments: object, **options: object) -> None:
        self.row = None
        self.ready: control.Ready | None = None
        self.key = self.peer_key = self.farewell = ""
        self.connections: set[int] = set()
        self.gone = self.dismissed = False
        self.pid = len(self.made)
        self.control, self.other_end = socket.socketpair()
        self.made.append(self)

    def dismiss(self) -> None:
        self.dismissed = True

    def close(self) -> None:
        self.control.close()
        self.other_end.close()


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pool, "time", clock)
    return clock


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Process]]:
    monkeypatch.setattr(Process, "made", [])
    monkeypatch.setattr(pool, "SessionProcess", Process)
    yield Process.made
    for process in Process.made:
        process.close()


@pytest.fixture
def few(made: list[Process], clock: Clock) -> Iterator[Pool]:
    with selectors.DefaultSelector() as selector:
        few = Pool((), 16, selector, lambda connection: None)
        few.start_spare()
        yield few


def rounds(few: Pool, clock: Clock, waiting: int, seconds: float) -> list[object]:
    """So many clients wait, each of whom is looked after in every round; what the last ones got."""
    got: list[object] = []
    end = clock.now + seconds
    while clock.now < end:
        got = []
        for _ in range(waiting):
            got.append(few.session("", got.count(None))[0])
        clock.now += 0.02
        few.tend()
    return got


def test_clients_that_wait_long_have_one_process_each_started_for_them(few, made, clock):
    """On a machine that has no time to start them."""
    assert rounds(few, clock, 3, 60.0) == [None] * 3
    assert len(made) == 3
    assert not any(process.dismissed for process in made)
    for process in made:
        process.ready = READY
    assert set(rounds(few, clock, 3, 0.01)) == set(made)
    assert len(made) == 3


def test_no_more_are_started_than_there_may_be_sessions(few, made, clock):
    """However many wait; one is kept for the time when one of them has ended."""
    rounds(few, clock, 40, 1.0)
    assert len(made) == 16
    for process in made:
        process.ready = READY
    rounds(few, clock, 40, 5.0)
    assert few.sessions == 16
    assert len(made) == 17


def test_surplus_ones_are_let_go_when_nobody_wants_them(few, made, clock):
    rounds(few, clock, 3, 10.0)
    for process in made:
        process.ready = READY
    clock.now += 2.1
    for _ in range(5):
        few.tend()
    assert [process.dismissed for process in made].count(True) == 2
    assert few.spare is not None


def test_none_is_started_any_more_once_the_pool_is_closed(few, made, clock):
    made[0].ready = READY
    few.close()
    assert made[0].dismissed
    assert few.session("") == (None, "the worker is shutting down")
    few.start_spare()
    assert len(made) == 1


def test_one_that_talks_nonsense_is_killed_and_its_head_told_by_whom(monkeypatch, capfd):
    """Not: by a system that is short of memory."""

    def receive(talk: socket.socket) -> None:
        raise ValueError

    with selectors.DefaultSelector() as selector:
        strict = Pool(("--threads", "1"), 16, selector, lambda connection, why: None)
        strict.start_spare()
        process = strict.spare
        process.key = "k" * 32
        monkeypatch.setattr(control, "receive", receive)
        for key, _ in selector.select(60.0):
            key.data()
        wait_until(lambda: strict.tend() or strict.obituaries.find(public_id(process.key)))
        told = strict.obituaries.find(public_id(process.key))
    assert told.startswith("the session process was killed by the worker, since it talked nonsense")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"caravan worker: session process {process.pid} was killed by the worker"
    )
