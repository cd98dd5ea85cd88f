"""What leaves a stream: in order, few segments, bounded memory, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan.errors import WorkerLost
from caravan.stream import dispatcher
from caravan.stream.ticket import Ticket
from stream.scripted import ALLOC, CLEAR, GET, RECOMPUTE, SET, make_rig
from wired import Side, wait_until


def test_commands_leave_in_order_with_their_numbers(rig):
    rig.stream.post(ALLOC, [ALLOC.request.pack(5)], Ticket("ALLOC", 24))
    rig.stream.post(CLEAR, [CLEAR.request.pack(7, 1)], cork=True)
    rig.stream.post(SET, [SET.request.pack(9), b"ab", bytearray(b"cd"), memoryview(b"efg")[1:]])
    rig.get(4)
    requests = [rig.peer.request() for _ in range(4)]
    assert [r.name for r in requests] == ["ALLOC", "CLEAR", "SET", "GET"]
    assert [r.seq for r in requests] == [1, 2, 3, 4]
    assert requests[1].payload == CLEAR.request.pack(7, 1)
    assert requests[2].payload == SET.request.pack(9) + b"abcdfg"
    assert rig.stream.commands == 4


@pytest.mark.parametrize("protocol", ["7", "8"])
def test_base_protocol_has_no_numbers(open_rig, protocol):
    rig = open_rig(protocol)
    row = rig.peer.table[5]
    rig.stream.post(row, [row.request.pack(1, 2)])
    rig.stream.post(row, [row.request.pack(3, 4)])
    assert rig.peer.reader.read(36) == (
        b"\x05\x09" + bytes(7) + b"\1" + bytes(7) + b"\2"
        b"\x05\x09" + bytes(7) + b"\3" + bytes(7) + b"\4"
    )


def test_a_decode_step_leaves_in_one_segment(rig):
    for size in (4, 8, 2048):
        rig.set(b"x" * size, cork=True)
    assert rig.near.sends == []
    rig.stream.post(RECOMPUTE, [RECOMPUTE.request.pack(1)])
    assert rig.near.sends == [4 * 16 + 4 * 8 + 4 + 8 + 2048]
    assert rig.stream.segments == 1
    assert [rig.peer.request().name for _ in range(4)] == ["SET"] * 3 + ["GRAPH_RECOMPUTE"]


def test_corked_commands_leave_with_a_flush(rig):
    rig.set(b"abc", cork=True)
    rig.stream.flush()
    assert rig.near.sends == [16 + 8 + 3]
    rig.stream.flush()
    assert rig.near.sends == [16 + 8 + 3]


def test_corked_commands_leave_when_many_wait(rig):
    for number in range(100):
        rig.set(bytes([number]) * 1000, cork=True)
    assert sum(rig.near.sends) == 3 * 32 * (16 + 8 + 1000)
    rig.stream.flush()
    payloads = [rig.peer.request("SET").payload[8:] for _ in range(100)]
    assert payloads == [bytes([number]) * 1000 for number in range(100)]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40) | st.sampled_from([1000, 33_000, 70_000]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=40,
    ),
    st.sampled_from([500, 1 << 14, 1 << 20]),
)
def test_nothing_is_lost_or_turned_round(posts, capacity):
    rig = make_rig(capacity=capacity)
    side = Side(lambda: [rig.peer.request("SET").payload[8:] for _ in posts])
    for number, (size, cork, wait) in enumerate(posts):
        data = (b"%d " % number).ljust(size, b".") if size else b""
        rig.set(data, cork=cork, wait_sent=wait and not cork)
    rig.stream.flush()
    expected = [
        (b"%d " % n).ljust(size, b".") if size else b"" for n, (size, *_) in enumerate(posts)
    ]
    assert side.join() == expected
    rig.take_leave()


def test_a_full_pipe_does_not_block_the_poster(rig):
    rig.near.set_capacity(0)
    for number in range(300):
        rig.set(bytes([number % 256]) * 100)
    assert rig.near.sends == []
    rig.near.set_capacity(50)
    payloads = [rig.peer.request("SET").payload[8:] for _ in range(300)]
    assert payloads == [bytes([number % 256]) * 100 for number in range(300)]


def test_a_partial_send_goes_on_where_it_stopped(rig):
    rig.near.set_capacity(10)
    rig.set(b"0123456789")
    assert rig.near.sends == [10]
    assert rig.peer.request("SET").payload[8:] == b"0123456789"


def test_wait_sent_returns_when_every_byte_is_handed_over(rig):
    rig.near.set_capacity(0)
    data = bytearray(b"precious" * 1000)

    def write():
        rig.set(memoryview(data), wait_sent=True)
        sent = sum(rig.near.sends)
        data[:] = bytes(len(data))
        return sent

    rig.set(b"before", cork=True)
    side = Side(write)
    wait_until(lambda: rig.stream.commands == 2)
    assert side.running
    rig.near.set_capacity(99)
    assert rig.peer.request("SET").payload[8:] == b"before"
    assert rig.peer.request("SET").payload[8:] == b"precious" * 1000
    assert side.join() == 16 + 8 + 6 + 16 + 8 + 8000


def test_memory_is_bounded_and_the_poster_goes_on(rig, monkeypatch):
    monkeypatch.setattr(dispatcher, "MAX_QUEUED", 1000)
    rig.near.set_capacity(0)
    posted: list[int] = []

    def post():
        for number in range(100):
            rig.set(bytes([number]) * 100)
            posted.append(number)

    side = Side(post)
    # 124 bytes each: the ninth fills it, the tenth waits
    wait_until(lambda: len(posted) == 9)
    assert side.running
    assert rig.stream.commands == 9 and rig.stream.crowded
    rig.near.set_capacity(300)
    payloads = [rig.peer.request("SET").payload[8:] for _ in range(100)]
    assert payloads == [bytes([number]) * 100 for number in range(100)]
    side.join()
    assert not rig.stream.crowded


def test_one_message_may_be_larger_than_the_bound(rig, monkeypatch):
    monkeypatch.setattr(dispatcher, "MAX_QUEUED", 1000)
    rig.near.set_capacity(100)
    rig.set(b"x" * 5000)
    assert rig.peer.request("SET").payload[8:] == b"x" * 5000


def test_a_poster_that_waits_for_room_is_freed_by_a_loss(rig, monkeypatch):
    monkeypatch.setattr(dispatcher, "MAX_QUEUED", 10)
    rig.near.set_capacity(0)
    rig.set(b"x" * 100)
    side = Side(lambda: rig.get(4))
    rig.peer.close()
    with pytest.raises(WorkerLost):
        side.join().wait()


def test_posters_on_many_threads_do_not_mix(rig):
    def post(thread: int):
        for number in range(100):
            rig.set(b"%d:%d" % (thread, number) + b"." * (number * 7), cork=number % 3 == 0)

    sides = [Side(lambda thread=thread: post(thread)) for thread in range(4)]
    for side in sides:
        side.join()
    rig.stream.flush()
    seen: dict[bytes, list[int]] = {}
    for _ in range(400):
        request = rig.peer.request("SET")
        thread, _, rest = request.payload[8:].partition(b":")
        number = int(rest.rstrip(b".") or 0)
        assert rest == b"%d" % number + b"." * (number * 7)
        seen.setdefault(thread, []).append(number)
    assert seen == {b"%d" % thread: list(range(100)) for thread in range(4)}


def test_more_messages_than_one_segment_takes(rig):
    for number in range(500):
        rig.set(b"%d" % number, cork=True)
    rig.stream.flush()
    assert [rig.peer.request().payload[8:] for _ in range(500)] == [b"%d" % n for n in range(500)]


def test_repr_and_counters(rig):
    rig.get(4)
    rig.stream.post(CLEAR, [CLEAR.request.pack(1, 2)], cork=True)
    assert repr(rig.stream) == (
        "<Stream RPC0 at host:50052 open: 2 commands, 1 replies due, 25 bytes queued>"
    )
    assert rig.stream.bytes_sent == 16 + GET.request.size
    rig.stream.close()
    assert " closed:" in repr(rig.stream)
