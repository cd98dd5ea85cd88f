"""Bytes and events from one stream to another, without anybody waiting."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan.errors import CaravanError, ConnectionClosed, RemoteError, WorkerLost
from caravan.stream.ticket import Ticket
from caravan.wire.commands import Ext
from stream.scripted import ALLOC, GET, SET, Peer, Rig, make_rig
from wired import PATIENCE, Side, wait_until


@pytest.fixture
def a(open_rig) -> Rig:
    return open_rig(device="RPC0")


@pytest.fixture
def b(open_rig) -> Rig:
    return open_rig(device="RPC1")


def question(rig: Rig) -> Ticket:
    ticket = Ticket("ALLOC", 24, fatal=False)
    rig.stream.post(ALLOC, [ALLOC.request.pack(1)], ticket)
    return ticket


# bytes


def test_a_reply_that_has_come_is_sent_on_at_once(a, b):
    ticket = a.get(5)
    a.peer.reply(a.peer.request(), b"hello")
    ticket.wait(PATIENCE)
    b.set(ticket)
    assert b.near.sends == [16 + 8 + 5]
    assert b.peer.request("SET").payload[8:] == b"hello"


def test_a_reply_is_sent_on_when_it_comes(a, b):
    b.set(b"before")
    b.set(a.get(5))
    b.set(b"after")
    assert b.peer.request("SET").payload[8:] == b"before"
    assert len(b.near.sends) == 1
    a.peer.reply(a.peer.request("GET"), b"hello")
    assert b.peer.request("SET").payload[8:] == b"hello"
    assert b.peer.request("SET").payload[8:] == b"after"


def test_several_replies_in_one_message(a, b):
    first, second = a.get(3), a.get(2)
    b.stream.post(SET, [SET.request.pack(1), first, b"-", second])
    requests = [a.peer.request(), a.peer.request()]
    a.peer.reply(requests[0], b"abc")
    first.wait(PATIENCE)
    b.stream.flush()
    assert b.near.sends == []
    a.peer.reply(requests[1], b"de")
    assert b.peer.request("SET").payload[8:] == b"abc-de"


def test_a_chain_over_three(open_rig, a, b):
    c = open_rig(device="RPC2")
    b.set(a.get(4))
    c.set(b.get(4))
    a.peer.reply(a.peer.request("GET"), b"data")
    passed_on = b.peer.request("SET").payload[8:]
    b.peer.reply(b.peer.request("GET"), passed_on)
    assert c.peer.request("SET").payload[8:] == b"data"


def test_waiting_costs_one_note_however_much_is_posted(a, b):
    ticket = a.get(4)
    b.set(ticket)
    for _ in range(200):
        b.set(b"x")
        b.stream.flush()
    assert len(ticket._waiters) == 1
    a.peer.reply(a.peer.request(), b"data")
    assert b.peer.request("SET").payload[8:] == b"data"
    for _ in range(200):
        assert b.peer.request("SET").payload[8:] == b"x"


def test_wait_sent_waits_for_what_stands_before(a, b):
    b.set(a.get(4))
    side = Side(lambda: b.set(b"mine", wait_sent=True))
    wait_until(lambda: b.stream.commands == 2)
    assert side.running
    a.peer.reply(a.peer.request(), b"data")
    side.join()
    assert [b.peer.request().payload[8:] for _ in range(2)] == [b"data", b"mine"]


def lost_with_the_cause_of(a: Rig, b: Rig) -> None:
    ticket = b.get(1)
    with pytest.raises(WorkerLost) as caught:
        ticket.wait(PATIENCE)
    wait_until(lambda: a.stream.lost)
    assert caught.value is b.stream.lost is a.stream.lost
    assert caught.value.device == "RPC0"


def test_a_source_that_refuses_loses_both_with_its_cause(a, b):
    b.set(a.get(4))
    a.peer.reply(a.peer.request(), b"out of bounds", status=1)
    lost_with_the_cause_of(a, b)
    assert "out of bounds" in str(b.stream.lost)


def test_a_source_that_dies_loses_both_with_its_cause(a, b):
    b.set(a.get(4))
    a.peer.close()
    lost_with_the_cause_of(a, b)
    with pytest.raises(ConnectionClosed):
        b.peer.request()


def test_a_source_that_was_lost_before_loses_both_with_its_cause(a, b):
    a.stream.fail(CaravanError("earlier"), "GET")
    b.set(a.get(4))
    lost_with_the_cause_of(a, b)


def test_the_loss_of_the_target_does_not_hurt_the_source(a, b):
    ticket = a.get(4)
    b.set(ticket)
    b.peer.close()
    wait_until(lambda: b.stream.lost)
    a.peer.reply(a.peer.request(), b"data")
    assert ticket.wait(PATIENCE) == b"data"
    assert a.stream.lost is None


def test_a_ring_of_losses_ends(open_rig):
    rigs = [open_rig(device=f"RPC{n}") for n in range(4)]
    for source, target in zip(rigs, rigs[1:] + rigs[:1], strict=True):
        for _ in range(20):
            target.set(source.get(4))
    sides = [Side(rig.peer.close) for rig in rigs]
    for rig in rigs:
        wait_until(lambda stream=rig.stream: stream.lost)
    for side in sides:
        side.join()


# events


def test_a_gate_holds_back_what_is_posted_later(a, b):
    b.set(b"before")
    b.stream.hold_until(a.get(1))
    b.set(b"after")
    b.stream.flush()
    assert b.peer.request().payload[8:] == b"before"
    assert len(b.near.sends) == 1
    a.peer.reply(a.peer.request(), b"x")
    assert b.peer.request().payload[8:] == b"after"


def test_all_of_several_gates_are_waited_for(open_rig, a, b):
    c = open_rig(device="RPC2")
    ticket = c.get(1)
    b.stream.hold_until(ticket)
    b.stream.hold_until(a.get(1))
    b.set(b"after")
    a.peer.reply(a.peer.request(), b"x")
    wait_until(lambda: a.stream.last_ticket() is None)
    b.stream.flush()
    assert b.near.sends == []
    c.peer.reply(c.peer.request(), b"x")
    assert b.peer.request().payload[8:] == b"after"


@pytest.mark.parametrize("gate_first", [False, True])
def test_a_gate_and_a_relay_on_one_message(a, b, gate_first):
    gate, data = a.get(1), a.get(4)
    if not gate_first:
        gate, data = data, gate
    b.stream.hold_until(gate)
    b.set(data)
    requests = [a.peer.request(), a.peer.request()]
    a.peer.reply(requests[0], b"x")
    b.stream.flush()
    assert b.near.sends == []
    a.peer.reply(requests[1], b"data")
    assert b.peer.request().payload[8:] == (b"data" if gate_first else b"x")


def test_a_gate_that_is_open_holds_nothing(a, b):
    ticket = a.get(1)
    a.peer.reply(a.peer.request(), b"x")
    ticket.wait(PATIENCE)
    b.stream.hold_until(ticket)
    b.set(b"now")
    assert len(b.near.sends) == 1


@pytest.mark.parametrize("before", [False, True])
def test_a_gate_that_fails_loses_the_stream(a, b, before):
    ticket = a.get(1)
    if before:
        a.peer.close()
        wait_until(lambda: ticket.done)
    b.stream.hold_until(ticket)
    b.set(b"after")
    a.peer.close()
    lost_with_the_cause_of(a, b)


@pytest.mark.parametrize("before", [False, True])
def test_a_gate_whose_question_was_refused_is_open(a, b, before):
    ticket = question(a)

    def refuse():
        a.peer.reply(a.peer.request("ALLOC"), b"no room", status=3)
        with pytest.raises(RemoteError):
            ticket.wait(PATIENCE)

    if before:
        refuse()
    b.stream.hold_until(ticket)
    b.set(b"after")
    if not before:
        refuse()
    assert b.peer.request().payload[8:] == b"after"
    assert b.stream.lost is None


def test_a_gate_whose_question_died_with_its_stream_fails(a, b):
    b.stream.hold_until(question(a))
    b.set(b"after")
    a.peer.close()
    lost_with_the_cause_of(a, b)


# many at once


class Worker(threading.Thread):
    """A worker's memory: SET writes, GET reads, in order."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(name="test-worker", daemon=True)
        self.memory: dict[int, bytes] = {}
        self.peer = peer
        self.start()

    def run(self) -> None:
        try:
            while True:
                self.serve()
        except ConnectionClosed:
            pass

    def serve(self) -> None:
        request = self.peer.request()
        if request.command.number == Ext.SET:
            (address,) = SET.request.unpack_from(request.payload)
            self.memory[address] = request.payload[8:]
        else:
            address, size = GET.request.unpack(request.payload)
            data = self.memory[address]
            assert len(data) == size
            self.peer.reply(request, data)


class Cluster:
    """Streams to such workers, and what their memories must hold in the end."""

    def __init__(self, count: int, capacity: int) -> None:
        self.rigs = [make_rig(capacity=capacity, device=f"RPC{n}") for n in range(count)]
        self.workers = [Worker(rig.peer) for rig in self.rigs]
        self.model: dict[tuple[int, int], bytes] = {}

    def write(self, device: int, address: int, data: bytes, cork: bool, wait: bool = False) -> None:
        self.model[device, address] = data
        parts = [SET.request.pack(address), data]
        self.rigs[device].stream.post(SET, parts, cork=cork, wait_sent=wait)

    def copy(self, source: int, target: int, start: int, end: int, cork: bool) -> None:
        data = self.model[source, start]
        self.model[target, end] = data
        ticket = Ticket("GET", len(data))
        self.rigs[source].stream.post(GET, [GET.request.pack(start, len(data))], ticket)
        self.rigs[target].stream.post(SET, [SET.request.pack(end), ticket], cork=cork)

    def check(self) -> None:
        tickets = {}
        for (device, address), data in self.model.items():
            tickets[device, address] = ticket = Ticket("GET", len(data))
            self.rigs[device].stream.post(GET, [GET.request.pack(address, len(data))], ticket)
        for key, ticket in tickets.items():
            assert ticket.wait(PATIENCE) == self.model[key]

    def close(self) -> None:
        for rig in self.rigs:
            rig.take_leave()
        for worker in self.workers:
            worker.join(PATIENCE)
            assert not worker.is_alive()


steps = st.tuples(
    st.sampled_from(["write", "copy", "copy", "copy", "wait"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
)


@settings(max_examples=40)
@given(
    st.lists(steps, max_size=60),
    st.sampled_from([60, 1000, 1 << 20]),
    st.sampled_from([0, 5, 3000]),
)
def test_relays_in_all_directions_give_what_one_after_the_other_gives(todo, capacity, size):
    cluster = Cluster(3, capacity)
    for device in range(3):
        for address in range(4):
            cluster.write(device, address, b"%d/%d" % (device, address) + b"." * size, True)
    for number, (kind, source, target, start, end, cork) in enumerate(todo):
        if kind == "copy":
            cluster.copy(source, target, start, end, cork)
        else:
            data = b"#%d" % number + b"_" * size
            cluster.write(target, end, data, cork, wait=kind == "wait")
    cluster.check()
    cluster.close()


def test_two_posters_and_relays_both_ways():
    cluster = Cluster(2, 500)
    cluster.write(0, 0, b"a" * 900, False)
    cluster.write(1, 10_000, b"b" * 900, False)

    def relay(source: int, first: int):
        for number in range(150):
            cluster.copy(source, 1 - source, first + number, first + number, number % 2 == 0)
            # back again under the next address
            cluster.copy(1 - source, source, first + number, first + number + 1, False)

    sides = [Side(lambda: relay(0, 0)), Side(lambda: relay(1, 10_000))]
    for side in sides:
        side.join()
    cluster.check()
    cluster.close()
