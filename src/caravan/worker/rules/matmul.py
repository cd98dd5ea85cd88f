"""Rules of matrix products."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import BF16, F16, F32, I32, Nodes, rule


@rule("MUL_MAT", sources=2)
def mul_mat(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    nodes.require(d.is_type(F32), "the result is not f32")
    nodes.require(s0.real & s1.real, "a type without arithmetic")
    nodes.require(s0.ne[:, 0] == s1.ne[:, 0], "rows of the two sources differ in length")
    batch = np.maximum(s0.ne, 1)
    nodes.require(
        (s1.ne[:, 2:] % batch[:, 2:] == 0).all(axis=1),
        "the first source does not repeat into the second",
    )
    want = np.column_stack((s0.ne[:, 1], s1.ne[:, 1], s1.ne[:, 2], s1.ne[:, 3]))
    nodes.require((d.ne == want).all(axis=1), "the result has the wrong shape")
    nodes.require(d.packed & s0.packed & s1.packed, "elements of a row are not adjacent")
    nodes.require(d.ascending, "the result is transposed")


@rule("MUL_MAT_ID", sources=3)
def mul_mat_id(nodes: Nodes) -> None:
    d, s0, s1, s2 = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    nodes.require(d.is_type(F32) & s2.is_type(I32), "the result is not f32, or the ids not i32")
    nodes.require(s0.real & s1.is_type(F32, F16, BF16), "a type without arithmetic")
    nodes.require(s0.ne[:, 0] == s1.ne[:, 0], "rows of the two sources differ in length")
    nodes.require((s0.ne[:, 3] == 1) & (s1.ne[:, 3] == 1), "a source has four dimensions")
    nodes.require((s2.ne[:, 2:] == 1).all(axis=1), "the ids are not a matrix")
    nodes.require(s2.ne[:, 1] == s1.ne[:, 2], "the ids do not match the second source")
    nodes.require(
        s2.ne[:, 0] % np.maximum(s1.ne[:, 1], 1) == 0, "the second source does not repeat"
    )
    want = np.column_stack((s0.ne[:, 1], s2.ne[:, 0], s1.ne[:, 2], np.ones_like(s2.ne[:, 0])))
    nodes.require((d.ne == want).all(axis=1), "the result has the wrong shape")
    nodes.require(
        d.packed & s0.packed & s1.packed & s2.packed, "elements of a row are not adjacent"
    )
    nodes.require(d.ascending, "the result is transposed")
