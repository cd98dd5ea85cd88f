"""Where a graph writes, against ggml's own sizes and a list of bytes."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan import engine
from caravan.backend.written import written
from caravan.engine import layouts
from caravan.wire.extension import ADDRESS_SHIFT
from caravan.wire.records import EXT_TENSOR

ADD = layouts.OP_NAMES.index("ADD")
MUL_MAT = layouts.OP_NAMES.index("MUL_MAT")
BASE = 3 << ADDRESS_SHIFT
END = (4 << ADDRESS_SHIFT) - 1


def node(ne, data: int, op: int = ADD, kind: int = 0) -> np.ndarray:
    row = np.zeros(1, EXT_TENSOR)
    ne = [*ne, 1, 1, 1][:4]
    row["ne"] = ne
    size, block = int(layouts.TYPE_BYTES[kind]), int(layouts.TYPE_BLOCK[kind])
    nb = [size, size * ne[0] // block]
    row["nb"] = [*nb, nb[1] * ne[1], nb[1] * ne[1] * ne[2]]
    row["data"], row["op"], row["type"] = data, op, kind
    return row


def spans(*nodes: np.ndarray, pads: bool = False) -> list[tuple[int, int]]:
    return written(np.concatenate(nodes), pads)


def test_spans_are_merged_and_ascend():
    assert spans(
        node((2, 3), BASE + 100),
        node((2, 3), BASE),
        node((2,), BASE + 24),
        node((1,), BASE + 104),
    ) == [(BASE, BASE + 32), (BASE + 100, BASE + 124)]


@pytest.mark.parametrize("name", ["NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"])
def test_what_computes_nothing_writes_nothing(name):
    assert spans(node((2,), BASE, layouts.OP_NAMES.index(name))) == []


def test_what_is_empty_or_nowhere_writes_nothing():
    assert spans(node((2, 0), BASE), node((2,), 0)) == []


def test_padding_is_up_to_the_end_of_the_buffer():
    plain, product = node((2,), BASE), node((2,), BASE + 64, MUL_MAT)
    quantised = node((64,), BASE + 32, kind=8)
    assert spans(plain, product) == [(BASE, BASE + 8), (BASE + 64, BASE + 72)]
    assert spans(plain, product, pads=True) == [(BASE, BASE + 8), (BASE + 64, END)]
    assert spans(plain, quantised, pads=True) == [(BASE, BASE + 8), (BASE + 32, END)]


def test_handles_up_to_the_last():
    last = ((1 << 24) - 1) << ADDRESS_SHIFT
    assert spans(node((2,), last)) == [(last, last + 8)]
    assert spans(node((2,), last, MUL_MAT), pads=True) == [(last, (1 << 64) - 1)]


@given(
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.permutations(range(4)),
    st.sampled_from([0, 1, 8, 12, 26, 27, 30]),
)
@settings(max_examples=100, deadline=None)
def test_one_node_takes_what_ggml_says(ne, order, kind):
    """Also with strides in another order, as permuted views have them."""
    ne[0] *= int(layouts.TYPE_BLOCK[kind])
    row = node(ne, BASE, kind=kind)
    if layouts.TYPE_BLOCK[kind] == 1:
        row["ne"], row["nb"] = row["ne"][:, order], row["nb"][:, order]
    tensor = np.zeros(1, layouts.GGML_TENSOR)
    for field in ("ne", "nb", "type"):
        tensor[field] = row[field]
    size = engine.load().ggml.nbytes(ctypes.c_void_p(tensor.ctypes.data))
    assert spans(row) == [(BASE, BASE + size)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12))
def test_the_spans_are_the_bytes(found):
    nodes = np.concatenate([np.zeros(0, EXT_TENSOR), *(node((n,), BASE + at) for at, n in found)])
    wanted = {byte for at, n in found for byte in range(at, at + 4 * n)}
    result = written(nodes, False)
    assert {b - BASE for start, end in result for b in range(start, end)} == wanted
    assert all(one[1] < two[0] for one, two in itertools.pairwise(result))
