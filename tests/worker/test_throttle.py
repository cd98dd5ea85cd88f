"""Who fails again and again waits longer and longer, and nobody else does."""

from __future__ import annotations

import pytest

from caravan.worker import throttle
from caravan.worker.throttle import Throttle, group


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_each_failure_takes_twice_as_long_up_to_a_bound(clock):
    watched = Throttle(clock)
    assert [watched.failed("a") for _ in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    for _ in range(5000):
        assert watched.failed("a") == 5.0


def test_addresses_are_counted_apart(clock):
    watched = Throttle(clock)
    for _ in range(4):
        watched.failed("a")
    assert watched.failed("b") == 0.2
    assert watched.failed("a") == 3.2


def test_success_is_a_new_beginning(clock):
    watched = Throttle(clock)
    for _ in range(4):
        watched.failed("a")
    watched.succeeded("a")
    watched.succeeded("never seen")
    assert watched.failed("a") == 0.2


def test_so_is_a_while_without_a_failure(clock):
    watched = Throttle(clock)
    for _ in range(3):
        watched.failed("a")
    clock.now += throttle.FORGIVEN_SECONDS
    assert watched.failed("a") == 1.6
    clock.now += throttle.FORGIVEN_SECONDS + 1
    assert watched.failed("a") == 0.2


def test_so_many_are_remembered_and_those_that_failed_last(clock):
    watched = Throttle(clock)
    for _ in range(3):
        watched.failed("constant")
    for n in range(3 * throttle.MAX_ADDRESSES):
        watched.failed(f"stranger {n}")
        if n % 100 == 0:
            watched.failed("constant")
    assert len(watched._failures) == throttle.MAX_ADDRESSES
    assert watched.failed("constant") == 5.0
    assert watched.failed("stranger 0") == 0.2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8::1", "2001:db8:0:0:ffff:1::", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("", "", True),
        ("", "127.0.0.1", False),
    ],
)
def test_what_counts_as_one_address(one, other, same):
    assert (group(one) == group(other)) is same
