"""How far another clock is off, against one whose error is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from caravan.trace.clock import Alignment, Reading, read_clock

SECOND = 1_000_000_000


class World:
    """A head's clock, and a worker whose clock is `offset` ahead, on a road of given delays."""

    def __init__(self, offset: int, delays: list[tuple[int, int]]) -> None:
        self.now = 5 * SECOND
        self.offset = offset
        self.delays = iter(delays)

    def clock(self) -> int:
        return self.now

    def ask(self) -> int:
        there, back = next(self.delays)
        self.now += there
        theirs = self.now + self.offset
        self.now += back
        return theirs


delays = st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=9)


@given(st.integers(0, 2**62), delays)
def test_the_offset_is_as_sure_as_it_says(offset: int, roads: list[tuple[int, int]]) -> None:
    world = World(offset, roads)
    reading = read_clock(world.ask, len(roads), world.clock)
    assert abs(reading.offset - offset) <= reading.uncertainty
    assert reading.uncertainty == min((there + back + 1) // 2 for there, back in roads)


def test_a_slow_way_back_does_not_disturb_if_one_round_trip_was_quick() -> None:
    world = World(777, [(50, 10**9), (20, 20), (10**9, 50)])
    assert read_clock(world.ask, 3, world.clock).offset == 777


def test_one_reading_holds_for_all_time() -> None:
    alignment = Alignment(Reading(0, 100, 7))
    assert [alignment.to_head(theirs) for theirs in (0, 100, SECOND)] == [-100, 0, SECOND - 100]
    assert alignment.uncertainty == 7


def test_of_two_readings_that_agree_the_surer_one_holds() -> None:
    alignment = Alignment(Reading(0, 100, 50), Reading(SECOND, 120, 5))
    assert alignment.to_head(0) == -120
    assert alignment.uncertainty == 5


def test_clocks_that_run_apart_are_followed() -> None:
    # the worker's gains 100 ns a second
    alignment = Alignment(Reading(0, 1000, 5), Reading(10 * SECOND, 2000, 6))
    for seconds in (0, 5, 10, 20):
        theirs = seconds * SECOND + 1000 + 100 * seconds
        assert abs(alignment.to_head(theirs) - seconds * SECOND) <= 1
    assert alignment.uncertainty == 6


@given(
    st.integers(-(10**12), 10**12),
    st.integers(-200, 200),
    st.lists(st.integers(0, 600 * SECOND), min_size=2, max_size=20),
)
def test_order_is_kept(offset: int, drift_ppm: int, times: list[int]) -> None:
    last = offset + 600 * drift_ppm * 1000
    alignment = Alignment(Reading(0, offset, 10), Reading(600 * SECOND, last, 10))
    aligned = [alignment.to_head(theirs + offset) for theirs in sorted(times)]
    assert aligned == sorted(aligned)
