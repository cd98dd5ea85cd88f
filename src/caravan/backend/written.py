"""Where a graph writes: the spans of memory that its nodes fill, from the rows that travel.

What a graph was given before may be gone after it, since the engine uses the memory of an input
again once nothing reads it any more. In doubt, more is said to be written than is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from caravan.engine import layouts
from caravan.wire.extension import ADDRESS_SHIFT

_U64 = npt.NDArray[np.uint64]
_LAST = np.uint64((1 << ADDRESS_SHIFT) - 1)
_NOTHING = np.isin(layouts.OP_NAMES, ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"))
# On a device that pads, what these ops write may be longer than the tensor: to keep what they need
# on the way, at its end.
_EXPANDING = np.isin(
    layouts.OP_NAMES, ("FLASH_ATTN_EXT", "MUL_MAT", "MUL_MAT_ID", "CUMSUM", "ARGSORT", "TOP_K")
)


def written(nodes: npt.NDArray[Any], pads: bool) -> list[tuple[int, int]]:
    """The spans that the nodes, rows of EXT_TENSOR, write: ascending, without overlaps.

    Args:
        pads: whether tensors may take more bytes on the device than their own.
    """
    writes = ~_NOTHING[nodes["op"]] & (nodes["data"] != 0) & (nodes["ne"] > 0).all(axis=1)
    nodes = nodes[writes]
    starts = nodes["data"].astype(np.uint64)
    types = nodes["type"]
    block = layouts.TYPE_BLOCK[types]
    steps = nodes["ne"] - 1
    steps[:, 0] //= block
    size = layouts.TYPE_BYTES[types] + (steps * nodes["nb"].astype(np.int64)).sum(axis=1)
    ends = starts + size.astype(np.uint64)
    if pads:
        longer = _EXPANDING[nodes["op"]] | (block > 1)
        ends[longer] = starts[longer] | _LAST
    return _merged(starts, ends)


def _merged(starts: _U64, ends: _U64) -> list[tuple[int, int]]:
    if not len(starts):
        return []
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    # a span begins where everything before has ended
    first = np.flatnonzero(np.append(True, starts[1:] > ends[:-1]))
    last = np.append(first[1:] - 1, len(ends) - 1)
    return list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))
