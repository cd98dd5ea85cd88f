"""Rules of attention over keys and values: flash attention, and the choice of keys."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import F16, F32, Nodes, rule
from caravan.worker.rules.rows import require_mask, require_sinks

# The kernel's tiles, of which each thread has some, are as wide as a head.
_MOST_WIDTH = 1 << 16
_PRECISIONS = (0, 10)


@rule("FLASH_ATTN_EXT", sources=3)
def flash_attn_ext(nodes: Nodes) -> None:
    d, q, k, v = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    nodes.require(d.is_type(F32) & q.is_type(F32), "result or queries are not f32")
    nodes.require(q.ne[:, 0] == k.ne[:, 0], "queries and keys differ in length")
    nodes.require(v.ne[:, 1] == k.ne[:, 1], "keys and values differ in number")
    nodes.require((k.ne[:, 0] <= _MOST_WIDTH) & (v.ne[:, 0] <= _MOST_WIDTH), "a head is too wide")
    nodes.require(
        (q.ne[:, 2] % np.maximum(k.ne[:, 2], 1) == 0)
        & (q.ne[:, 2] % np.maximum(v.ne[:, 2], 1) == 0),
        "heads do not divide",
    )
    nodes.require((q.ne[:, 3] == k.ne[:, 3]) & (q.ne[:, 3] == v.ne[:, 3]), "sequences differ")
    nodes.require(
        d.has_shape(v.ne[:, 0], q.ne[:, 2], q.ne[:, 1], q.ne[:, 3]),
        "the result has the wrong shape",
    )
    # The kernel writes its rows at multiples of nb[1].
    nodes.require(d.contiguous & d.ascending, "the result is not contiguous")
    nodes.require(d.nb[:, 1] == d.ne[:, 0] * d.size, "the result is not contiguous")
    nodes.require(k.multiplies & (v.readable | v.is_type(F32)), "a type without arithmetic")
    nodes.require(q.packed & k.packed & v.packed, "elements of a row are not adjacent")
    nodes.require(np.isin(nodes.params(3), _PRECISIONS), "unknown precision")
    masked = nodes.with_source(3)
    if masked is not None:
        masked.require(masked.s(3).is_type(F16), "the mask is not f16")
        require_mask(masked, 3, masked.s(1).ne[:, 1], masked.s(0).ne[:, 1:])
    sunk = nodes.with_source(4)
    if sunk is not None:
        require_sinks(sunk, 4)


@rule("LIGHTNING_INDEXER", sources=4)
def lightning_indexer(nodes: Nodes) -> None:
    """Queries [E, H, T, S], keys [E, 1, K, S], weights [H, T, 1, S], mask [K, T, 1, S']; the
    result is [K, T, 1, S]."""
    d, q, k, w, mask = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2), nodes.s(3)
    nodes.require(
        d.is_type(F32) & q.is_type(F32) & w.is_type(F32), "result, queries or weights are not f32"
    )
    nodes.require(mask.is_type(F16), "the mask is not f16")
    nodes.require(k.readable, "a type without arithmetic")
    length, heads, tokens, streams = q.ne.T
    nodes.require(k.has_shape(length, 1, k.ne[:, 2], streams), "the keys have the wrong shape")
    nodes.require(w.has_shape(heads, tokens, 1, streams), "the weights have the wrong shape")
    nodes.require(
        mask.has_shape(k.ne[:, 2], tokens, 1, mask.ne[:, 3]), "the mask has the wrong shape"
    )
    nodes.require(streams % np.maximum(mask.ne[:, 3], 1) == 0, "the mask does not repeat")
    nodes.require(d.has_shape(k.ne[:, 2], tokens, 1, streams), "the result has the wrong shape")
    for tensor in (d, q, k, w, mask):
        nodes.require(tensor.packed, "elements of a row are not adjacent")
