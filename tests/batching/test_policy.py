"""Who gets how much of a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from caravan.batching.lane import common
from caravan.batching.policy import Pace, share

PROMPTS = st.dictionaries(st.integers(0, 15), st.integers(1, 5000), max_size=16)


@given(PROMPTS, st.integers(0, 600))
def test_all_of_the_budget_is_used_and_no_more(prompts, budget):
    shares = share(prompts, budget)
    assert sum(shares.values()) == min(budget, sum(prompts.values()))
    assert all(0 < count <= prompts[slot] for slot, count in shares.items())


@given(PROMPTS, st.integers(16, 600))
def test_nobody_gets_less_than_an_equal_share_or_all_it_needs(prompts, budget):
    shares = share(prompts, budget)
    for slot, left in prompts.items():
        assert shares[slot] >= min(left, budget // len(prompts))


def test_a_short_prompt_is_not_behind_a_long_one():
    assert share({0: 4096, 1: 20}, 512) == {0: 492, 1: 20}


def test_pace_keeps_steps_short_within_its_bounds():
    pace = Pace(0.2, 32, 512)
    assert pace.budget == 32
    pace.note(32, 0.032)
    assert pace.budget == 200
    for _ in range(20):
        pace.note(100, 10.0)
    assert pace.budget == 32
    for _ in range(40):
        pace.note(100, 0.0001)
    assert pace.budget == 512


def test_the_bounds_of_pace_are_never_above_the_micro_batch():
    assert Pace(0.2, 32, 8).budget == 8


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_beginning(one, other):
    n = common(one, tuple(other))
    assert one[:n] == other[:n]
    assert n == min(len(one), len(other)) or one[n] != other[n]
