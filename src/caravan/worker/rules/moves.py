"""Rules of ops that move or re-label elements: copies, views, rows by index, repeat, concat."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import F16, F32, I32, I64_TYPE, Nodes, rule


@rule("DUP", "CONT", sources=1)
def duplicate(nodes: Nodes) -> None:
    nodes.require(nodes.d.nelements == nodes.s(0).nelements, "result and source differ in size")
    nodes.require(nodes.d.type == nodes.s(0).type, "result and source differ in type")


@rule("CPY", sources=2)
def copy(nodes: Nodes) -> None:
    nodes.require(nodes.d.nelements == nodes.s(0).nelements, "result and source differ in size")
    nodes.require(nodes.d.type == nodes.s(1).type, "result and destination differ in type")


@rule("RESHAPE", sources=1)
def reshape(nodes: Nodes) -> None:
    nodes.require(nodes.d.nelements == nodes.s(0).nelements, "result and source differ in size")


@rule("VIEW", "PERMUTE", "TRANSPOSE", sources=1)
def view(nodes: Nodes) -> None:
    """Nothing is read; the extent check of the result is all there is."""


@rule("GET_ROWS", sources=2)
def get_rows(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    nodes.require(s1.is_type(I32), "row numbers are not i32")
    nodes.require(s1.ne[:, 3] == 1, "row numbers have four dimensions")
    nodes.require(
        (s0.ne[:, 2] == s1.ne[:, 1]) & (s0.ne[:, 3] == s1.ne[:, 2]),
        "row numbers do not match the source",
    )
    want = np.column_stack((s0.ne[:, 0], s1.ne[:, 0], s1.ne[:, 1], s1.ne[:, 2]))
    nodes.require((d.ne == want).all(axis=1), "the result has the wrong shape")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")
    nodes.require(d.is_type(F32) | (d.type == s0.type), "the result's type is not possible")


@rule("SET_ROWS", sources=2)
def set_rows(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    nodes.require(s1.is_type(I32, I64_TYPE), "row numbers are neither i32 nor i64")
    nodes.require(s0.is_type(F32, F16), "the source is neither f32 nor f16")
    nodes.require(
        (d.ne[:, (0, 2, 3)] == s0.ne[:, (0, 2, 3)]).all(axis=1), "result and source differ"
    )
    nodes.require(s0.ne[:, 1] == s1.ne[:, 0], "row numbers do not match the source")
    broadcast = np.maximum(s1.ne, 1)
    nodes.require(
        (s0.ne[:, 2] % broadcast[:, 1] == 0) & (s0.ne[:, 3] % broadcast[:, 2] == 0),
        "row numbers do not repeat into the source",
    )
    nodes.require(s1.ne[:, 3] == 1, "row numbers have four dimensions")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


@rule("REPEAT", sources=1)
def repeat(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(s0.repeats_into(d), "the source does not repeat into the result")
    nodes.require(d.type == s0.type, "result and source differ in type")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


@rule("CONCAT", sources=2)
def concat(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    axis = nodes.params(0)
    nodes.require((axis >= 0) & (axis < 4), "no such dimension")
    along = np.arange(4) == axis[:, None]
    nodes.require(((s0.ne == s1.ne) | along).all(axis=1), "the two sources differ in shape")
    want = np.where(along, s0.ne + s1.ne, s0.ne)
    nodes.require((d.ne == want).all(axis=1), "the result has the wrong shape")
    nodes.require((d.type == s0.type) & (d.type == s1.type), "result and sources differ in type")


@rule("TOP_K", sources=1)
def order(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.is_type(I32) & s0.is_type(F32), "sorting goes from f32 to i32")
    nodes.require((d.ne[:, 1:] == s0.ne[:, 1:]).all(axis=1), "result and source differ in rows")
    nodes.require(d.ne[:, 0] <= s0.ne[:, 0], "more is asked for than there is")
    nodes.require(d.in_line & s0.in_line, "rows are not evenly spaced")


@rule("ARGSORT", sources=1)
def argsort(nodes: Nodes) -> None:
    order(nodes)
    nodes.require(nodes.d.same_shape(nodes.s(0)), "result and source differ in shape")
    direction = nodes.params(0)
    nodes.require((direction == 0) | (direction == 1), "unknown sort order")
