"""Times at points of a grid, between them and beyond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan.plan.simulator import lines
from caravan.plan.times import Grid

# 10 a token, and 1 for each token and 100 entries, in each of two layers; the second has twice that
TOKENS, KV = (1, 64, 512), (512, 4096)


def seconds(n_tokens: int, n_kv: int) -> float:
    return 10 * n_tokens + n_tokens * n_kv / 100


GRID = Grid(
    TOKENS, KV, np.array([[[seconds(n, k) * f for f in (1, 2)] for k in KV] for n in TOKENS])
)


@pytest.mark.parametrize("n_tokens", [1, 30, 64, 300, 512, 600])
@pytest.mark.parametrize("n_kv", [256, 512, 1024, 4096, 8192])
def test_a_line_is_followed_between_the_points_and_beyond_them(n_tokens, n_kv):
    one, other = GRID.at(n_tokens, n_kv)
    assert one == pytest.approx(seconds(n_tokens, n_kv))
    assert other == pytest.approx(2 * one)


def test_nothing_is_faster_than_the_fewest_tokens_looked_at():
    few = Grid(TOKENS[1:], KV, GRID.seconds[1:])
    assert few.at(1, 512).tolist() == few.at(64, 512).tolist()


def test_no_time_is_negative():
    steep = Grid((64,), KV, np.array([[[1.0], [100.0]]]))
    assert steep.at(64, 256).tolist() == [0.0]
    assert lines(steep, 0, 1)(64, 256) == 0.0


@given(st.integers(1, 1000), st.integers(1, 40).map(lambda blocks: blocks * 256))
def test_the_simulator_sums_up_the_same(n_tokens, n_kv):
    assert lines(GRID, 0, 2)(n_tokens, n_kv) == pytest.approx(GRID.at(n_tokens, n_kv).sum())
