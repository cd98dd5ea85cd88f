"""Rules of ops whose data say what they read or write: rows by number, and sorting.

The numbers themselves are seen by the kernels only. Those of GET_ROWS, SET_ROWS and ADD_ID are
checked there, and end the process; for others see `guards`.
"""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import BF16, F16, F32, I32, I64_TYPE, Nodes, rule


@rule("GET_ROWS", sources=2)
def get_rows(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    nodes.require(s1.is_type(I32), "row numbers are not i32")
    nodes.require(s1.ne[:, 3] == 1, "row numbers have four dimensions")
    nodes.require(
        (s0.ne[:, 2] == s1.ne[:, 1]) & (s0.ne[:, 3] == s1.ne[:, 2]),
        "row numbers do not match the source",
    )
    nodes.require(
        d.has_shape(s0.ne[:, 0], s1.ne[:, 0], s1.ne[:, 1], s1.ne[:, 2]),
        "the result has the wrong shape",
    )
    nodes.require(d.adjacent & s0.adjacent, "elements of a row are not adjacent")
    nodes.require(s0.is_type(I32) | s0.readable, "a type without code for this")
    nodes.require(
        d.type == np.where(s0.is_type(I32), I32, F32), "the result's type is not possible"
    )


@rule("SET_ROWS", sources=2, empty=True)
def set_rows(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    nodes.require(s1.is_type(I32, I64_TYPE), "row numbers are neither i32 nor i64")
    nodes.require(s0.is_type(F32, F16), "the source is neither f32 nor f16")
    # The scratch memory for turning f16 into another type is for one thread only.
    convertible = d.writable & (s0.is_type(F32) | d.is_type(F16))
    nodes.require(
        convertible | (s0.is_type(F32) & d.is_type(I32)), "the result's type is not possible"
    )
    nodes.require(
        (d.ne[:, (0, 2, 3)] == s0.ne[:, (0, 2, 3)]).all(axis=1), "result and source differ"
    )
    nodes.require(s0.ne[:, 1] == s1.ne[:, 0], "row numbers do not match the source")
    # There may be no rows and so no numbers, but the kernel divides by how often there are none.
    broadcast = np.maximum(s1.ne, 1)
    nodes.require(
        (s1.ne[:, 1:3] > 0).all(axis=1)
        & (s0.ne[:, 2] % broadcast[:, 1] == 0)
        & (s0.ne[:, 3] % broadcast[:, 2] == 0),
        "row numbers do not repeat into the source",
    )
    nodes.require(s1.ne[:, 3] == 1, "row numbers have four dimensions")
    nodes.require(d.adjacent & s0.adjacent, "elements of a row are not adjacent")


@rule("TOP_K", sources=1)
def order(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.is_type(I32) & s0.is_type(F32), "sorting goes from f32 to i32")
    nodes.require((d.ne[:, 1:] == s0.ne[:, 1:]).all(axis=1), "result and source differ in rows")
    nodes.require(d.ne[:, 0] <= s0.ne[:, 0], "more is asked for than there is")
    nodes.require(d.in_line & d.packed & s0.in_line, "rows are not evenly spaced")


@rule("ARGSORT", sources=1)
def argsort(nodes: Nodes) -> None:
    order(nodes)
    nodes.require(nodes.d.same_shape(nodes.s(0)), "result and source differ in shape")
    direction = nodes.params(0)
    nodes.require((direction == 0) | (direction == 1), "unknown sort order")


@rule("ARGMAX", sources=1)
def argmax(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.is_type(I32) & s0.is_type(F32), "the search goes from f32 to i32")
    nodes.require((s0.ne[:, 2:] == 1).all(axis=1), "the source is not a matrix")
    nodes.require(d.has_shape(s0.ne[:, 1]), "the result has not one element for each row")
    nodes.require(s0.adjacent, "elements of a row are not adjacent")


@rule("GET_REL_POS", sources=1)
def get_rel_pos(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(s0.is_type(F16, BF16) & d.is_type(F16), "the types do not go together")
    nodes.require(d.ne[:, 0] == s0.ne[:, 0], "rows differ in length")
    nodes.require(d.ne[:, 3] == 1, "the result has four dimensions")
    nodes.require(s0.ne[:, 1] >= d.ne[:, 1] + d.ne[:, 2] - 1, "the source has too few positions")
    nodes.require(d.contiguous & s0.contiguous, "not contiguous")
