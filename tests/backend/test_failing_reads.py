"""A read that cannot even be asked for leaves zeros, not what happened to be in the memory."""

from __future__ import annotations

import ctypes

import pytest

from caravan.backend import buffer


def test_a_read_of_an_unknown_buffer_gives_zeros() -> None:
    memory = (ctypes.c_ubyte * 8)(*b"\xff" * 8)
    with pytest.raises(KeyError):
        buffer.get_tensor(1, 0, ctypes.addressof(memory), 0, 6)
    assert bytes(memory) == b"\0" * 6 + b"\xff" * 2
