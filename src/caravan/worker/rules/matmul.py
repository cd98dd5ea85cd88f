"""Rules of matrix products."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import BF16, F16, F32, I32, I64, MAX_SCRATCH, Nodes, rule

# op_params[1]: the first source is a Hadamard matrix, and is not looked at
_HADAMARD = 1
# what the engine keeps of each expert, bytes, and of each row that an expert may get
_EXPERT, _ROUTE = 80, 8


@rule("MUL_MAT", sources=2)
def mul_mat(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    _types(nodes)
    nodes.require(s0.ne[:, 0] == s1.ne[:, 0], "rows of the two sources differ in length")
    batch = np.maximum(s0.ne, 1)
    nodes.require(
        (s1.ne[:, 2:] % batch[:, 2:] == 0).all(axis=1),
        "the first source does not repeat into the second",
    )
    nodes.require(
        d.has_shape(s0.ne[:, 1], s1.ne[:, 1], s1.ne[:, 2], s1.ne[:, 3]),
        "the result has the wrong shape",
    )
    nodes.require(d.packed & s0.packed & s1.packed, "elements of a row are not adjacent")
    nodes.require(d.ascending, "the result is transposed")
    length = s0.ne[:, 0]
    square = (s0.ne[:, 1] == length) & (length & (length - 1) == 0) & s1.is_type(F32, F16)
    plain = nodes.params(1) != _HADAMARD
    nodes.require(plain | square, "a Hadamard matrix has not this size or type")
    _scratch(nodes, 4 * s1.nelements)


@rule("MUL_MAT_ID", sources=3)
def mul_mat_id(nodes: Nodes) -> None:
    d, s0, s1, s2 = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    _types(nodes)
    nodes.require(s2.is_type(I32), "the ids are not i32")
    nodes.require(s0.ne[:, 0] == s1.ne[:, 0], "rows of the two sources differ in length")
    nodes.require((s0.ne[:, 3] == 1) & (s1.ne[:, 3] == 1), "a source has four dimensions")
    nodes.require((s2.ne[:, 2:] == 1).all(axis=1), "the ids are not a matrix")
    nodes.require(s2.ne[:, 1] == s1.ne[:, 2], "the ids do not match the second source")
    nodes.require(
        s2.ne[:, 0] % np.maximum(s1.ne[:, 1], 1) == 0, "the second source does not repeat"
    )
    nodes.require(
        d.has_shape(s0.ne[:, 1], s2.ne[:, 0], s1.ne[:, 2]), "the result has the wrong shape"
    )
    nodes.require(
        d.packed & s0.packed & s1.packed & s2.packed, "elements of a row are not adjacent"
    )
    nodes.require(d.ascending, "the result is transposed")
    routes = s2.ne[:, 0].astype(np.float64) * s2.ne[:, 1] * _ROUTE
    _scratch(nodes, s0.ne[:, 2] * (routes + _EXPERT) + 4.0 * s1.nelements)


def _types(nodes: Nodes) -> None:
    """Rows of the second source are turned into what goes with the first; only from f32, and in
    whole: a type that is already right is read where it lies."""
    nodes.require(nodes.d.is_type(F32), "the result is not f32")
    s0, s1 = nodes.s(0), nodes.s(1)
    nodes.require(s0.multiplies, "a type without arithmetic")
    nodes.require(s1.is_type(F32, F16, BF16), "a type without arithmetic")
    wider = s0.is_type(F32) & np.array(nodes.op == "MUL_MAT")
    nodes.require(s1.is_type(F32) | (s1.type == s0.type) | wider, "the types do not go together")


def _scratch(nodes: Nodes, size: I64 | np.ndarray) -> None:
    nodes.require(size <= MAX_SCRATCH, "it would take too much scratch memory")
