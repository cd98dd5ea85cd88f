"""How much of its time work behind the scenes gets."""

from __future__ import annotations

import pytest

from caravan.worker.pace import Pace


class World:
    """A clock, and what else goes on in it: bytes a second, and the share that is computed."""

    def __init__(self, rate: float = 0.0, share: float = 0.0) -> None:
        self.now = 100.0
        self.rate = rate
        self.share = share
        self.arrived = 0.0
        self.computed = 0.0
        self.slept = 0.0
        self.pace = Pace(lambda: (int(self.arrived), int(self.computed)), lambda: self.now)
        self.pace.begin()

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.arrived += self.rate * seconds
        self.computed += self.share * seconds * 1e9
        return False

    def sleep(self, seconds: float) -> bool:
        self.slept += seconds
        return self.wait(seconds)

    def work(self, pieces: int, took: float) -> float:
        """The share of the time that is rest."""
        start, self.slept = self.now, 0.0
        for _ in range(pieces):
            self.wait(took)
            self.pace.rest(took, self.sleep)
        return self.slept / (self.now - start)


@pytest.mark.parametrize(("rate", "share"), [(1e9, 0.0), (0.0, 0.5), (450e6, 0.0), (1e8, 0.1)])
def test_while_others_are_busy_it_rests_for_nearly_all_of_the_time(rate, share):
    assert World(rate, share).work(50, 0.004) == pytest.approx(0.95)


@pytest.mark.parametrize(("rate", "share"), [(0.0, 0.0), (125e6, 0.0), (350e6, 0.005)])
def test_otherwise_it_does_not_rest(rate, share):
    world = World(rate, share)
    world.work(5, 0.004)
    assert world.work(50, 0.004) == 0


def test_at_first_it_takes_others_to_be_busy():
    world = World()
    assert world.work(1, 0.004) == pytest.approx(0.95)
    world.wait(60)
    world.pace.begin()
    assert world.work(1, 0.004) == pytest.approx(0.95)


def test_a_long_rest_ends_when_the_others_are_done():
    world = World(1e9)
    world.work(3, 0.004)

    def sleep(seconds: float) -> bool:
        world.rate = 0.0
        return world.sleep(seconds)

    world.slept = 0.0
    world.pace.rest(10.0, sleep)
    assert 0 < world.slept < 0.5


def test_a_rest_ends_at_once_when_there_is_no_time_left():
    world = World(1e9)
    calls = []

    def sleep(seconds: float) -> bool:
        calls.append(seconds)
        return True

    world.pace.rest(10.0, sleep)
    assert len(calls) == 1
