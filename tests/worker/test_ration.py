"""Strangers can make a worker say so much and no more, and nothing is left out without a word."""

from __future__ import annotations

import pytest

from caravan.worker import ration
from caravan.worker.ration import Ration
from worker.test_throttle import Clock


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rationed(said, clock) -> Ration:
    return Ration(said.append, clock)


def test_a_few_lines_are_said_as_they_come(rationed, said):
    for n in range(ration.MOST_OF_ONE):
        rationed.tell("a", f"a{n}")
        rationed.tell("b", f"b{n}")
    assert said == [f"{who}{n}" for n in range(ration.MOST_OF_ONE) for who in "ab"]
    assert rationed.patience() is None


def test_of_one_address_there_are_no_more_and_others_are_heard(rationed, said, clock):
    for _ in range(1000):
        rationed.tell("loud", "closing the connection to loud")
    rationed.tell("quiet", "closing the connection to quiet")
    assert said == ["closing the connection to loud"] * 5 + ["closing the connection to quiet"]
    assert rationed.patience() == ration.WINDOW_SECONDS
    clock.now += ration.WINDOW_SECONDS
    rationed.tick()
    assert said[6:] == ["and 995 more such lines in the last minute"]
    assert rationed.patience() is None
    rationed.tick()
    rationed.tell("loud", "again")
    assert said[7:] == ["again"]


def test_many_addresses_are_bounded_too(rationed, said, clock):
    for n in range(10_000):
        rationed.tell(f"stranger {n}", "closing a connection")
    assert len(said) == ration.MOST
    assert len(rationed._said) == ration.MOST
    clock.now += ration.WINDOW_SECONDS + 1
    rationed.tell("somebody", "later")
    assert said[ration.MOST :] == [
        f"and {10_000 - ration.MOST} more such lines in the last minute",
        "later",
    ]


def test_nothing_is_added_where_nothing_was_left_out(rationed, said, clock):
    rationed.tell("a", "once")
    clock.now += 1000
    rationed.tick()
    assert said == ["once"]


def test_nothing_is_left_out_at_the_end(rationed, said):
    rationed.finish()
    assert said == []
    for _ in range(7):
        rationed.tell("a", "a line")
    rationed.finish()
    assert said == ["a line"] * 5 + ["and 2 more such lines in the last minute"]
