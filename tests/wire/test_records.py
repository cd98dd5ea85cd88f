"""The tensor records: every field where the formats have it."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from caravan.trace.spans import Kind, Span
from caravan.wire.commands import TENSOR_SIZE
from caravan.wire.records import EXT_TENSOR, RPC_TENSOR, SPAN

# field, offset, size
RPC_FIELDS = [
    ("id", 0, 8),
    ("type", 8, 4),
    ("buffer", 12, 8),
    ("ne", 20, 16),
    ("nb", 36, 16),
    ("op", 52, 4),
    ("op_params", 56, 64),
    ("flags", 120, 4),
    ("src", 124, 80),
    ("view_src", 204, 8),
    ("view_offs", 212, 8),
    ("data", 220, 8),
    ("name", 228, 64),
    ("use_count", 292, 4),
]
EXT_FIELDS = [
    ("ne", 0, 32),
    ("nb", 32, 32),
    ("data", 64, 8),
    ("view_offs", 72, 8),
    ("op_params", 80, 64),
    ("src", 144, 40),
    ("view_src", 184, 4),
    ("type", 188, 4),
    ("op", 192, 4),
    ("flags", 196, 4),
    ("use_count", 200, 4),
    ("name", 204, 64),
]

SPAN_FIELDS = [
    ("start", 0, 8),
    ("end", 8, 8),
    ("kind", 16, 4),
    ("detail", 20, 4),
    ("size", 24, 8),
    ("key", 32, 8),
]


def fields_of(dtype: np.dtype) -> list[tuple[str, int, int]]:
    assert dtype.names is not None and dtype.fields is not None
    return [(n, dtype.fields[n][1], dtype.fields[n][0].itemsize) for n in dtype.names]


def test_rpc_tensor_offsets():
    assert RPC_TENSOR.itemsize == TENSOR_SIZE == 296
    assert fields_of(RPC_TENSOR) == RPC_FIELDS


def test_ext_tensor_offsets():
    assert EXT_TENSOR.itemsize == 268
    assert fields_of(EXT_TENSOR) == EXT_FIELDS


def test_rpc_tensor_is_the_packed_struct():
    row = np.zeros(1, RPC_TENSOR)
    row["id"], row["type"], row["buffer"] = 1, 2, 3
    row["ne"], row["nb"] = (4, 5, 6, 7), (8, 9, 10, 11)
    row["op"], row["op_params"], row["flags"] = 12, range(-8, 8), 16
    row["src"], row["view_src"], row["view_offs"] = range(20, 30), 30, 31
    row["data"], row["name"], row["use_count"] = 2**63 + 1, b"blk.0", -1
    expected = struct.pack(
        "<QIQ4I4II16iI10QQQQ64si",
        *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        *range(-8, 8),
        *(16, *range(20, 30), 30, 31, 2**63 + 1, b"blk.0", -1),
    )
    assert row.tobytes() == expected


def test_all_fields_are_little_endian():
    for dtype in (RPC_TENSOR, EXT_TENSOR):
        assert dtype == dtype.newbyteorder("<")


def test_span_offsets():
    assert SPAN.itemsize == 40
    assert fields_of(SPAN) == SPAN_FIELDS
    assert SPAN.names == Span._fields


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(st.lists(st.builds(Span, u64, u64, st.sampled_from(Kind), u32, u64, u64), max_size=5))
def test_spans_come_back_as_they_were_packed(spans):
    data = np.array(spans, SPAN).tobytes()
    assert len(data) == 40 * len(spans)
    assert [Span(*values) for values in np.frombuffer(data, SPAN).tolist()] == spans
