"""Rules of ops that move or re-label elements: copies, views, writes into parts."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    Bools,
    Nodes,
    Tensors,
    rule,
)

# Some kernels count elements in 32 bits.
_MOST_COPIED = 1 << 31


@rule("DUP", "CONT", sources=1)
def duplicate(nodes: Nodes) -> None:
    nodes.require(nodes.d.type == nodes.s(0).type, "result and source differ in type")
    _same_number(nodes)


@rule("CPY", sources=2)
def copy(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    _same_number(nodes)
    # The kernels take the layout of the result from either of the two.
    nodes.require(d.type == s1.type, "result and destination differ in type")
    nodes.require(
        d.same_shape(s1) & (d.nb == s1.nb).all(axis=1), "result and destination differ in layout"
    )
    same, half = d.type == s0.type, (F32, F16, BF16)
    plain = s0.is_type(*half) & d.is_type(*half)
    whole = (s0.is_type(F32) & d.is_type(I32)) | (s0.is_type(I32) & d.is_type(F32))
    to_blocks = s0.is_type(*half) & d.quantized & d.writable
    from_blocks = s0.quantized & s0.readable & d.is_type(F32)
    nodes.require(
        same | plain | whole | to_blocks | from_blocks, "there is no conversion between the types"
    )
    # A row at a time goes through scratch memory, which has room for one of the result's.
    rows = d.contiguous & (s0.nb[:, 0] == s0.size) & (s0.ne[:, 0] <= d.ne[:, 0])
    rows &= s0.ne[:, 0] % d.per_block == 0
    nodes.require(~to_blocks | rows, "the source's rows do not fit the result's blocks")
    blocks = d.packed & ((d.ne[:, 0] % s0.per_block == 0) | d.contiguous)
    nodes.require(~from_blocks | blocks, "the source's blocks do not fit the result's rows")


def _same_number(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.nelements == s0.nelements, "result and source differ in size")
    nodes.require(d.nelements < _MOST_COPIED, "too many elements for one copy")
    nodes.require(~_lost_blocks(d, s0), "blocks of another shape cannot be gathered")


def _lost_blocks(d: Tensors, s0: Tensors) -> Bools:
    """For these the engine counts blocks as elements, and so writes far beyond the result."""
    scattered = ~s0.contiguous & d.contiguous & ~d.same_shape(s0)
    return np.asarray(s0.quantized & d.quantized & scattered)


@rule("NONE", sources=0)
def nothing(nodes: Nodes) -> None:
    """Nothing is computed."""


@rule("RESHAPE", sources=1)
def reshape(nodes: Nodes) -> None:
    nodes.require(nodes.d.nelements == nodes.s(0).nelements, "result and source differ in size")


@rule("VIEW", "PERMUTE", "TRANSPOSE", sources=1)
def view(nodes: Nodes) -> None:
    """Nothing is read; the extent check of the result is all there is."""


@rule("SET", sources=2)
def put(nodes: Nodes) -> None:
    _into(nodes, F32, I32)


@rule("ACC", sources=2)
def accumulate(nodes: Nodes) -> None:
    _into(nodes, F32)


def _into(nodes: Nodes, *types: int) -> None:
    """The second source goes into a copy of the first, with strides and offset of its own."""
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    nodes.require(d.is_type(*types), "a type without code for this")
    nodes.require((d.type == s0.type) & (d.type == s1.type), "the types differ")
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(d.contiguous & s0.contiguous, "not contiguous")
    nodes.require(s1.nb[:, 0] == s1.size, "elements of a row are not adjacent")
    layout = nodes.wide(0, 4)
    nodes.require((layout >= 0).all(axis=1), "a stride or the offset is negative")
    nodes.require((layout % 4 == 0).all(axis=1), "a stride or the offset is not aligned")
    end = layout[:, 3] + ((s1.ne[:, 1:] - 1) * layout[:, :3]).sum(axis=1) + 4 * s1.ne[:, 0]
    nodes.require(end <= d.nbytes, "the second source does not fit into the first")


@rule("DIAG_MASK_INF", "DIAG_MASK_ZERO", sources=1)
def diagonal_mask(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.is_type(F32) & s0.is_type(F32), "result or source is not f32")
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    # The kernel steps from plane to plane of all dimensions by nb[2].
    nodes.require(d.dense & s0.dense, "not contiguous")
    nodes.require(nodes.params(0) >= 0, "the diagonal begins before the row")


@rule("DIAG", sources=1)
def diagonal(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    length = s0.ne[:, 0]
    nodes.require(d.is_type(F32) & s0.is_type(F32), "result or source is not f32")
    nodes.require(s0.ne[:, 1] == 1, "the source has more than one row")
    nodes.require(
        d.has_shape(length, length, s0.ne[:, 2], s0.ne[:, 3]), "the result has the wrong shape"
    )
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


@rule("TRI", sources=1)
def triangle(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.is_type(F32) & s0.is_type(F32), "result or source is not f32")
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(s0.contiguous & d.adjacent, "not contiguous")
    kind = nodes.params(0)
    nodes.require((kind >= 0) & (kind <= 3), "unknown kind of triangle")


@rule("ARANGE", sources=0)
def count_up(nodes: Nodes) -> None:
    d = nodes.d
    nodes.require(d.is_type(F32) & d.contiguous & (d.nb[:, 0] == 4), "not contiguous f32")
    start, stop, step = nodes.floats(0), nodes.floats(1), nodes.floats(2)
    with np.errstate(all="ignore"):
        steps: I64 = np.ceil((stop - start) / step)
    # false for NaN and infinity too
    nodes.require(steps == d.nelements, "the result has not as many elements as there are steps")
