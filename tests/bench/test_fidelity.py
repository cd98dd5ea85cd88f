"""The numbers that say how far logits are from those that they should be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from caravan.bench.fidelity import Fidelity, compare


def logits(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_the_same_is_the_same():
    some = logits((1, 2, 3), (-5, 0, 1000))
    assert compare(some, some) == Fidelity(2, 0.0, 0.0, 1.0)


def test_a_shift_of_all_changes_no_probability():
    some = logits((1, 2, 3), (-5, 0, 10))
    found = compare(some, some + np.float32(0.5))
    assert (found.max_difference, found.same_top) == (0.5, 1.0)
    assert found.mean_kl == pytest.approx(0, abs=1e-12)


def test_known_distributions():
    expected = np.log(logits((0.5, 0.25, 0.25), (0.1, 0.8, 0.1)))
    found = np.log(logits((0.25, 0.5, 0.25), (0.1, 0.8, 0.1)))
    result = compare(expected, found)
    assert result.n_tokens == 2
    assert result.max_difference == pytest.approx(math.log(2), rel=1e-6)
    assert result.mean_kl == pytest.approx(0.25 * math.log(2) / 2, rel=1e-6)
    assert result.same_top == 0.5


@pytest.mark.parametrize("shape", [(0, 5), (2, 4), (3, 5)])
def test_shapes_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match="logits of shapes"):
        compare(np.zeros(shape, np.float32), np.zeros((2, 5) if shape[0] else shape, np.float32))
