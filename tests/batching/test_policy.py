"""Who gets how much of a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from caravan.batching.lane import common
from caravan.batching.policy import Pace, Prompt, part, plan
from caravan.llm.shared import TILE

SIZES = st.integers(1, 5000)
UBATCH = st.sampled_from([8, 32, 64, 100, 512, 2048])


def parts(total: int, budgets: list[int], n_ubatch: int) -> list[int]:
    """All parts of a prompt, with these budgets in turn."""
    found: list[int] = []
    while sum(found) < total:
        budget = budgets[len(found) % len(budgets)]
        found.append(part(sum(found), total, budget, n_ubatch))
    return found


@given(SIZES, st.lists(st.integers(1, 3000), min_size=1), UBATCH)
def test_each_token_is_where_it_is_when_the_prompt_is_alone(total, budgets, n_ubatch):
    alone, shared = parts(total, [n_ubatch], n_ubatch), parts(total, budgets, n_ubatch)
    assert sum(alone) == sum(shared) == total
    assert alone[:-1] == [n_ubatch] * (len(alone) - 1)
    assert max(shared) <= n_ubatch

    def small(sizes: list[int]) -> list[bool]:
        return [size < TILE for size in sizes for _ in range(size)]

    assert small(shared) == small(alone)


@given(SIZES, st.integers(1, 3000), UBATCH)
def test_a_part_is_about_as_large_as_it_may_be(total, budget, n_ubatch):
    found = part(0, total, budget, n_ubatch)
    assert found <= max(budget, 2 * TILE - 1)
    assert found >= min(total, n_ubatch, max(budget - TILE, 1))


PROMPTS = st.lists(st.tuples(st.integers(0, 500), SIZES, st.integers(-1, 9)), max_size=8)


@given(PROMPTS, st.integers(-5, 600))
def test_somebody_is_served_and_nobody_waits_for_ever(found, budget):
    prompts = [Prompt(n, done, done + left, served) for n, (done, left, served) in enumerate(found)]
    planned = plan(prompts, max(budget, 1), 512)
    assert bool(planned) == bool(prompts)
    chosen = [prompts[slot] for slot, _ in planned]
    others = [prompt for prompt in prompts if prompt not in chosen]
    assert all(one.served <= other.served for one in chosen for other in others)


def test_a_short_prompt_is_not_behind_a_long_one():
    long, short = Prompt(0, 512, 4096, 7), Prompt(1, 0, 20, -1)
    assert plan([long, short], 512, 512) == [(1, 20), (0, 448)]
    assert plan([long, short], 64, 512) == [(1, 20), (0, 64)]
    assert plan([long, short], 20, 512) == [(1, 20)]


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
