"""Rules of ops that work element by element: arithmetic, scaling, activations, GLU."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import BF16, F16, F32, I32, Bools, Nodes, Tensors, rule

_UNARY_COUNT = 22
_GLU_COUNT = 7


@rule("ADD", "SUB", "MUL", "DIV", sources=2)
def binary(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    nodes.require(d.same_shape(s0), "result and first source differ in shape")
    nodes.require(s1.repeats_into(s0), "the second source does not repeat into the first")
    same = (s1.type == s0.type) | s1.is_type(F32)
    plain = s0.is_type(F32, F16, BF16) & same & ((d.type == s0.type) | _widened(d, s0, s1))
    quantized = s0.quantized & (d.type == s0.type) & s1.is_type(F32) & np.array(nodes.op == "ADD")
    nodes.require(plain | quantized, "the types do not go together")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


def _widened(d: Tensors, s0: Tensors, s1: Tensors) -> Bools:
    """Half precision plus single gives single."""
    return d.is_type(F32) & s0.is_type(F16, BF16) & s1.is_type(F32)


@rule("ADD1", sources=2)
def add1(nodes: Nodes) -> None:
    nodes.require(nodes.d.same_shape(nodes.s(0)), "result and source differ in shape")
    nodes.require(nodes.s(1).nelements == 1, "the second source is not a scalar")


@rule("ADD_ID", sources=3)
def add_id(nodes: Nodes) -> None:
    d, s0, s1, s2 = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    nodes.require(d.same_shape(s0), "result and first source differ in shape")
    nodes.require(s0.ne[:, 0] == s1.ne[:, 0], "rows differ in length")
    nodes.require(s2.is_type(I32), "ids are not i32")
    nodes.require(
        (s0.ne[:, 1] == s2.ne[:, 0]) & (s0.ne[:, 2] == s2.ne[:, 1]), "ids do not match the rows"
    )


@rule("SQR", "SQRT", "LOG", "SIN", "COS", sources=1)
def elementwise(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(s0.is_type(F32, F16, BF16), "a type without arithmetic")
    nodes.require((d.type == s0.type) | d.is_type(F32), "result and source differ in type")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


@rule("CLAMP", "LEAKY_RELU", sources=1)
def row_by_row(nodes: Nodes) -> None:
    elementwise(nodes)
    nodes.require(nodes.d.type == nodes.s(0).type, "result and source differ in type")
    nodes.require(nodes.d.in_line & nodes.s(0).in_line, "rows are not evenly spaced")


@rule("SCALE", sources=1)
def scale(nodes: Nodes) -> None:
    row_by_row(nodes)
    nodes.require(nodes.d.contiguous & nodes.s(0).contiguous, "not contiguous")


@rule("UNARY", sources=1)
def unary(nodes: Nodes) -> None:
    elementwise(nodes)
    op = nodes.params(0)
    nodes.require((op >= 0) & (op < _UNARY_COUNT), "unknown unary op")


@rule("GLU", sources=1)
def glu(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    op = nodes.params(0)
    nodes.require((op >= 0) & (op < _GLU_COUNT), "unknown GLU op")
    split = nodes.has(1)
    length = s0.ne[:, 0] // 2
    length[split] = s0.ne[split, 0]
    nodes.require(split | (s0.ne[:, 0] % 2 == 0), "a row of odd length cannot be halved")
    nodes.require(d.ne[:, 0] == length, "the result's rows have the wrong length")
    nodes.require((d.ne[:, 1:] == s0.ne[:, 1:]).all(axis=1), "result and source differ in rows")
    nodes.require(d.type == s0.type, "result and source differ in type")
    nodes.require(d.in_line & s0.in_line, "rows are not evenly spaced")
    two = nodes.with_source(1)
    if two is not None:
        two.require(two.s(1).same_shape(two.s(0)), "the two sources differ in shape")
        two.require(two.s(1).type == two.s(0).type, "the two sources differ in type")
        two.require(two.s(1).in_line, "the second source's rows are not evenly spaced")
