"""The vectorised hash against its definition."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from caravan.wire import fnv
from caravan.wire.fnv import BASIS, fnv1a_64

BLOCK = fnv._RUN * fnv._RUNS


def by_bytes(data: bytes, state: int = BASIS) -> int:
    for byte in data:
        state = ((state ^ byte) * 0x100000001B3) % 2**64
    return state


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize(
    ("data", "digest"),
    [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)],
)
def test_known_vectors(data, digest):
    assert fnv1a_64(data) == digest


@given(
    size=st.integers(0, 3 * fnv._SMALL),
    start=st.integers(0, 70),
    state=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 2**32),
)
@example(fnv._SMALL - 1, 0, BASIS, 0)
@example(fnv._SMALL, 1, BASIS, 1)
@example(fnv._SMALL + fnv._RUN - 1, 3, 0, 2)
@example(fnv._SMALL + fnv._RUN, 0, 2**64 - 1, 3)
def test_any_size_place_and_state(size, start, state, seed):
    data = noise(start + size, seed)
    assert fnv1a_64(memoryview(data)[start:], state) == by_bytes(data[start:], state)


@pytest.mark.parametrize(
    "size",
    [
        *(BLOCK - fnv._RUN, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + fnv._SMALL - 1),
        *(BLOCK + fnv._SMALL, BLOCK + fnv._SMALL + fnv._RUN + 1, 2 * BLOCK + 5),
    ],
)
def test_at_the_borders_of_a_block(size):
    data = noise(size, size)
    assert fnv1a_64(data) == by_bytes(data)


@pytest.mark.parametrize("byte", [0, 0x7F, 0x80, 0xFF])
def test_of_one_byte_again_and_again(byte):
    data = bytearray([byte]) * (2 * fnv._SMALL + 7)
    assert fnv1a_64(data) == by_bytes(data)


@given(cuts=st.lists(st.integers(0, 30_000), max_size=5))
def test_in_pieces_it_is_the_same(cuts):
    data = noise(30_000)
    state = BASIS
    edges = [0, *sorted(cuts), len(data)]
    for start, end in pairwise(edges):
        state = fnv1a_64(memoryview(data)[start:end], state)
    assert state == fnv1a_64(data)
