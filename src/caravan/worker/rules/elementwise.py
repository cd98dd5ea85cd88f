"""Rules of ops that work element by element: arithmetic, scaling, activations, GLU."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import BF16, F16, F32, I32, Bools, Nodes, Tensors, rule

_UNARY_COUNT = 22
# gelu, gelu_quick, silu, gelu_erf: kernels of their own, which do not convert
_UNARY_PLAIN = (8, 9, 10, 16)
_XIELU = 17
_GLU_COUNT = 7
_SWIGLU_OAI, _SWIGLU_CLAMP = 3, 6


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
    # Those without code to make rows from f32 would be written as f32, beyond the row.
    nodes.require(plain | (s0.writable & s0.readable), "a type that cannot be added to")
    whole = s1.same_shape(s0) & s1.packed & d.ascending
    nodes.require(plain | whole, "the second source does not match quantized rows")


def _widened(d: Tensors, s0: Tensors, s1: Tensors) -> Bools:
    """Half precision plus single gives single."""
    return d.is_type(F32) & s0.is_type(F16, BF16) & s1.is_type(F32)


@rule("ADD1", sources=2)
def add1(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(s1.nelements == 1, "the second source is not a scalar")
    nodes.require(s0.is_type(F32, F16, BF16) & (d.type == s0.type), "a type without arithmetic")
    nodes.require(s1.is_type(F32) | (s1.type == s0.type), "the types do not go together")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


@rule("ADD_ID", sources=3)
def add_id(nodes: Nodes) -> None:
    d, s0, s1, s2 = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    nodes.require(d.same_shape(s0), "result and first source differ in shape")
    nodes.require(s0.ne[:, 0] == s1.ne[:, 0], "rows differ in length")
    nodes.require(s2.is_type(I32), "ids are not i32")
    nodes.require(d.is_type(F32) & s0.is_type(F32) & s1.is_type(F32), "not all are f32")
    nodes.require(
        (s0.ne[:, 1] == s2.ne[:, 0]) & (s0.ne[:, 2] == s2.ne[:, 1]), "ids do not match the rows"
    )
    nodes.require(d.packed & s0.packed & s1.packed, "elements of a row are not adjacent")


@rule("SQR", "SQRT", "LOG", "SIN", "COS", sources=1)
def elementwise(nodes: Nodes) -> None:
    _convertible(nodes)
    nodes.require(nodes.d.packed & nodes.s(0).packed, "elements of a row are not adjacent")


def _convertible(nodes: Nodes) -> None:
    """The same shape, in the same type or in f32."""
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(s0.is_type(F32, F16, BF16), "a type without arithmetic")
    nodes.require((d.type == s0.type) | d.is_type(F32), "result and source differ in type")


@rule("CLAMP", sources=1)
def clamp(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    _same(nodes, F32, F16)
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")
    # Older kernels take row i to be at i * nb[1]. Where it is not, they must at least stay inside
    # of the buffers.
    for tensor in (d, s0):
        reach = (tensor.nrows - 1) * tensor.nb[:, 1] + tensor.ne[:, 0] * tensor.size
        nodes.require(tensor.in_line | (reach <= tensor.room), "rows lead out of the buffer")


@rule("LEAKY_RELU", sources=1)
def leaky_relu(nodes: Nodes) -> None:
    _same(nodes, F32, F16)
    nodes.require(nodes.d.in_line & nodes.s(0).in_line, "rows are not evenly spaced")


@rule("SCALE", sources=1)
def scale(nodes: Nodes) -> None:
    _same(nodes, F32, BF16)
    nodes.require(nodes.d.in_line & nodes.s(0).in_line, "rows are not evenly spaced")
    nodes.require(nodes.d.contiguous & nodes.s(0).contiguous, "not contiguous")


@rule("FILL", sources=1)
def fill(nodes: Nodes) -> None:
    _same(nodes, F32, F16)


def _same(nodes: Nodes, *types: int) -> None:
    """One of these types, which result and source share, and their shape."""
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(s0.is_type(*types), "a type without code for this")
    nodes.require(d.type == s0.type, "result and source differ in type")
    nodes.require(d.adjacent & s0.adjacent, "elements of a row are not adjacent")


@rule("UNARY", sources=1)
def unary(nodes: Nodes) -> None:
    _convertible(nodes)
    d, s0, op = nodes.d, nodes.s(0), nodes.params(0)
    nodes.require((op >= 0) & (op < _UNARY_COUNT), "unknown unary op")
    plain = np.isin(op, _UNARY_PLAIN)
    nodes.require(~plain | (d.type == s0.type), "result and source differ in type")
    rows = (d.packed & s0.packed) | (plain & d.adjacent & s0.adjacent)
    nodes.require(rows, "elements of a row are not adjacent")
    nodes.require((op != _XIELU) | (d.in_line & s0.in_line), "rows are not evenly spaced")


@rule("GLU", sources=1)
def glu(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    op = nodes.params(0)
    nodes.require((op >= 0) & (op < _GLU_COUNT), "unknown GLU op")
    half = s0.is_type(F16) & (op != _SWIGLU_OAI)
    brain = s0.is_type(BF16) & (op != _SWIGLU_OAI) & (op != _SWIGLU_CLAMP)
    nodes.require(s0.is_type(F32) | half | brain, "a type without code for this")
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
