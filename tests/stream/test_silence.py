"""A peer that says nothing: when it is lost, and what counts as a sign of life."""

from __future__ import annotations

import pytest

from caravan.errors import CaravanError, TransportTimeout, WorkerLost
from caravan.stream.ticket import Ticket
from caravan.stream.watchdog import Watchdog
from caravan.wire import codec
from caravan.wire.commands import BASE_7, Base
from stream.scripted import GET, RECOMPUTE, Rig, make_rig
from wired import PATIENCE, Side, wait_until


def pass_time(rig: Rig, clock, seconds: float, step: float = 0.5) -> None:
    """Let time pass as a watchdog would see it."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += step
        rig.stream.tick(clock.now)


def round_trip(rig: Rig) -> None:
    ticket = rig.get(1)
    rig.peer.reply(rig.peer.request("GET"), b"x")
    ticket.wait(PATIENCE)


def base_get(rig: Rig, size: int = 4) -> Ticket:
    row = BASE_7[Base.GET_TENSOR]
    ticket = Ticket(row.name, size)
    rig.stream.post(row, [row.request.pack(bytes(296), 0, size)], ticket)
    return ticket


@pytest.mark.parametrize("protocol", ["ext", "7"])
def test_a_silent_peer_is_lost_after_the_timeout(clock, open_rig, protocol):
    rig = open_rig(protocol)
    row = GET if protocol == "ext" else BASE_7[Base.GET_MAX_SIZE]
    tickets = [Ticket(row.name, 4) for _ in range(2)]
    for ticket in tickets:
        rig.stream.post(row, [bytes(row.request.size)], ticket)
    pass_time(rig, clock, 29)
    assert rig.stream.lost is None
    pass_time(rig, clock, 2)
    for ticket in tickets:
        with pytest.raises(WorkerLost, match="no sign of life for 30 s"):
            ticket.wait(PATIENCE)
    assert isinstance(rig.stream.lost.cause, TransportTimeout)
    assert rig.stream.lost.command == row.name


def test_an_idle_peer_may_be_silent_for_ever(clock, rig):
    round_trip(rig)
    pass_time(rig, clock, 10_000, 100)
    assert rig.stream.lost is None
    round_trip(rig)


@pytest.mark.parametrize("protocol", ["ext", "7"])
def test_silence_counts_from_the_question_not_from_the_idle_hour(clock, open_rig, protocol):
    rig = open_rig(protocol)
    clock.now += 3600
    base_get(rig)
    rig.stream.tick(clock.now + 1)
    assert rig.stream.lost is None


def test_silence_counts_from_the_question_also_behind_another_stream(clock, open_rig):
    rig = open_rig()
    clock.now += 3600
    rig.set(Ticket("GET", 4))
    rig.get(4)
    rig.stream.tick(clock.now + 1)
    assert rig.stream.lost is None


def test_silence_counts_from_the_question_also_when_the_pipe_is_full(clock, open_rig):
    rig = open_rig(capacity=0)
    clock.now += 3600
    rig.set(b"x")
    rig.stream.tick(clock.now + 1)
    assert rig.stream.lost is None


def test_a_peer_that_takes_nothing_is_lost(clock, open_rig):
    rig = open_rig(capacity=0)
    rig.set(b"x")
    pass_time(rig, clock, 29)
    assert rig.stream.lost is None
    pass_time(rig, clock, 2)
    assert isinstance(rig.stream.lost.cause, TransportTimeout)
    assert rig.stream.lost.command == "SET"


def test_a_peer_that_takes_little_is_not_lost(clock, open_rig):
    rig = open_rig(capacity=10)
    rig.set(b"x" * 1000)
    for _ in range(20):
        pass_time(rig, clock, 20)
        taken = rig.stream.bytes_sent
        rig.peer.reader.read(10)
        wait_until(lambda before=taken: rig.stream.bytes_sent > before)
    assert rig.stream.lost is None


def test_corked_commands_are_nobodys_debt(clock, rig):
    rig.set(b"x", cork=True)
    pass_time(rig, clock, 1000)
    assert rig.stream.lost is None


def test_a_part_of_a_long_reply_is_a_sign_of_life(clock, rig):
    size = 2 << 20
    ticket = rig.get(size)
    rig.peer.request()
    rig.peer.raw(codec.ext_frame(69, 1, size))
    reader = rig.stream._reader
    for part in range(16):
        rig.peer.raw(bytes([part]) * (size // 16))
        wait_until(lambda n=16 + (part + 1) * (size // 16): reader.received >= n)
        pass_time(rig, clock, 20)
        assert rig.stream.lost is None
    assert ticket.wait(PATIENCE) == b"".join(bytes([p]) * (size // 16) for p in range(16))


def test_ping_asks_for_a_sign_of_life(clock, rig):
    rig.get(4)
    rig.peer.request("GET")
    pass_time(rig, clock, 9)
    rig.stream.tick(clock.now)
    assert len(rig.near.sends) == 1
    pass_time(rig, clock, 15)
    ping = rig.peer.request("PING")
    assert ping.payload == b""
    # once, as long as it is not answered
    assert len(rig.near.sends) == 2
    assert rig.stream.lost is None


def test_pongs_keep_a_working_peer(clock, rig):
    ticket = rig.get(4)
    get = rig.peer.request("GET")
    for _ in range(20):
        pass_time(rig, clock, 12)
        received = rig.stream._reader.received
        rig.peer.reply(rig.peer.request("PING"))
        wait_until(lambda n=received: rig.stream._reader.received == n + 16)
        wait_until(lambda: not rig.stream._pinged)
    assert rig.stream.lost is None
    rig.peer.reply(get, b"done")
    assert ticket.wait(PATIENCE) == b"done"


def test_a_peer_that_stops_answering_pings_is_lost(clock, rig):
    ticket = rig.get(4)
    rig.peer.request("GET")
    pass_time(rig, clock, 12)
    rig.peer.reply(rig.peer.request("PING"))
    wait_until(lambda: not rig.stream._pinged)
    pass_time(rig, clock, 29)
    assert rig.stream.lost is None
    pass_time(rig, clock, 13)
    with pytest.raises(WorkerLost, match="GET: no sign of life"):
        ticket.wait(PATIENCE)


def test_ping_goes_before_what_waits_for_another_stream(clock, rig):
    rig.get(4)
    rig.set(Ticket("GET", 4))
    rig.get(4)
    rig.peer.request("GET")
    pass_time(rig, clock, 12)
    rig.peer.reply(rig.peer.request("PING"))


def test_ping_does_not_cut_into_a_message(clock, rig):
    rig.near.set_capacity(20)
    ticket = rig.get(4)
    rig.set(b"x" * 100)
    clock.now += 11
    rig.stream.tick(clock.now)
    assert rig.peer.request("GET").seq == 1
    assert rig.peer.request("PING").seq == 0
    assert rig.peer.request("SET").payload[8:] == b"x" * 100
    assert not ticket.done


def test_a_base_peer_owes_nothing_that_waits_here_for_another_stream(clock, open_rig):
    rig = open_rig("7")
    other = Ticket("GET", 4)
    row = BASE_7[Base.SET_TENSOR]
    rig.stream.post(row, [row.request.pack(bytes(296), 0, 0), other])
    ticket = base_get(rig)
    pass_time(rig, clock, 1000)
    assert rig.stream.lost is None
    other.resolve(b"data")
    pass_time(rig, clock, 29)
    assert rig.stream.lost is None
    pass_time(rig, clock, 2)
    with pytest.raises(WorkerLost):
        ticket.wait(PATIENCE)


def test_a_base_peer_still_owes_what_it_was_asked_before(clock, open_rig):
    """Or two dead servers, each waiting for the other's bytes, would wait for ever."""
    rig = open_rig("7")
    ticket = base_get(rig)
    row = BASE_7[Base.SET_TENSOR]
    rig.stream.post(row, [row.request.pack(bytes(296), 0, 0), Ticket("GET", 4)])
    pass_time(rig, clock, 31)
    with pytest.raises(WorkerLost):
        ticket.wait(PATIENCE)


def test_a_lost_or_closed_stream_is_left_alone(clock, rig):
    rig.get(4)
    rig.stream.fail(CaravanError("first"), "GET")
    pass_time(rig, clock, 100)
    assert str(rig.stream.lost.cause) == "first"


# an idle stream whose peer is watched, and watches


def test_an_idle_peer_that_is_watched_is_asked_for_a_sign_of_life(clock, rig):
    rig.stream.keep_alive = True
    pass_time(rig, clock, 11)
    rig.peer.reply(rig.peer.request("PING"))
    wait_until(lambda: not rig.stream._pinged)
    pass_time(rig, clock, 29)
    assert rig.stream.lost is None
    pass_time(rig, clock, 13)
    assert "during send: no sign of life for 30 s" in str(rig.stream.lost)


def test_a_peer_with_little_patience_hears_more_often(clock, open_rig):
    rig = open_rig(timeout=3000.0)
    rig.stream.keep_alive, rig.stream.allowance = True, 12.0
    for _ in range(3):
        pass_time(rig, clock, 3.5)
        assert rig.peer.transport.wait_readable(0.0) is False
        pass_time(rig, clock, 1.5)
        rig.peer.reply(rig.peer.request("PING"))
        wait_until(lambda: not rig.stream._pinged)


def test_what_is_sent_anyway_is_a_sign_of_life_to_it(clock, open_rig):
    rig = open_rig(timeout=3000.0)
    rig.stream.keep_alive, rig.stream.allowance = True, 12.0
    for _ in range(5):
        pass_time(rig, clock, 3.5)
        rig.set(b"x")
        assert rig.peer.request().name == "SET"


def test_the_watchdog_looks_often_enough_for_it(open_rig):
    dog = Watchdog(300.0)
    try:
        rig = open_rig(timeout=300.0)
        rig.stream.keep_alive, rig.stream.allowance = True, 0.6
        dog.watch(rig.stream)
        # the watchdog's first look is a second away, since it knew nothing of that
        rig.peer.reply(rig.peer.request("PING"))
        rig.peer.reply(rig.peer.request("PING"))
    finally:
        dog.close()


# with real time


@pytest.fixture
def watchdog():
    dog = Watchdog(0.3)
    yield dog
    dog.close()


@pytest.mark.parametrize("protocol", ["ext", "7"])
def test_the_watchdog_notices_a_silent_peer(watchdog, open_rig, protocol):
    rig = open_rig(protocol, timeout=0.3)
    watchdog.watch(rig.stream)
    row = GET if protocol == "ext" else BASE_7[Base.GET_MAX_SIZE]
    ticket = Ticket(row.name, 4)
    rig.stream.post(row, [bytes(row.request.size)], ticket)
    with pytest.raises(WorkerLost, match=r"no sign of life for 0\.3 s"):
        ticket.wait(PATIENCE)


def test_the_watchdog_frees_a_caller_whose_peer_takes_nothing(watchdog, open_rig):
    rig = open_rig(timeout=0.3, capacity=0)
    watchdog.watch(rig.stream)
    Side(lambda: rig.set(b"x" * 100, wait_sent=True)).join()
    assert rig.stream.lost is not None


def test_the_watchdog_keeps_a_peer_that_pongs(open_rig):
    # long enough for a busy machine to answer in time, and the reply takes longer than that
    dog = Watchdog(1.5)
    rig = open_rig(timeout=1.5)
    dog.watch(rig.stream)
    ticket = rig.get(4)
    get = rig.peer.request("GET")
    for _ in range(4):
        rig.peer.reply(rig.peer.request("PING"))
    rig.peer.reply(get, b"done")
    assert ticket.wait(PATIENCE) == b"done"
    dog.close()


def test_the_watchdog_goes_on_after_a_stream_has_ended(watchdog):
    gone = make_rig(timeout=0.3)
    watchdog.watch(gone.stream)
    gone.take_leave()
    wait_until(lambda: gone.stream not in watchdog._streams)
    rig = make_rig(timeout=0.3)
    watchdog.watch(rig.stream)
    rig.stream.post(RECOMPUTE, [RECOMPUTE.request.pack(1)], Ticket("FENCE", 0))
    wait_until(lambda: rig.stream.lost)
    rig.take_leave()


def test_the_watchdog_ends_its_thread():
    dog = Watchdog(30.0)
    thread = dog._thread
    assert thread.is_alive()
    dog.close()
    assert not thread.is_alive()
    dog.close()


def test_a_defect_in_the_watch_over_one_stream_leaves_the_others_watched(open_rig, monkeypatch):
    broken, other = open_rig("ext"), open_rig("ext")
    seen: list[float] = []
    monkeypatch.setattr(broken.stream, "tick", lambda now: 1 / 0)
    monkeypatch.setattr(other.stream, "tick", seen.append)
    dog = Watchdog(0.2)
    try:
        dog.watch(broken.stream)
        dog.watch(other.stream)
        wait_until(lambda: broken.stream.lost is not None)
        so_far = len(seen)
        wait_until(lambda: len(seen) > so_far + 2)
    finally:
        dog.close()


# this process stands still


@pytest.mark.parametrize("protocol", ["ext", "7"])
def test_who_stood_still_does_not_blame_its_peer(clock, open_rig, protocol):
    """The answer may have come meanwhile, and the watchdog be the first to run again."""
    rig = open_rig(protocol)
    ticket = rig.get(1) if protocol == "ext" else base_get(rig, 1)
    pass_time(rig, clock, 5)
    pass_time(rig, clock, 3600, 3600)
    assert rig.stream.lost is None
    rig.peer.reply(rig.peer.request(), b"x")
    assert ticket.wait(PATIENCE) == b"x"


def test_nor_does_it_where_nothing_is_owed(clock, rig):
    rig.stream.keep_alive = True
    pass_time(rig, clock, 5)
    pass_time(rig, clock, 3600, 3600)
    assert rig.stream.lost is None
    pass_time(rig, clock, 1)
    assert rig.peer.request().name == "PING"


def test_a_peer_that_is_silent_after_that_is_lost_all_the_same(clock, rig):
    ticket = rig.get(1)
    pass_time(rig, clock, 3600, 3600)
    pass_time(rig, clock, 14)
    assert rig.stream.lost is None
    pass_time(rig, clock, 3)
    with pytest.raises(WorkerLost, match="no sign of life for 30 s"):
        ticket.wait(PATIENCE)
