"""Ways of copies, with scripted peers: when they open, what is posted, who is lost with whom."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from caravan.errors import CaravanError, RemoteError, WorkerLost
from caravan.stream import dispatcher
from caravan.stream.base_link import BaseLink
from caravan.stream.ext_link import ExtLink
from caravan.stream.reach import Reach
from caravan.stream.routes import Path, Route
from caravan.transport.endpoint import Endpoint
from caravan.wire.commands import EXT, Ext
from caravan.wire.dtypes import WireType
from caravan.wire.extension import Status
from caravan.wire.versions import V8
from stream.scripted import Request, Rig
from stream.test_links import BASE, INFO, Tensor, base_link, u32, u64
from wired import PATIENCE, Side, wait_until

SRC, DST = Tensor(1), Tensor(2)


class Device:
    """A device with a scripted peer."""

    def __init__(self, rig: Rig, link: ExtLink | BaseLink) -> None:
        self.rig = rig
        self.link = link
        self.stream = rig.stream
        self.peer = rig.peer

    def parcel(self, name: str) -> tuple[int, int]:
        """Route and ticket of the next request, a PUSH or TAKE of 9 bytes."""
        route, dtype, ticket, address, size = EXT[Ext[name]].request.unpack(
            self.peer.request(name).payload
        )
        assert (dtype, address, size) == (0, BASE + 64 * (1 if name == "PUSH" else 2), 9)
        return route, ticket

    def fence(self) -> None:
        """A round trip."""
        ticket = self.rig.get(1)
        self.peer.reply(self.peer.request("GET"), b"x")
        ticket.wait(PATIENCE)


@pytest.fixture
def device(open_rig) -> Callable[..., Device]:
    def make(name: str, reach: Reach, index: int = 0, **options) -> Device:
        rig = open_rig(device=name, **options)
        # as a session does
        rig.stream.keep_alive = True
        return Device(rig, ExtLink(rig.stream, INFO, index, V8, reach))

    return make


def reach(number: int) -> Reach:
    return Reach(Endpoint(f"lab{number}", 50052), f"key {number}", (f"10.0.0.{number}:50052",))


@pytest.fixture
def a(device) -> Device:
    return device("RPC0", reach(1))


@pytest.fixture
def b(device) -> Device:
    return device("RPC1", reach(2), index=4)


@pytest.fixture
def two(device) -> tuple[Device, Device]:
    """Two devices of one session."""
    shared = reach(1)
    return device("RPC0", shared, 0), device("RPC1", shared, 1)


def copy(route: Route) -> None:
    route.copy(SRC, DST, 9)


def relayed(one: Device, other: Device) -> None:
    """The next copy comes by way of the head."""
    request = one.peer.request("GET")
    assert request.payload == u64(BASE + 64, 9)
    one.peer.reply(request, b"nine byte")
    post_sets(other)
    assert other.peer.request("SET").payload == u64(BASE + 128) + b"nine byte"


def post_sets(made: Device) -> None:
    """Have the device's small writes sent, as the next graph would."""
    made.link._post_sets()
    made.stream.flush()


def answer(one: Device, nanoseconds: int = 1_500_000) -> Request:
    """Answer PEER_OPEN, and wait until it has been heard."""
    request = one.peer.request("PEER_OPEN")
    one.peer.reply(request, u64(nanoseconds))
    return request


def opened(one: Device, other: Device) -> Route:
    """A direct route between two workers."""
    route = Route(one.link, other.link)
    route.open()
    answer(one)
    assert route.settle() is Path.DIRECT
    return route


def cast(one: Device, other: Device, dtype: int = 1) -> bytes:
    """The next copy of 8 bytes comes by way of the head, at half its size."""
    request = one.peer.request("GET_CAST")
    assert request.payload == u64(BASE + 64, 8) + u32(dtype)
    one.peer.reply(request, b"half")
    other.stream.flush()
    return other.peer.request("SET_CAST").payload


def test_a_copy_within_a_session_is_not_converted(two):
    one, other = two
    Route(one.link, other.link).copy(SRC, DST, 9, WireType.F16)
    other.stream.flush()
    assert one.parcel("PUSH") == other.parcel("TAKE")


def test_copies_between_workers_are_converted_on_every_path(a, b):
    route = Route(a.link, b.link)
    route.copy(SRC, DST, 8, WireType.F16)
    request = a.peer.request("PEER_OPEN")
    # until the way stands, too: the numbers must not depend on when that is
    assert cast(a, b) == u64(BASE + 128) + u32(1) + b"half"
    a.peer.reply(request, u64(1))
    assert route.settle() is Path.DIRECT
    route.copy(SRC, DST, 8, WireType.BF16)
    b.stream.flush()
    push, take = a.peer.request("PUSH").payload, b.peer.request("TAKE").payload
    assert push[4:8] == take[4:8] == u32(2)
    assert push[24:] == take[24:] == u64(8)


def test_a_copy_to_a_llama_server_is_not_converted(a, open_rig):
    rig = open_rig("8", device="RPC1")
    link = base_link(rig, V8)
    Route(a.link, link).copy(SRC, DST, 9, WireType.F16)
    request = a.peer.request("GET")
    a.peer.reply(request, b"nine byte")
    link.stream.flush()
    assert rig.peer.request("SET_TENSOR").payload.endswith(b"nine byte")


# within a session


def test_two_devices_of_a_session_need_no_opening(two):
    one, other = two
    route = Route(one.link, other.link)
    assert (route.path, route.settle(), route.round_trip) == (Path.DIRECT, Path.DIRECT, None)
    copy(route)
    copy(route)
    pushes = [one.parcel("PUSH"), one.parcel("PUSH")]
    other.stream.flush()
    takes = [other.parcel("TAKE"), other.parcel("TAKE")]
    assert pushes == takes
    assert [number for number, _ in pushes] == [0, 0]
    assert pushes[0][1] < pushes[1][1]


def test_tickets_are_never_used_twice(two):
    one, other = two
    for route in (Route(one.link, other.link), Route(one.link, other.link)):
        copy(route)
        copy(route)
    seen = {one.parcel("PUSH") for _ in range(4)}
    assert len(seen) == 4


def test_a_push_leaves_at_once_and_a_small_take_with_what_follows(two):
    one, other = two
    copy(Route(one.link, other.link))
    assert len(one.rig.near.sends) == 1
    assert other.rig.near.sends == []
    other.rig.get(1)
    assert [other.peer.request().name for _ in range(2)] == ["TAKE", "GET"]
    assert len(other.rig.near.sends) == 1


def test_a_take_of_much_leaves_at_once(two):
    one, other = two
    Route(one.link, other.link).copy(SRC, DST, 1 << 20)
    assert len(other.rig.near.sends) == 1


def test_what_was_written_before_is_there_before_it_is_pushed_or_taken(two):
    one, other = two
    route = Route(one.link, other.link)
    for made in two:
        made.link.set_tensor(SRC, 0, b"before")
    copy(route)
    for made in two:
        made.link.set_tensor(SRC, 0, b"after")
        made.rig.get(1)
        post_sets(made)
    assert [one.peer.request().name for _ in range(4)] == ["SET", "PUSH", "GET", "SET"]
    assert [other.peer.request().name for _ in range(4)] == ["SET", "TAKE", "GET", "SET"]


# between workers


def test_the_first_copies_are_relayed_while_the_way_opens(a, b):
    route = Route(a.link, b.link)
    assert route.path is Path.UNKNOWN
    copy(route)
    assert route.path is Path.OPENING
    request = a.peer.request("PEER_OPEN")
    number = json.loads(request.payload)["route"]
    assert json.loads(request.payload) == {
        "route": number,
        "addresses": ["10.0.0.2:50052", "lab2:50052"],
        "key": "key 2",
        "device": 4,
    }
    relayed(a, b)
    copy(route)
    relayed(a, b)
    a.peer.reply(request, u64(1_500_000))
    assert route.settle() is Path.DIRECT
    assert (route.round_trip, route.reason) == (0.0015, "")
    copy(route)
    b.stream.flush()
    push, take = a.parcel("PUSH"), b.parcel("TAKE")
    assert push == take
    assert push[0] == number > 0


def test_what_is_still_relayed_comes_before_what_is_taken(a, b):
    route = Route(a.link, b.link)
    copy(route)
    request, get = a.peer.request("PEER_OPEN"), a.peer.request("GET")
    a.peer.reply(request, u64(1))
    assert route.settle() is Path.DIRECT
    copy(route)
    # the push is on its way, but the bytes of the first copy are not there yet
    a.parcel("PUSH")
    b.rig.get(1)
    assert b.rig.near.sends == []
    a.peer.reply(get, b"nine byte")
    assert [b.peer.request().name for _ in range(3)] == ["SET", "TAKE", "GET"]


def test_a_way_is_asked_for_once(a, b):
    route = Route(a.link, b.link)
    for _ in range(3):
        route.open()
        copy(route)
    assert [a.peer.request().name for _ in range(4)] == ["PEER_OPEN", "GET", "GET", "GET"]


def test_ways_have_different_numbers(a, b):
    for one, other in ((a, b), (a, b), (b, a)):
        Route(one.link, other.link).open()
    numbers = [json.loads(d.peer.request("PEER_OPEN").payload)["route"] for d in (a, a, b)]
    assert len(set(numbers)) == 3


def test_settling_waits_for_the_answer(a, b):
    route = Route(a.link, b.link)
    side = Side(route.settle)
    request = a.peer.request("PEER_OPEN")
    assert side.running
    a.peer.reply(request, u64(1))
    assert side.join() is Path.DIRECT


def test_settling_does_not_depend_on_who_hears_of_it_first(a, b):
    route = Route(a.link, b.link)
    route.open()
    # as if the receiver, which has the answer, had not come to tell the route
    route._opened._waiters.clear()
    answer(a)
    assert route.settle() is Path.DIRECT


def test_a_refusal_is_the_relay_for_good(a, b):
    route = Route(a.link, b.link)
    route.open()
    request = a.peer.request("PEER_OPEN")
    a.peer.reply(request, b"10.0.0.2:50052: connection refused", Status.PEER_LOST)
    assert route.settle() is Path.RELAY
    assert route.reason == "10.0.0.2:50052: connection refused"
    assert "RPC0 to RPC1: relay" in repr(route)
    for _ in range(2):
        copy(route)
        relayed(a, b)
    assert a.stream.lost is None


def test_a_source_that_is_lost_while_the_way_opens(a, b):
    route = Route(a.link, b.link)
    route.open()
    a.peer.close()
    assert route.settle() is Path.RELAY
    assert "lost RPC0" in route.reason
    copy(route)
    post_sets(b)
    lost_with(a, b)


def test_no_address_that_leads_there(device, a):
    here = device("RPC1", Reach(Endpoint("127.0.0.1", 5), "key", ("127.0.0.1:5",)))
    route = Route(a.link, here.link)
    assert route.settle() is Path.RELAY
    assert route.reason == "127.0.0.1:5 is an address for this machine alone"
    copy(route)
    relayed(a, here)
    # the other direction has no such trouble
    Route(here.link, a.link).open()
    here.peer.request("PEER_OPEN")


@pytest.mark.parametrize("which", ["one", "other", "both"])
def test_direct_copies_can_be_off(device, which):
    one = device("RPC0", replace(reach(1), direct=which == "other"))
    other = device("RPC1", replace(reach(2), direct=which == "one"))
    route = Route(one.link, other.link)
    assert (route.settle(), route.reason) == (Path.RELAY, "direct copies are off")
    copy(route)
    relayed(one, other)


def test_what_stays_in_a_worker_is_not_concerned(device):
    session = replace(reach(1), direct=False)
    one, other = device("RPC0", session), device("RPC1", session, index=1)
    assert Route(one.link, other.link).settle() is Path.DIRECT


@pytest.mark.parametrize("kinds", [("ext", "8"), ("8", "ext"), ("8", "8")])
def test_base_servers_are_relayed(open_rig, kinds):
    made = []
    for number, kind in enumerate(kinds):
        rig = open_rig(kind, device=f"RPC{number}")
        link = ExtLink(rig.stream, INFO, 0, V8, reach(number))
        made.append(Device(rig, link if kind == "ext" else base_link(rig, V8)))
    one, other = made
    route = Route(one.link, other.link)
    assert route.settle() is Path.RELAY
    assert route.reason == "a llama.cpp server has no direct copies"
    copy(route)
    if kinds[0] == "ext":
        one.peer.reply(one.peer.request("GET"), b"nine byte")
    else:
        request = one.peer.request("GET_TENSOR")
        assert request.payload == b"\1" * 296 + u64(0, 9)
        one.peer.reply(request, b"nine byte")
    if kinds[1] == "ext":
        post_sets(other)
        assert other.peer.request("SET").payload == u64(BASE + 128) + b"nine byte"
    else:
        other.stream.flush()
        assert other.peer.request("SET_TENSOR").payload[:296] == b"\2" * 296


# who is lost with whom


def lost_with(*devices: Device) -> None:
    """All of them with the first one's error."""
    first = devices[0].stream
    for made in devices:
        wait_until(lambda stream=made.stream: stream.lost)
        assert made.stream.lost is first.lost


def test_who_waits_for_a_lost_source_is_lost_with_its_cause(a, b):
    route = opened(a, b)
    copy(route)
    logits = b.rig.get(1)
    a.peer.close()
    with pytest.raises(WorkerLost) as caught:
        logits.wait(PATIENCE)
    assert caught.value.device == "RPC0"
    lost_with(a, b)


def test_within_a_session_too(two):
    one, other = two
    copy(Route(one.link, other.link))
    one.stream.fail(CaravanError("the graphics card fell out"), "GRAPH_COMPUTE")
    lost_with(one, other)


def test_who_has_what_it_waited_for_is_not_lost(a, b):
    route = opened(a, b)
    copy(route)
    b.stream.flush()
    b.parcel("TAKE")
    b.fence()
    a.peer.close()
    wait_until(lambda: a.stream.lost)
    wait_until(lambda: not a.stream._threads[0].is_alive())
    assert b.stream.lost is None
    b.fence()


def test_an_answer_to_something_earlier_says_nothing_of_the_copy(a, b):
    route = opened(a, b)
    earlier = b.rig.get(1)
    copy(route)
    b.stream.flush()
    b.peer.reply(b.peer.request("GET"), b"x")
    earlier.wait(PATIENCE)
    a.peer.close()
    lost_with(a, b)


def test_an_answer_aside_says_nothing_of_the_copy(a, b):
    back = Route(b.link, a.link)
    route = opened(a, b)
    copy(route)
    back.open()
    b.parcel("TAKE")
    answer(b)
    assert back.settle() is Path.DIRECT
    a.peer.close()
    lost_with(a, b)


def test_who_has_copied_nothing_is_not_lost(a, b):
    opened(a, b)
    a.peer.close()
    wait_until(lambda: a.stream.lost)
    wait_until(lambda: not a.stream._threads[0].is_alive())
    b.fence()


def test_a_copy_from_a_source_that_was_lost_before(a, b):
    route = opened(a, b)
    a.peer.close()
    wait_until(lambda: not a.stream._threads[0].is_alive())
    assert b.stream.lost is None
    copy(route)
    lost_with(a, b)


def test_a_source_that_is_lost_between_push_and_take(a, b, monkeypatch):
    route = opened(a, b)

    def push(*arguments: object) -> None:
        a.stream.fail(CaravanError("just now"), "PUSH")
        a.stream._threads[0].join(PATIENCE)

    monkeypatch.setattr(a.link, "push", push)
    copy(route)
    lost_with(a, b)


def test_a_chain_is_lost_with_its_first_link(device, a, b):
    c = device("RPC2", reach(3))
    first, second = opened(a, b), opened(b, c)
    copy(first)
    copy(second)
    logits = c.rig.get(1)
    a.peer.close()
    with pytest.raises(WorkerLost) as caught:
        logits.wait(PATIENCE)
    assert caught.value.device == "RPC0"
    lost_with(a, b, c)


def test_a_ring_is_lost_and_ends(device, a, b):
    c = device("RPC2", reach(3))
    ring = [opened(a, b), opened(b, c), opened(c, a)]
    for _ in range(3):
        for route in ring:
            copy(route)
    for side in [Side(made.peer.close) for made in (a, b, c)]:
        side.join()
    for made in (a, b, c):
        wait_until(lambda stream=made.stream: stream.lost)


def test_the_loss_of_the_taker_does_not_concern_the_source(a, b):
    route = opened(a, b)
    copy(route)
    b.peer.close()
    wait_until(lambda: b.stream.lost)
    copy(route)
    assert [a.peer.request().name for _ in range(2)] == ["PUSH", "PUSH"]
    a.fence()


def broken_off(b: Device) -> None:
    """The worker answers its next TAKE with PEER_LOST."""
    b.stream.flush()
    b.peer.reply(b.peer.request("TAKE"), b"a copy from 10.0.0.1: closed", Status.PEER_LOST)


def test_a_copy_that_broke_off_is_blamed_on_the_source_that_was_lost(a, b):
    route = opened(a, b)
    copy(route)
    logits = b.rig.get(1)
    broken_off(b)
    assert not logits.done
    a.peer.close()
    with pytest.raises(WorkerLost) as caught:
        logits.wait(PATIENCE)
    assert caught.value.device == "RPC0"
    lost_with(a, b)


def test_a_copy_that_broke_off_between_workers_that_live(a, b, monkeypatch):
    monkeypatch.setattr(dispatcher, "_CAUSE_SECONDS", 0.05)
    route = opened(a, b)
    copy(route)
    logits = b.rig.get(1)
    broken_off(b)
    with pytest.raises(WorkerLost) as caught:
        logits.wait(PATIENCE)
    assert (caught.value.device, caught.value.command) == ("RPC1", "TAKE")
    assert isinstance(caught.value.cause, RemoteError)
    assert "a copy from 10.0.0.1: closed" in str(caught.value)
    a.parcel("PUSH")
    a.fence()


def test_closing_does_not_wait_for_the_reason_of_a_copy_that_broke_off(a, b, monkeypatch):
    monkeypatch.setattr(dispatcher, "_CAUSE_SECONDS", 10 * PATIENCE)
    copy(opened(a, b))
    broken_off(b)
    b.stream.close()
    assert b.stream.lost is None


# a stream that others wait for


def test_a_middle_one_that_froze_takes_along_who_waits_for_it(clock, device, a, b):
    c = device("RPC2", reach(3))
    routes = [opened(a, b), opened(b, c)]
    for route in routes:
        copy(route)
    logits = c.rig.get(1)
    for _ in range(20):
        clock.now += 2
        # the first and the last one answer
        a.stream._last_life = c.stream._last_life = clock.now
        for made in (a, b, c):
            made.stream.tick(clock.now)
    with pytest.raises(WorkerLost, match="no sign of life") as caught:
        logits.wait(PATIENCE)
    assert caught.value.device == "RPC1"
    lost_with(b, c)
    assert a.stream.lost is None


# has_answered


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**32 - 3])
def test_what_has_been_answered_is_known_by_number_also_when_it_wraps(rig, start):
    rig.stream._seq = rig.stream._due.answered = start
    first = rig.stream.post(EXT[Ext.CLEAR], [bytes(9)])
    assert not rig.stream.has_answered(first)
    tickets = [rig.get(1) for _ in range(4)]
    silent = rig.stream.post(EXT[Ext.CLEAR], [bytes(9)])
    rig.peer.request("CLEAR")
    for ticket in tickets:
        rig.peer.reply(rig.peer.request("GET"), b"x")
        ticket.wait(PATIENCE)
        assert rig.stream.has_answered(first)
        assert rig.stream.has_answered(ticket.seq)
        assert not rig.stream.has_answered(ticket.seq + 1)
        assert not rig.stream.has_answered(silent)


def test_numbers_of_the_wire():
    assert EXT[Ext.PUSH].request.pack(1, 0, 2, 3, 4) == u32(1, 0) + u64(2, 3, 4)
