"""Rules of ops that lay elements out anew: repeating, joining, padding, scaling, windows."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import BF16, F16, F32, I8, I16, I32, Nodes, Tensors, rule

# Sizes that the scaling kernel, which works them out in 32-bit floats, gets right.
_MOST_SCALED = 1 << 22
_NEAREST, _BILINEAR, _BICUBIC = 0, 1, 2
_ANTIALIAS = 1 << 9
_SCALE_FLAGS = 0x3FF


@rule("REPEAT", sources=1)
def repeat(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(s0.repeats_into(d), "the source does not repeat into the result")
    nodes.require(d.type == s0.type, "result and source differ in type")
    nodes.require(d.is_type(F32, F16, BF16, I32, I16), "a type without code for this")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


@rule("CONCAT", sources=2, empty=True)
def concat(nodes: Nodes) -> None:
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    axis = nodes.params(0)
    nodes.require((axis >= 0) & (axis < 4), "no such dimension")
    along = np.arange(4) == axis[:, None]
    nodes.require(((s0.ne == s1.ne) | along).all(axis=1), "the two sources differ in shape")
    want = np.where(along, s0.ne + s1.ne, s0.ne)
    nodes.require((d.ne == want).all(axis=1), "the result has the wrong shape")
    nodes.require((d.type == s0.type) & (d.type == s1.type), "result and sources differ in type")
    # Other types are moved a row at a time.
    single = d.is_type(F32, F16, BF16, I32, I16, I8)
    rows = d.adjacent & s0.adjacent & s1.adjacent
    nodes.require(single | rows, "elements of a row are not adjacent")


@rule("PAD", sources=1, empty=True)
def pad(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    _single(nodes)
    sizes = nodes.wide(0, 8)
    left, right = sizes[:, 0::2], sizes[:, 1::2]
    nodes.require((d.ne == s0.ne + left + right).all(axis=1), "the result has the wrong shape")
    nodes.require(d.contiguous, "the result is not contiguous")
    around = nodes.params(8) != 0
    once = (left <= s0.ne) & (s0.ne > 0)
    nodes.require(~around | once.all(axis=1), "it would go around more than once")


@rule("PAD_REFLECT_1D", sources=1)
def pad_reflect(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    _single(nodes)
    sizes = nodes.wide(0, 2)
    inside = (sizes >= 0) & (sizes < s0.ne[:, :1])
    nodes.require(inside.all(axis=1), "there is not as much to reflect")
    nodes.require(d.ne[:, 0] == s0.ne[:, 0] + sizes.sum(axis=1), "the result's rows are wrong")
    nodes.require((d.ne[:, 1:] == s0.ne[:, 1:]).all(axis=1), "result and source differ in rows")
    nodes.require(d.adjacent & s0.adjacent, "elements of a row are not adjacent")


@rule("ROLL", sources=1)
def roll(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    _single(nodes)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require((np.abs(nodes.wide(0, 4)) < s0.ne).all(axis=1), "it would roll over")
    nodes.require(d.adjacent & s0.adjacent, "elements of a row are not adjacent")


@rule("UPSCALE", sources=1)
def upscale(nodes: Nodes) -> None:
    _single(nodes)
    mode = nodes.params(0)
    kind = mode & 0xFF
    nodes.require((mode >= 0) & (mode <= _SCALE_FLAGS) & (kind <= _BICUBIC), "unknown mode")
    nodes.require((mode & _ANTIALIAS == 0) | (kind == _BILINEAR), "unknown mode")
    for tensor in (nodes.d, nodes.s(0)):
        nodes.require((tensor.ne <= _MOST_SCALED).all(axis=1), "a dimension is too big to scale")


@rule("WIN_PART", sources=1)
def window_partition(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    _linear(nodes)
    sizes = nodes.wide(0, 3)
    nodes.require((sizes > 0).all(axis=1), "a window without size")
    across, down, size = sizes.T
    nodes.require(s0.ne[:, 3] == 1, "the source has four dimensions")
    nodes.require(
        d.has_shape(s0.ne[:, 0], size, size, across * down), "the result has the wrong shape"
    )
    cover = (across * size >= s0.ne[:, 1]) & (down * size >= s0.ne[:, 2])
    nodes.require(cover, "the windows do not cover the source")


@rule("WIN_UNPART", sources=1)
def window_join(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    _linear(nodes)
    size = nodes.wide(0, 1)[:, 0]
    nodes.require(size > 0, "a window without size")
    windows = -(-d.ne[:, 1] // np.maximum(size, 1)) * -(-d.ne[:, 2] // np.maximum(size, 1))
    nodes.require(d.ne[:, 3] == 1, "the result has four dimensions")
    fits = s0.has_shape(d.ne[:, 0], size, size, s0.ne[:, 3]) & (s0.ne[:, 3] >= windows)
    nodes.require(fits, "the source has other windows than the result")


@rule("ADD_REL_POS", sources=3)
def add_rel_pos(nodes: Nodes) -> None:
    d, s0, s1, s2 = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    _linear(nodes)
    for tensor in (s1, s2):
        nodes.require(tensor.is_type(F32) & tensor.contiguous, "not contiguous f32")
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(s1.same_shape(s2), "the positions differ in shape")
    length = s1.ne[:, 0]
    fits = s0.has_shape(length * length, s1.ne[:, 1] * s1.ne[:, 2], s1.ne[:, 3])
    nodes.require(fits, "the positions do not match the source")


@rule("TIMESTEP_EMBEDDING", sources=1)
def timestep_embedding(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    _single(nodes)
    nodes.require(s0.nrows == 1, "the source is not a vector")
    nodes.require(
        d.has_shape(nodes.wide(0, 1)[:, 0], s0.ne[:, 0]), "the result has the wrong shape"
    )
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


def _single(nodes: Nodes) -> None:
    nodes.require(nodes.d.is_type(F32) & nodes.s(0).is_type(F32), "result or source is not f32")


def _linear(nodes: Nodes) -> None:
    """Kernels that work out places without looking at strides."""
    _single(nodes)
    contiguous: list[Tensors] = [nodes.d, nodes.s(0)]
    for tensor in contiguous:
        nodes.require(tensor.contiguous, "not contiguous")
