"""How activations may travel, and what is refused."""

from __future__ import annotations

import pytest

from caravan.errors import RemoteProtocolError, UsageError
from caravan.wire.dtypes import MAX_CAST, WireType, decode_wire_type, wire_type


def test_halves_travel():
    assert [dtype.travels(64) for dtype in WireType] == [64, 32, 32]
    assert [int(dtype) for dtype in WireType] == [0, 1, 2]


def test_words():
    assert [wire_type(word) for word in ("f32", "f16", "bf16")] == list(WireType)
    assert [dtype.word for dtype in WireType] == ["f32", "f16", "bf16"]
    for word in ("F16", "", "q8_0"):
        with pytest.raises(UsageError, match="none of f32, f16, bf16"):
            wire_type(word)


def test_as_it_is_any_bytes_do():
    assert decode_wire_type(0, 3, 7) is WireType.F32
    assert decode_wire_type(0, 3, 1 << 40) is WireType.F32


@pytest.mark.parametrize("number", [1, 2])
def test_whole_numbers_are_converted(number):
    assert decode_wire_type(number, 8, 12) == number
    assert decode_wire_type(number, 8, 0) == number
    for address, size in ((8, 1), (8, 2), (8, 6), (9, 4), (10, 4)):
        with pytest.raises(RemoteProtocolError, match="are no f32"):
            decode_wire_type(number, address, size)
    decode_wire_type(number, 8, 2 * MAX_CAST)
    for size in (2 * MAX_CAST + 4, 1 << 63):
        with pytest.raises(RemoteProtocolError, match="too many"):
            decode_wire_type(number, 8, size)


@pytest.mark.parametrize("number", [3, 30, 2**32 - 1])
def test_other_numbers_are_none(number):
    with pytest.raises(RemoteProtocolError, match=f"data type {number} is not known"):
        decode_wire_type(number, 8, 8)
