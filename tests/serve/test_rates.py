"""Tokens a second, from totals."""

from __future__ import annotations

import pytest

from caravan.serve.rates import SECONDS, Rates, rounded
from serve.played import PlayedBatcher


def test_rates_are_differences_by_the_time_between():
    rates, batcher = Rates(), PlayedBatcher()
    rates.add(batcher.state(), 100.0)
    assert rates.gen[-1] is None and rates.idle
    batcher.totals |= {"n_gen": 10, "n_prompt": 64, "busy_seconds": 1.0}
    rates.add(batcher.state(), 102.0)
    assert (rates.gen[-1], rates.prompt[-1], rates.busy) == (5.0, 32.0, 0.5)
    assert not rates.idle
    batcher.totals["busy_seconds"] += 3.0
    rates.add(batcher.state(), 103.0)
    assert (rates.gen[-1], rates.busy) == (0.0, 1.0) and rates.idle
    assert len(rates.gen) == len(rates.prompt) == SECONDS


def test_a_clock_that_stands_gives_no_rates():
    rates, batcher = Rates(), PlayedBatcher()
    rates.add(batcher.state(), 1.0)
    rates.add(batcher.state(), 1.0)
    assert rates.gen[-1] is None and rates.busy is None


def test_series_for_json():
    rates = Rates()
    rates.gen.append(1 / 3)
    assert rounded(rates.gen)[-2:] == [None, pytest.approx(0.333)]
