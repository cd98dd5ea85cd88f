"""Tensor records as NumPy dtypes: the base protocol's rpc_tensor and the extension's row.

A graph travels as an array of one of these; it is the wire format itself, so converting a graph is
one vectorised copy. Format of RPC_TENSOR: ggml-rpc; of EXT_TENSOR: docs/protocol.md.
"""

from __future__ import annotations

import numpy as np

RPC_TENSOR = np.dtype(
    [
        ("id", "<u8"),
        ("type", "<u4"),
        ("buffer", "<u8"),
        ("ne", "<u4", 4),
        ("nb", "<u4", 4),
        ("op", "<u4"),
        ("op_params", "<i4", 16),
        ("flags", "<i4"),
        ("src", "<u8", 10),
        ("view_src", "<u8"),
        ("view_offs", "<u8"),
        ("data", "<u8"),
        ("name", "S64"),
        ("use_count", "<i4"),
    ]
)

# Sources and views are indices into the same table (-1: none), which no peer can dangle; shapes and
# strides keep their 64 bits. `data` is an address that the worker gave out, 0 for "not here".
EXT_TENSOR = np.dtype(
    [
        ("ne", "<i8", 4),
        ("nb", "<u8", 4),
        ("data", "<u8"),
        ("view_offs", "<u8"),
        ("op_params", "<i4", 16),
        ("src", "<i4", 10),
        ("view_src", "<i4"),
        ("type", "<u4"),
        ("op", "<u4"),
        ("flags", "<i4"),
        ("use_count", "<i4"),
        ("name", "S64"),
    ]
)

# One `trace.spans.Span` of a TIMELINE reply, in the order of its fields.
SPAN = np.dtype(
    [
        ("start", "<u8"),
        ("end", "<u8"),
        ("kind", "<u4"),
        ("detail", "<u4"),
        ("size", "<u8"),
        ("key", "<u8"),
    ]
)

if SPAN.itemsize != 40:
    raise AssertionError("span records do not have the size that the wire prescribes")
if RPC_TENSOR.itemsize != 296 or EXT_TENSOR.itemsize != 268:
    raise AssertionError("tensor records do not have the sizes that the wire prescribes")
