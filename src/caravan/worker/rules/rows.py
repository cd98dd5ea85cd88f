"""Rules of ops that work on whole rows: norms, sums, rotary positions, softmax, attention."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import F16, F32, I32, I64, Nodes, rule

_ROPE_MODES = (0, 2, 8, 24, 40)


@rule("NORM", "RMS_NORM", "L2_NORM", sources=1)
def norm(nodes: Nodes) -> None:
    row_by_row(nodes)
    # false for NaN too, which the kernels do not take
    nodes.require(nodes.params(0).view(np.float32) >= 0, "epsilon is negative")


@rule("GROUP_NORM", sources=1)
def group_norm(nodes: Nodes) -> None:
    row_by_row(nodes)
    nodes.require(nodes.params(0) > 0, "no groups")
    nodes.require(nodes.params(1).view(np.float32) >= 0, "epsilon is negative")


@rule("CUMSUM", sources=1)
def row_by_row(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(d.is_type(F32) & s0.is_type(F32), "result or source is not f32")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


@rule("SUM_ROWS", "MEAN", sources=1)
def sum_rows(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.ne[:, 0] == 1, "the result's rows have more than one element")
    nodes.require((d.ne[:, 1:] == s0.ne[:, 1:]).all(axis=1), "result and source differ in rows")
    nodes.require(d.is_type(F32) & s0.is_type(F32), "result or source is not f32")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


@rule("ROPE", sources=2)
def rope(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    n_dims, mode, offset = nodes.params(1), nodes.params(2), nodes.params(15)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require((d.type == s0.type) & s0.is_type(F32, F16), "result and source differ in type")
    nodes.require(np.isin(mode, _ROPE_MODES), "unknown mode")
    nodes.require((n_dims > 0) & (n_dims % 2 == 0), "the number of dimensions is not even")
    nodes.require((offset >= 0) & (offset % 2 == 0), "the offset is not even")
    nodes.require(
        (n_dims.astype(np.int64) + offset <= s0.ne[:, 0]) & (s0.ne[:, 0] % 2 == 0),
        "more dimensions than a row has",
    )
    positions = s0.ne[:, 2] * np.where(mode & 8, 4, 1)
    nodes.require(s1.is_type(I32) & s1.packed, "positions are not i32")
    nodes.require(s1.ne[:, 0] >= positions, "too few positions")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")
    scaled = nodes.with_source(2)
    if scaled is not None:
        s2 = scaled.s(2)
        scaled.require(s2.is_type(F32) & s2.packed, "frequency factors are not f32")
        scaled.require(s2.ne[:, 0] >= scaled.params(1) // 2, "too few frequency factors")


@rule("SOFT_MAX", sources=1)
def soft_max(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(d.is_type(F32) & s0.is_type(F32), "result or source is not f32")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")
    masked = nodes.with_source(1)
    if masked is not None:
        _mask(masked, 1, masked.s(0).ne[:, 0], masked.s(0).ne[:, 1:])
        masked.require(masked.s(1).is_type(F32, F16), "the mask is neither f32 nor f16")
        masked.require(masked.s(1).contiguous, "the mask is not contiguous")
    sunk = nodes.with_source(2)
    if sunk is not None:
        s2 = sunk.s(2)
        sunk.require(s2.is_type(F32) & s2.packed, "sinks are not f32")
        sunk.require(s2.ne[:, 0] == sunk.s(0).ne[:, 2], "sinks do not match the heads")


@rule("FLASH_ATTN_EXT", sources=3)
def flash_attn_ext(nodes: Nodes) -> None:
    d, q, k, v = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    nodes.require(d.is_type(F32) & q.is_type(F32), "result or queries are not f32")
    nodes.require(q.ne[:, 0] == k.ne[:, 0], "queries and keys differ in length")
    nodes.require(v.ne[:, 1] == k.ne[:, 1], "keys and values differ in number")
    nodes.require(
        (q.ne[:, 2] % np.maximum(k.ne[:, 2], 1) == 0)
        & (q.ne[:, 2] % np.maximum(v.ne[:, 2], 1) == 0),
        "heads do not divide",
    )
    nodes.require((q.ne[:, 3] == k.ne[:, 3]) & (q.ne[:, 3] == v.ne[:, 3]), "sequences differ")
    want = np.column_stack((v.ne[:, 0], q.ne[:, 2], q.ne[:, 1], q.ne[:, 3]))
    nodes.require((d.ne == want).all(axis=1), "the result has the wrong shape")
    nodes.require(d.contiguous & d.ascending, "the result is not contiguous")
    nodes.require(k.real & v.real, "a type without arithmetic")
    nodes.require(q.packed & k.packed & v.packed, "elements of a row are not adjacent")
    masked = nodes.with_source(3)
    if masked is not None:
        heads = masked.s(0).ne[:, 1:]
        masked.require(masked.s(3).is_type(F16), "the mask is not f16")
        _mask(masked, 3, masked.s(1).ne[:, 1], heads)
    sunk = nodes.with_source(4)
    if sunk is not None:
        s4 = sunk.s(4)
        sunk.require(s4.is_type(F32) & s4.packed, "sinks are not f32")
        sunk.require(s4.ne[:, 0] == sunk.s(0).ne[:, 2], "sinks do not match the heads")


def _mask(nodes: Nodes, k: int, length: I64, rows: I64) -> None:
    """A mask: a row for each query, as long as there are keys, repeating over heads."""
    mask = nodes.s(k)
    nodes.require(mask.ne[:, 0] >= length, "the mask's rows are too short")
    nodes.require(mask.ne[:, 1] >= rows[:, 0], "the mask has too few rows")
    nodes.require(
        (rows[:, 1:] % np.maximum(mask.ne[:, 2:], 1) == 0).all(axis=1), "the mask does not repeat"
    )
    nodes.require(mask.packed, "the mask's rows are not adjacent")
