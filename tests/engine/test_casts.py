"""Numbers that lose digits and get zeros back, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from caravan import engine
from caravan.engine import casts

VALUES = np.concatenate(
    [
        np.array([0.0, -0.0, 1.0, -1.5, 65504.0, 65519.9, 6e-8, np.inf, -np.inf], np.float32),
        np.random.default_rng(1).standard_normal(1000).astype(np.float32) * 100,
    ]
)


def there_and_back(values: np.ndarray, word: str) -> np.ndarray:
    ggml = engine.load().ggml
    data = casts.narrow(ggml, values.ctypes.data, values.nbytes, word)
    assert len(data) == values.nbytes // 2
    result = np.full_like(values, 7)
    casts.widen(ggml, data, result.ctypes.data, word)
    return result


def rounded_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return ((bits >> 16) << 16).astype(np.uint32).view(np.float32)


def test_f16_is_the_nearest():
    expected = VALUES.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(there_and_back(VALUES, "f16"), expected)


def test_bf16_is_the_nearest():
    np.testing.assert_array_equal(there_and_back(VALUES, "bf16"), rounded_bf16(VALUES))


def test_what_f16_cannot_hold_is_infinite_and_bf16_holds_it():
    big = np.array([65520.0, 1e6, -3e38], np.float32)
    assert there_and_back(big, "f16").tolist() == [np.inf, np.inf, -np.inf]
    np.testing.assert_allclose(there_and_back(big, "bf16"), big, rtol=2**-8)


@pytest.mark.parametrize("word", ["f16", "bf16"])
def test_nan_stays_nan(word):
    assert np.isnan(there_and_back(np.array([np.nan], np.float32), word)).all()


@pytest.mark.parametrize("word", ["f16", "bf16"])
def test_nothing_is_nothing(word):
    ggml = engine.load().ggml
    assert casts.narrow(ggml, 0, 0, word) == b""
    casts.widen(ggml, b"", 0, word)


@pytest.mark.parametrize("word", ["f16", "bf16"])
def test_the_bytes_may_begin_anywhere(word):
    ggml = engine.load().ggml
    data = bytes(casts.narrow(ggml, VALUES.ctypes.data, VALUES.nbytes, word))
    for shift in (1, 2):
        result = np.zeros_like(VALUES)
        casts.widen(ggml, memoryview(bytes(shift) + data)[shift:], result.ctypes.data, word)
        np.testing.assert_array_equal(result, there_and_back(VALUES, word))
