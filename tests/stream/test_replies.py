"""What comes back: matched in order, or the stream is lost with every ticket settled."""

from __future__ import annotations

import pytest

from caravan.errors import CaravanError, RemoteError, RemoteProtocolError, WorkerLost
from caravan.stream.ticket import Ticket
from caravan.wire import codec
from caravan.wire.commands import EXT, Ext
from caravan.wire.extension import MAX_ERROR_TEXT
from stream.scripted import ALLOC, CLEAR, GET, MEMORY, RECOMPUTE, Rig
from wired import PATIENCE, Side, wait_until


def lost_by(rig: Rig, *tickets: Ticket) -> WorkerLost:
    """The loss; every ticket has it, and nothing waits any more."""
    for ticket in tickets:
        with pytest.raises(WorkerLost) as caught:
            ticket.wait(PATIENCE)
        assert caught.value is rig.stream.lost
    wait_until(lambda: rig.stream.lost)
    assert rig.stream.last_ticket() is None
    lost = rig.stream.lost
    assert lost is not None
    assert (lost.endpoint, lost.device) == ("host:50052", "RPC0")
    assert lost.__cause__ is lost.cause or isinstance(lost.cause, WorkerLost)
    return lost


@pytest.mark.parametrize("protocol", ["ext", "7"])
def test_requests_are_pipelined(open_rig, protocol):
    rig = open_rig(protocol)
    row = GET if protocol == "ext" else rig.peer.table[8]
    head = row.request.pack(*([0] * 2 if protocol == "ext" else [bytes(296), 0, 0]))
    tickets = [Ticket("GET", n) for n in range(1, 11)]
    for ticket in tickets:
        rig.stream.post(row, [head], ticket)
    # all of them arrive although none was answered
    requests = [rig.peer.request() for _ in tickets]
    for number, request in enumerate(requests, 1):
        rig.peer.reply(request, bytes([number]) * number)
    assert [t.wait(PATIENCE) for t in tickets] == [bytes([n]) * n for n in range(1, 11)]
    assert rig.stream.lost is None


def test_a_read_goes_into_the_callers_memory(rig):
    memory = bytearray(1 << 20)
    ticket = rig.get(1 << 19, memoryview(memory)[100 : 100 + (1 << 19)])
    small = rig.get(3)
    data = bytes(range(256)) * (1 << 11)
    rig.peer.reply(rig.peer.request(), data)
    rig.peer.reply(rig.peer.request(), b"abc")
    assert ticket.wait(PATIENCE) == b""
    assert small.wait(PATIENCE) == b"abc"
    assert memory[100 : 100 + (1 << 19)] == data
    assert not any(memory[:100]) and not any(memory[100 + (1 << 19) :])


def test_call(rig):
    side = Side(lambda: rig.stream.call(MEMORY, [], 16))
    rig.peer.reply(rig.peer.request("MEMORY"), bytes(range(16)))
    assert side.join() == bytes(range(16))


def test_the_newest_reply_that_is_due(rig):
    assert rig.stream.last_ticket() is None
    first, second = rig.get(1), rig.get(1)
    assert rig.stream.last_ticket() is second
    rig.peer.reply(rig.peer.request(), b"a")
    first.wait(PATIENCE)
    assert rig.stream.last_ticket() is second
    rig.peer.reply(rig.peer.request(), b"b")
    second.wait(PATIENCE)
    assert rig.stream.last_ticket() is None


def test_sequence_numbers_wrap(rig):
    rig.stream._seq = 0xFFFFFFFD
    tickets = [rig.get(1) for _ in range(5)]
    requests = [rig.peer.request() for _ in range(5)]
    assert [r.seq for r in requests] == [0xFFFFFFFE, 0xFFFFFFFF, 0, 1, 2]
    for request in requests:
        rig.peer.reply(request, b"x")
    assert [t.wait(PATIENCE) for t in tickets] == [b"x"] * 5


def test_a_refused_question_fails_alone(rig):
    before, after = rig.get(1), None
    side = Side(lambda: rig.stream.call(ALLOC, [ALLOC.request.pack(9)], 24, fatal=False))
    requests = [rig.peer.request() for _ in range(2)]
    after = rig.get(1)
    requests.append(rig.peer.request())
    rig.peer.reply(requests[0], b"a")
    rig.peer.reply(requests[1], b"no room\nat all", status=3)
    rig.peer.reply(requests[2], b"b")
    with pytest.raises(RemoteError, match="no room at all") as caught:
        side.join()
    assert caught.value.code == 3
    assert (before.wait(PATIENCE), after.wait(PATIENCE)) == (b"a", b"b")
    assert rig.stream.lost is None


def test_an_error_reply_loses_the_stream(rig):
    target = bytearray(b"old")
    tickets = [rig.get(1), rig.get(3, memoryview(target)), rig.get(1)]
    requests = [rig.peer.request() for _ in tickets]
    rig.peer.reply(requests[0], b"a")
    rig.peer.reply(requests[1], b"outside of the buffer", status=1)
    lost = lost_by(rig, *tickets[1:])
    assert tickets[0].wait() == b"a"
    assert lost.command == "GET"
    assert isinstance(lost.cause, RemoteError)
    assert "outside of the buffer" in str(lost)
    assert target == bytes(3)


@pytest.mark.parametrize("pending", [0, 2])
def test_an_error_of_a_silent_command_loses_the_stream(rig, pending):
    rig.stream.post(RECOMPUTE, [RECOMPUTE.request.pack(1)])
    tickets = [rig.get(1) for _ in range(pending)]
    rig.peer.reply(rig.peer.request(), b"op MUL_MAT: shapes", status=4)
    lost = lost_by(rig, *tickets)
    # the command that met the failure, not the one whose turn it was
    assert lost.command == "GRAPH_RECOMPUTE"
    assert str(lost) == ("lost RPC0 at host:50052 during GRAPH_RECOMPUTE: op MUL_MAT: shapes")


def test_an_error_of_a_silent_command_stands_between_replies(rig):
    first = rig.get(1)
    rig.stream.post(CLEAR, [CLEAR.request.pack(1, 2)])
    second = rig.get(1)
    requests = [rig.peer.request() for _ in range(3)]
    rig.peer.reply(requests[0], b"a")
    rig.peer.reply(requests[1], status=1)
    lost = lost_by(rig, second)
    assert first.wait(PATIENCE) == b"a"
    assert str(lost.cause) == "no reason given"


def frame(number: int, seq: int, payload: bytes = b"", status: int = 0) -> bytes:
    return codec.ext_frame(number, seq, len(payload), status) + payload


# seq 1 has been answered, 2 is due, 3 is not
BAD = {
    "unknown command": frame(200, 2),
    "base command": frame(8, 2, b"abcd"),
    "too short": frame(69, 2, b"abc"),
    "too long": frame(69, 2, b"abcde"),
    "empty": frame(69, 2),
    "endless": codec.ext_frame(69, 2, 2**64 - 1),
    "answered twice": frame(69, 1, b"abcd"),
    "before its turn": frame(69, 3, b"abcd"),
    "never asked": frame(69, 4, b"abcd"),
    "error before its turn": frame(69, 3, b"no", status=1),
    "success of a silent command": frame(68, 0),
    "pong with a payload": frame(75, 0, b"abcd"),
    "pong that failed": frame(75, 0, status=1),
    "endless error": codec.ext_frame(69, 2, MAX_ERROR_TEXT + 1, 1),
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "garbage": b"\xff" * 64,
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_loses_the_stream(rig, name):
    tickets = [rig.get(4) for _ in range(3)]
    requests = [rig.peer.request() for _ in tickets]
    rig.peer.reply(requests[0], b"good")
    assert tickets[0].wait(PATIENCE) == b"good"
    rig.peer.raw(BAD[name])
    lost = lost_by(rig, *tickets[1:])
    assert isinstance(lost.cause, RemoteProtocolError)
    assert lost.command == "GET"


@pytest.mark.parametrize("length", [0, 3, 5, 2**64 - 1])
def test_a_bad_base_reply_loses_the_stream(open_rig, length):
    rig = open_rig("7")
    row = rig.peer.table[8]
    tickets = [Ticket("GET_TENSOR", 4) for _ in range(2)]
    for ticket in tickets:
        rig.stream.post(row, [row.request.pack(bytes(296), 0, 4)], ticket)
    rig.peer.raw(codec.base_reply(length))
    lost = lost_by(rig, *tickets)
    assert lost.command == "GET_TENSOR"
    assert str(length) in str(lost)


def test_a_base_reply_that_nothing_asked_for(open_rig):
    rig = open_rig("7")
    rig.peer.raw(codec.base_reply(0))
    assert "nothing asked for" in str(lost_by(rig))


def test_a_target_of_a_wrong_kind_is_an_error_and_no_hang(rig):
    read_only = memoryview(bytes(4))
    ticket = Ticket("GET", 4)
    ticket._target = [read_only]
    rig.stream.post(GET, [GET.request.pack(0, 4)], ticket)
    other = rig.get(1)
    rig.peer.reply(rig.peer.request(), b"abcd")
    with pytest.raises(WorkerLost, match="internal error"):
        other.wait(PATIENCE)


def test_memory_that_was_taken_away_is_an_error_and_no_hang(rig):
    view = memoryview(bytearray(100))
    rig.near.set_capacity(0)
    rig.set(view)
    view.release()
    ticket = rig.get(4)
    rig.near.set_capacity(1000)
    with pytest.raises(CaravanError):
        ticket.wait(PATIENCE)


PING = EXT[Ext.PING]


def test_what_is_answered_aside_may_come_first(rig):
    ordered = rig.get(3)
    aside = [Ticket("PING", 0) for _ in range(2)]
    for ticket in aside:
        rig.stream.post(PING, [], ticket)
    last = rig.get(2)
    requests = [rig.peer.request() for _ in range(4)]
    for number, data in ((2, b""), (0, b"abc"), (1, b""), (3, b"de")):
        rig.peer.reply(requests[number], data)
    assert [t.wait(PATIENCE) for t in (ordered, *aside, last)] == [b"abc", b"", b"", b"de"]
    assert rig.stream.lost is None


def test_what_is_answered_aside_is_lost_with_the_stream(rig):
    ticket = Ticket("PING", 0)
    rig.stream.post(PING, [], ticket)
    rig.peer.close()
    lost_by(rig, ticket)


def test_an_answer_aside_may_be_a_refusal(rig):
    ticket = Ticket("PING", 0, fatal=False)
    rig.stream.post(PING, [], ticket)
    rig.peer.reply(rig.peer.request("PING"), b"not today", 6)
    with pytest.raises(RemoteError, match="not today"):
        ticket.wait(PATIENCE)
    assert rig.stream.lost is None


@pytest.mark.parametrize("size", [0, 3, 4])
def test_a_reply_of_a_size_that_is_not_known(rig, size):
    ticket = Ticket("GET", 4, at_most=True)
    rig.stream.post(GET, [GET.request.pack(0, 4)], ticket)
    rig.peer.reply(rig.peer.request(), b"x" * size)
    assert ticket.wait(PATIENCE) == b"x" * size
