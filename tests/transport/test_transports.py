"""One contract for every transport: order, partial sends, full pipes, and how an end is noticed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caravan.errors import ConnectionClosed
from wired import KINDS, PATIENCE, Side, receive, send_all


@pytest.fixture(params=list(KINDS))
def ends(request, tmp_path):
    with KINDS[request.param](tmp_path) as pair:
        yield pair


def fill(transport) -> int:
    """Send until nothing more is taken; how much was."""
    total = 0
    for _ in range(10_000):
        sent = transport.send([b"x" * 4096])
        total += sent
        if not sent:
            return total
    raise AssertionError("the pipe is never full")


def test_bytes_arrive_in_order_both_ways(ends):
    one, two = ends
    assert one.send([b"he", b"", b"llo"]) == 5
    assert receive(two, 5) == b"hello"
    assert two.send([b"world"]) == 5
    assert receive(one, 5) == b"world"


def test_parts_of_all_kinds(ends):
    one, two = ends
    data = bytearray(b"0123456789")
    assert one.send([b"a", data, memoryview(data)[3:5]]) == 13
    assert receive(two, 13) == b"a012345678934"


def test_more_parts_than_one_call_takes(ends):
    one, two = ends
    parts = [bytes([n % 256]) for n in range(1500)]
    sent = 0
    while sent < len(parts):
        sent += one.send(parts[sent:])
    assert receive(two, 1500) == b"".join(parts)


def test_a_full_pipe_takes_nothing_and_says_so(ends):
    one, two = ends
    total = fill(one)
    # what has not been taken comes first in the next one
    rest = [b"x" * 4096, b"more"]
    assert one.send(rest) == 0
    assert one.wait_writable(0) is False
    assert receive(two, total) == b"x" * total
    assert one.wait_writable(PATIENCE) is True
    send_all(one, b"".join(rest))
    assert receive(two, 4100) == b"".join(rest)


def test_a_large_payload_passes_in_partial_sends(ends):
    one, two = ends
    data = bytes(range(256)) * (64 << 10)
    side = Side(lambda: send_all(one, data))
    assert receive(two, len(data)) == data
    assert side.join() > 1


def test_receiving_takes_what_is_there(ends):
    one, two = ends
    one.send([b"abc"])
    target = bytearray(10)
    assert two.recv_into(memoryview(target)) == 3
    assert target[:3] == b"abc"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(chunks=st.lists(st.binary(min_size=1, max_size=300), max_size=20))
def test_any_chunks_arrive_whole(ends, chunks):
    one, two = ends
    for chunk in chunks:
        send_all(one, chunk)
    data = b"".join(chunks)
    assert receive(two, len(data)) == data


def test_what_was_sent_before_the_end_still_arrives(ends):
    one, two = ends
    one.send([b"last words"])
    one.close()
    assert receive(two, 10) == b"last words"
    with pytest.raises(ConnectionClosed, match="closed by the other end"):
        two.recv_into(memoryview(bytearray(1)))


def test_close_wakes_a_blocked_reader_at_both_ends(ends):
    one, _ = ends
    sides = [Side(lambda end=end: end.recv_into(memoryview(bytearray(1)))) for end in ends]
    one.close()
    for side in sides:
        with pytest.raises(ConnectionClosed):
            side.join()


def test_close_wakes_a_blocked_writer(ends):
    one, _ = ends
    fill(one)

    def write():
        while True:
            if one.wait_writable(PATIENCE):
                one.send([b"x"])

    side = Side(write)
    one.close()
    with pytest.raises(ConnectionClosed):
        side.join()


def test_a_writer_notices_that_the_other_end_has_gone(ends):
    one, two = ends
    two.close()

    def write():
        for _ in range(1_000_000):
            one.send([b"x" * 1000])

    with pytest.raises(ConnectionClosed):
        Side(write).join()


def test_a_closed_transport_does_nothing_more(ends):
    one, two = ends
    two.send([b"unread"])
    one.close()
    with pytest.raises(ConnectionClosed):
        one.send([b"x"])
    with pytest.raises(ConnectionClosed):
        one.recv_into(memoryview(bytearray(1)))
    with pytest.raises(ConnectionClosed):
        one.wait_writable(0)


def test_close_is_idempotent(ends):
    one, two = ends
    for _ in range(3):
        one.close()
        two.close()


def test_close_from_several_threads(ends):
    one, _ = ends
    for side in [Side(one.close) for _ in range(8)]:
        side.join()


def test_peer_is_named(ends):
    assert all(isinstance(end.peer, str) and end.peer for end in ends)


@pytest.mark.parametrize("spin", [0.0, 0.001, PATIENCE])
def test_waiting_until_there_is_something_to_read(ends, spin):
    one, two = ends
    assert one.wait_readable(0.002, spin) is False
    two.send([b"x"])
    assert one.wait_readable(PATIENCE, spin) is True
    assert one.wait_readable(0, spin) is True
    receive(one, 1)
    assert one.wait_readable(0, spin) is False
    side = Side(lambda: one.wait_readable(PATIENCE, spin))
    two.send([b"x"])
    assert side.join() is True


def test_an_end_is_something_to_read(ends):
    one, two = ends
    two.close()
    assert one.wait_readable(PATIENCE) is True
    with pytest.raises(ConnectionClosed):
        one.recv_into(memoryview(bytearray(1)))


@pytest.mark.parametrize("spin", [0.0, PATIENCE])
def test_close_wakes_who_waits_to_read(ends, spin):
    one, _ = ends

    def wait() -> None:
        one.wait_readable(PATIENCE, spin)
        one.recv_into(memoryview(bytearray(1)))

    side = Side(wait)
    one.close()
    with pytest.raises(ConnectionClosed):
        side.join()
