"""Questions about a device, to a worker that the test plays; also one that has no answers."""

from __future__ import annotations

import time

import numpy as np
import pytest

from caravan.errors import RemoteError, RemoteProtocolError, TransportTimeout, WorkerLost
from caravan.stream.telemetry import (
    DeviceStats,
    MemoryQuestion,
    StatsQuestion,
    ask_clock,
    ask_stats,
    ask_timeline,
)
from caravan.trace.clock import ROUNDS
from caravan.trace.spans import Kind, Span
from caravan.wire import codec
from caravan.wire.extension import MAX_SPANS, Status
from caravan.wire.records import SPAN
from stream.scripted import Rig
from wired import Side, wait_until

SKEW = 123_456_789_012_345


def test_a_clock_that_is_far_ahead(rig: Rig) -> None:
    asking = Side(lambda: ask_clock(rig.stream))
    for _ in range(ROUNDS):
        request = rig.peer.request("CLOCK")
        rig.peer.reply(request, (time.perf_counter_ns() + SKEW).to_bytes(8, "little"))
    reading = asking.join()
    assert abs(reading.offset - SKEW) <= reading.uncertainty
    assert abs(time.perf_counter_ns() - reading.at) < 60e9


def test_stats_are_answered_ahead_of_what_the_device_is_at(rig: Rig) -> None:
    earlier = rig.get(3)
    asking = Side(lambda: ask_stats(rig.stream))
    first, second = rig.peer.request("GET"), rig.peer.request("STATS")
    numbers = range(10, 17)
    rig.peer.reply(second, b"".join(number.to_bytes(8, "little") for number in numbers))
    assert asking.join() == DeviceStats(*numbers)
    assert not earlier.done
    rig.peer.reply(first, b"abc")
    assert earlier.wait() == b"abc"


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_timeline_of_any_length(rig: Rig, on: bool, count: int) -> None:
    spans = [Span(n, n + 5, Kind.GRAPH, 30, 0, 1 << 63) for n in range(count)]
    asking = Side(lambda: ask_timeline(rig.stream, on))
    request = rig.peer.request("TIMELINE")
    assert request.payload == bytes([on])
    rig.peer.reply(request, (7).to_bytes(8, "little") + np.array(spans, SPAN).tobytes())
    assert asking.join() == (spans, 7)


@pytest.mark.parametrize("size", [0, 7, 8 + 39, 8 + 41])
def test_what_is_no_timeline_is_refused(rig: Rig, size: int) -> None:
    asking = Side(lambda: ask_timeline(rig.stream, True))
    rig.peer.reply(rig.peer.request(), bytes(size))
    with pytest.raises(RemoteProtocolError):
        asking.join()


def test_more_spans_than_a_worker_may_keep_lose_the_stream(rig: Rig) -> None:
    asking = Side(lambda: ask_timeline(rig.stream, True))
    request = rig.peer.request()
    size = 8 + (MAX_SPANS + 1) * SPAN.itemsize
    rig.peer.raw(codec.ext_frame(request.command.number, request.seq, size))
    with pytest.raises(WorkerLost):
        asking.join()


@pytest.mark.parametrize("ask", [ask_stats, ask_clock, lambda stream: ask_timeline(stream, True)])
def test_a_worker_that_does_not_know_the_question_stays(rig: Rig, ask) -> None:
    asking = Side(lambda: ask(rig.stream))
    rig.peer.reply(rig.peer.request(), b"command 84", Status.UNKNOWN_COMMAND)
    with pytest.raises(RemoteError, match="command 84"):
        asking.join()
    assert rig.stream.lost is None


def test_a_worker_that_takes_too_long_is_given_up_but_not_lost(rig: Rig) -> None:
    with pytest.raises(TransportTimeout):
        ask_stats(rig.stream, timeout=0.01)
    rig.peer.reply(rig.peer.request(), bytes(56))
    wait_until(lambda: rig.stream.last_ticket() is None)
    assert rig.stream.lost is None


def test_traffic_is_told(rig: Rig) -> None:
    sent: list[int] = []
    received: list[int] = []
    rig.stream.record(lambda at, size: sent.append(size), lambda at, size: received.append(size))
    rig.set(b"x" * 100)
    rig.peer.request("SET")
    assert sent == [16 + 8 + 100]
    ticket = rig.get(3)
    rig.peer.reply(rig.peer.request(), b"abc")
    ticket.wait()
    assert received == [16 + 3]


def test_questions_that_nobody_waits_for(rig: Rig) -> None:
    stats, memory = StatsQuestion(rig.stream), MemoryQuestion(rig.stream)
    first, second = rig.peer.request("STATS"), rig.peer.request("MEMORY")
    assert not stats.done and not memory.done
    rig.peer.reply(second, (5).to_bytes(8, "little") + (9).to_bytes(8, "little"))
    wait_until(lambda: memory.done)
    assert memory.memory() == (5, 9)
    rig.peer.reply(first, b"".join(number.to_bytes(8, "little") for number in range(7)))
    wait_until(lambda: stats.done)
    assert stats.stats() == DeviceStats(*range(7))
    assert stats.at <= memory.at <= memory.answered <= stats.answered


@pytest.mark.parametrize(
    ("question", "values"),
    [(StatsQuestion, StatsQuestion.stats), (MemoryQuestion, MemoryQuestion.memory)],
)
def test_a_question_that_is_refused_or_lost(rig: Rig, question, values) -> None:
    refused = question(rig.stream)
    rig.peer.reply(rig.peer.request(), b"command 86", Status.UNKNOWN_COMMAND)
    wait_until(lambda: refused.done)
    with pytest.raises(RemoteError, match="command 86"):
        values(refused)
    lost = question(rig.stream)
    rig.peer.close()
    wait_until(lambda: lost.done)
    with pytest.raises(WorkerLost):
        values(lost)
    with pytest.raises(WorkerLost):
        values(question(rig.stream))
