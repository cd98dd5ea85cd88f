"""Replies leave in the order of the requests, whoever finishes first and however slow the peer."""

from __future__ import annotations

import threading

from caravan.transport import memory
from caravan.transport.reader import Reader
from caravan.worker.replies import Replies


def test_replies_wait_for_the_ones_before_them() -> None:
    ours, theirs = memory.pair()
    replies = Replies(ours)
    first, second, third = replies.reserve(), replies.reserve(), replies.reserve()
    replies.complete(third, (b"3",))
    replies.complete(second, ())
    assert ours.sends == []
    replies.complete(first, (b"1",))
    assert Reader(theirs).read(2) == b"13"


def test_a_reply_that_waits_is_copied() -> None:
    ours, theirs = memory.pair()
    replies = Replies(ours)
    first, second = replies.reserve(), replies.reserve()
    device = bytearray(b"old")
    replies.complete(second, (memoryview(device),))
    device[:] = b"new"
    replies.complete(first, ())
    assert Reader(theirs).read(3) == b"old"


def test_what_the_pipe_does_not_take_is_copied_and_sent_later() -> None:
    ours, theirs = memory.pair(capacity=10)
    replies = Replies(ours)
    device = bytearray(range(100))
    replies.complete(replies.reserve(), (b"head", memoryview(device)))
    replies.complete(replies.reserve(), (b"tail",))
    device[:] = bytes(100)
    data = Reader(theirs).read(108)
    assert data == b"head" + bytes(range(100)) + b"tail"
    assert replies.drain(5)
    replies.close()


def test_urgent_replies_do_not_wait_for_slots() -> None:
    ours, theirs = memory.pair()
    replies = Replies(ours)
    slot = replies.reserve()
    replies.now((b"ping",))
    replies.complete(slot, (b"late",))
    assert Reader(theirs).read(8) == b"pinglate"


def test_unread_answers_hold_the_reader_back() -> None:
    ours, theirs = memory.pair()
    replies = Replies(ours)
    slot = replies.reserve(200 << 20)
    passed = threading.Event()

    def more() -> None:
        replies.reserve(200 << 20)
        passed.set()

    threading.Thread(target=more, daemon=True).start()
    assert not passed.wait(0.05)
    replies.complete(slot, (b"x",))
    assert passed.wait(5)
    theirs.close()


def test_a_broken_pipe_swallows_what_follows() -> None:
    ours, theirs = memory.pair()
    replies = Replies(ours)
    theirs.close()
    ours.close()
    replies.complete(replies.reserve(), (b"x",))
    replies.complete(replies.reserve(1 << 40), (b"x",))
    assert replies.drain(1)
