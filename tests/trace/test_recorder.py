"""What is kept of a device's doings, how much of it, and that no moment counts twice."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan.trace.activity import COMPUTING, IDLE, SENDING, WAITING, Activity
from caravan.trace.recorder import Recorder
from caravan.trace.spans import Kind, Span, Spans


class Clock:
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def span(number: int) -> Span:
    return Span(number, number + 1, Kind.GRAPH, 0, 0, 0)


def test_only_the_newest_spans_are_kept_and_the_others_are_counted() -> None:
    spans = Spans(limit=3)
    for number in range(5):
        spans.add(span(number))
    assert spans.take() == ([span(2), span(3), span(4)], 2)
    assert spans.take() == ([], 0)


def test_nothing_is_kept_while_it_is_off() -> None:
    recorder = Recorder()
    for kind in Kind:
        with recorder.during(kind):
            pass
    assert len(recorder.spans) == 0


def test_a_span_has_the_times_of_its_begin_and_end() -> None:
    recorder = Recorder()
    recorder.switch(True)
    before = time.perf_counter_ns()
    with recorder.during(Kind.COPY_OUT, 100, key=7, detail=2):
        inside = time.perf_counter_ns()
    (kept,), dropped = recorder.spans.take()
    assert kept == Span(kept.start, kept.end, Kind.COPY_OUT, 2, 100, 7)
    assert before <= kept.start <= inside <= kept.end <= time.perf_counter_ns()
    assert dropped == 0


def test_the_size_may_be_learnt_on_the_way() -> None:
    recorder = Recorder()
    recorder.switch(True)
    with recorder.during(Kind.REPLY) as sending:
        sending.size = 5
    assert [kept.size for kept in recorder.spans.take()[0]] == [5]


def test_a_recording_begins_without_what_an_earlier_one_left() -> None:
    recorder = Recorder()
    recorder.switch(True)
    with recorder.during(Kind.SET, 1):
        pass
    recorder.switch(False)
    recorder.switch(True)
    with recorder.during(Kind.SET, 2):
        pass
    recorder.switch(True)  # it goes on
    assert [kept.size for kept in recorder.spans.take()[0]] == [2]


def test_what_fails_is_over_too() -> None:
    recorder = Recorder()
    recorder.switch(True)
    with pytest.raises(OSError), recorder.during(Kind.GRAPH, 1, 2, 3):
        raise OSError
    (kept,), _ = recorder.spans.take()
    assert kept[2:] == (Kind.GRAPH, 3, 1, 2)
    before, after = recorder.activity.totals(), recorder.activity.totals()
    assert after.computing == before.computing


def test_taking_ends_while_others_go_on_adding() -> None:
    spans = Spans(limit=100)
    stop = threading.Event()

    def add() -> None:
        while not stop.is_set():
            spans.add(span(0))

    thread = threading.Thread(target=add)
    thread.start()
    taken = [len(spans.take()[0]) for _ in range(200)]
    stop.set()
    thread.join()
    assert all(count <= 100 for count in taken)


def test_computing_comes_before_waiting_before_sending() -> None:
    clock = Clock()
    activity = Activity(clock)
    for what in (SENDING, WAITING, COMPUTING):
        clock.now += 10
        activity.begin(what)
    for what in (COMPUTING, WAITING, SENDING):
        clock.now += 10
        activity.end(what)
    clock.now += 10
    assert activity.totals() == (70, 10, 20, 20)


steps = st.lists(
    st.tuples(st.sampled_from((COMPUTING, WAITING, SENDING, IDLE)), st.integers(0, 9)), max_size=30
)


@given(steps)
def test_no_moment_counts_twice(sequence: list[tuple[int, int]]) -> None:
    clock = Clock()
    activity = Activity(clock)
    going_on: list[int] = []
    for what, passed in sequence:
        clock.now += passed
        if what in going_on:
            going_on.remove(what)
            assert activity.end(what) == clock.now
        else:
            going_on.append(what)
            assert activity.begin(what) == clock.now
        totals = activity.totals()
        assert totals.now == clock.now >= sum(totals[1:])
        if going_on and min(going_on) == COMPUTING:
            before = totals.computing
            clock.now += 5
            assert activity.totals().computing == before + 5
