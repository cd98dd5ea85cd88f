"""Ends: the peer's in every state, our own, and what a lost or closed stream still does."""

from __future__ import annotations

import traceback

import pytest

from caravan.errors import CaravanError, ConnectionClosed, RemoteProtocolError, WorkerLost
from caravan.stream.ticket import Ticket
from caravan.wire import codec
from stream.scripted import ALLOC, CLEAR, GET, RECOMPUTE, Rig, stream_threads
from wired import PATIENCE, Side, wait_until


def check_lost(rig: Rig, command: str, *tickets: Ticket) -> None:
    for ticket in tickets:
        with pytest.raises(WorkerLost):
            ticket.wait(PATIENCE)
    wait_until(lambda: rig.stream.lost)
    lost = rig.stream.lost
    assert lost is not None
    assert lost.command == command
    assert isinstance(lost.cause, ConnectionClosed)
    assert rig.stream.ended
    wait_until(lambda: not stream_threads())


def test_end_while_idle(rig):
    rig.peer.close()
    check_lost(rig, "receive")


def test_a_loss_does_not_keep_the_frames_of_all_who_were_told(rig):
    depths = []
    rig.peer.close()
    wait_until(lambda: rig.stream.lost)
    for _ in range(5):
        with pytest.raises(WorkerLost) as caught:
            rig.stream.check()
        depths.append(sum(1 for _ in traceback.walk_tb(caught.value.__traceback__)))
    assert len(set(depths)) == 1


def test_end_while_something_is_done_that_has_no_reply(rig):
    """What the peer was last asked to do, as long as nothing says that it is done."""
    rig.stream.post(RECOMPUTE, [bytes(8)])
    rig.peer.close()
    check_lost(rig, RECOMPUTE.name)


def test_end_while_idle_after_something_that_has_no_reply(rig):
    rig.stream.post(RECOMPUTE, [bytes(8)])
    ticket = rig.get(4)
    rig.peer.request()
    rig.peer.reply(rig.peer.request(), bytes(4))
    ticket.wait(PATIENCE)
    rig.peer.close()
    check_lost(rig, "receive")


def test_end_before_a_reply(rig):
    tickets = [rig.get(4), rig.get(4)]
    rig.peer.close()
    check_lost(rig, "GET", *tickets)


@pytest.mark.parametrize("protocol", ["ext", "7"])
@pytest.mark.parametrize("cut", [1, 4, 7])
def test_end_inside_of_a_header(open_rig, protocol, cut):
    rig = open_rig(protocol)
    tickets = [rig.get(4), rig.get(4)]
    rig.peer.raw(codec.ext_frame(69, 1, 4)[:cut])
    rig.peer.close()
    check_lost(rig, "GET", *tickets)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("size", [10, 1 << 20])
def test_end_inside_of_a_payload(rig, into, size):
    target = bytearray(b"\xff" * size)
    tickets = [rig.get(size, memoryview(target) if into else None), rig.get(4)]
    rig.peer.raw(codec.ext_frame(69, 1, size) + bytes([7]) * (size // 2))
    rig.peer.close()
    check_lost(rig, "GET", *tickets)
    if into:
        assert target == bytes(size)


def test_end_inside_of_an_error_text(rig):
    tickets = [rig.get(4), rig.get(4)]
    rig.peer.raw(codec.ext_frame(69, 1, 100, 1) + b"the first half of")
    rig.peer.close()
    check_lost(rig, "GET", *tickets)


@pytest.mark.parametrize("fatal", [False, True])
def test_end_before_the_answer_to_a_question(rig, fatal):
    side = Side(
        lambda: rig.stream.call(ALLOC, [ALLOC.request.pack(9)], 24, fatal=fatal),
    )
    rig.peer.request("ALLOC")
    rig.peer.close()
    with pytest.raises(WorkerLost):
        side.join()


def test_end_while_much_is_to_be_sent(rig):
    rig.near.set_capacity(100)
    for _ in range(50):
        rig.set(b"x" * 100)
    ticket = rig.get(4)
    rig.peer.close()
    with pytest.raises(WorkerLost):
        ticket.wait(PATIENCE)
    assert isinstance(rig.stream.lost.cause, ConnectionClosed)
    assert "0 bytes queued" in repr(rig.stream)


def test_end_while_a_caller_waits_for_its_memory_to_be_read(rig):
    rig.near.set_capacity(100)
    side = Side(lambda: rig.set(b"x" * 5000, wait_sent=True))
    rig.peer.reader.read(50)
    rig.peer.close()
    side.join()
    assert rig.stream.lost is not None


def test_a_send_that_fails_loses_the_stream(rig, monkeypatch):
    ticket = rig.get(4)

    def broken(parts):
        raise ConnectionClosed("broken pipe")

    monkeypatch.setattr(rig.near, "send", broken)
    rig.set(b"x")
    with pytest.raises(WorkerLost, match="broken pipe"):
        ticket.wait(PATIENCE)
    assert rig.stream.lost.command == "GET"


def test_the_first_cause_stays(rig):
    ticket = rig.get(4)
    rig.stream.fail(CaravanError("first"), "ONE")
    rig.stream.fail(CaravanError("second"), "TWO")
    rig.peer.close()
    with pytest.raises(WorkerLost, match="lost RPC0 at host:50052 during ONE: first") as caught:
        ticket.wait(PATIENCE)
    lost = caught.value
    assert lost.__cause__ is lost.cause
    assert (lost.endpoint, lost.device, lost.command) == ("host:50052", "RPC0", "ONE")


def test_a_lost_stream_drops_commands_and_fails_questions_at_once(rig):
    rig.stream.fail(RemoteProtocolError("nonsense"), "GET")
    commands, sends = rig.stream.commands, list(rig.near.sends)
    target = bytearray(b"old bytes")
    read = rig.get(9, memoryview(target))
    assert read.done and read.error is rig.stream.lost
    assert target == bytes(9)
    rig.set(b"x" * 1000, wait_sent=True)
    rig.set(b"x", cork=True)
    rig.set(Ticket("GET", 4))
    rig.stream.post(RECOMPUTE, [RECOMPUTE.request.pack(1)])
    rig.stream.flush()
    with pytest.raises(WorkerLost) as caught:
        rig.stream.call(GET, [GET.request.pack(0, 4)], 4)
    assert caught.value is rig.stream.lost
    assert rig.stream.last_ticket() is None
    assert rig.stream.commands == commands
    assert rig.near.sends == sends
    assert "lost" in repr(rig.stream)


def test_a_loss_closes_the_connection(rig):
    rig.stream.fail(RemoteProtocolError("nonsense"), "GET")
    with pytest.raises(ConnectionClosed):
        rig.peer.reader.read(1)


def test_close_after_a_loss(rig):
    rig.peer.close()
    wait_until(lambda: rig.stream.lost)
    lost = rig.stream.lost
    rig.stream.close()
    rig.stream.close()
    assert rig.stream.lost is lost
    assert stream_threads() == []


def test_close_sends_what_is_queued(rig):
    for number in range(10):
        rig.stream.post(CLEAR, [CLEAR.request.pack(number, 0)], cork=True)
    rig.stream.close()
    numbers = [rig.peer.request("CLEAR").payload[0] for _ in range(10)]
    assert numbers == list(range(10))
    with pytest.raises(ConnectionClosed):
        rig.peer.request()
    assert stream_threads() == []


def test_close_waits_for_a_slow_peer(rig):
    rig.near.set_capacity(10)
    for _ in range(20):
        rig.set(b"x" * 100)
    side = Side(rig.stream.close)
    assert [rig.peer.request("SET").payload[8:] for _ in range(20)] == [b"x" * 100] * 20
    side.join()


def test_close_gives_up_on_a_peer_that_does_not_read(rig):
    rig.near.set_capacity(0)
    rig.set(b"x")
    rig.stream.close(timeout=0.05)
    assert rig.stream.ended


def test_close_gives_up_on_a_relay_that_never_comes(rig):
    rig.set(Ticket("GET", 4))
    rig.stream.close(timeout=0.05)
    assert rig.near.sends == []


def test_close_is_idempotent_and_settles_every_ticket(rig):
    target = bytearray(b"data")
    tickets = [rig.get(4), rig.get(4, memoryview(target))]
    rig.stream.close()
    rig.stream.close()
    for ticket in tickets:
        with pytest.raises(ConnectionClosed, match="the stream was closed"):
            ticket.wait(PATIENCE)
    assert target == bytes(4)
    assert rig.stream.lost is None
    assert stream_threads() == []


def test_a_closed_stream_takes_nothing_more(rig):
    rig.stream.close()
    with pytest.raises(ConnectionClosed):
        rig.get(4).wait(PATIENCE)
    rig.set(b"x", wait_sent=True)
    rig.stream.flush()
    rig.stream.fail(CaravanError("late"), "GET")
    rig.stream.tick(1e9)
    assert rig.stream.lost is None


def test_close_from_several_threads(rig):
    rig.get(4)
    for side in [Side(rig.stream.close) for _ in range(4)]:
        side.join()


def test_losses_while_replies_stream_in(open_rig):
    """Whatever the moment: every ticket is settled, and a settled read is whole or zeros."""
    for moment in range(30):
        rig = open_rig()
        targets = [bytearray(b"\xff" * 64) for _ in range(20)]
        tickets = [rig.get(64, memoryview(target)) for target in targets]

        def answer(rig=rig):
            for _ in range(20):
                rig.peer.reply(rig.peer.request(), b"\x07" * 64)

        side = Side(answer)
        wait_until(lambda m=moment, t=tickets: sum(ticket.done for ticket in t) >= m % 20)
        rig.stream.fail(CaravanError("now"), "GET")
        for ticket, target in zip(tickets, targets, strict=True):
            ticket.settle()
            expected = b"\x07" * 64 if ticket.error is None else bytes(64)
            assert target == expected
        with pytest.raises(ConnectionClosed):
            side.join()
            raise ConnectionClosed("it was through before")
