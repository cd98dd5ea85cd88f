"""Rules of convolutions and pooling. The engine gives sizes width first; so do the comments here.

Kernels run over the result and skip what lies outside of the source, so how big the result is
along those dimensions is free; what must fit are channels, batches, and layouts.
"""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import BF16, F16, F32, I64, MAX_SCRATCH, Nodes, rule

_INT = (1 << 31) - 1
# the engine's scratch memory for direct convolutions, bytes
_PATCHES = 16 << 20
_MOST_POOLED = 1 << 16


@rule("IM2COL", sources=2)
def im2col(nodes: Nodes) -> None:
    """Kernel [KW, KH, IC, OC] and image [W, H, IC, N]; without KH, H in one dimension."""
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    _columns(nodes)
    flat = nodes.params(6) != 1
    channels = np.where(flat, s1.ne[:, 1], s1.ne[:, 2])
    length = channels * s0.ne[:, 0] * np.where(flat, 1, s0.ne[:, 1])
    nodes.require(d.ne[:, 0] == length, "the result's rows have the wrong length")
    batch = np.where(flat, s1.ne[:, 2], s1.ne[:, 3])
    there = np.where(flat, d.ne[:, 2], d.ne[:, 3])
    nodes.require(there == batch, "the result has another number of images")
    plane = flat | (s1.ne[:, 1] == 1) | (s1.nb[:, 1] == s1.ne[:, 0] * s1.size)
    nodes.require(plane, "an image's rows are not adjacent")
    nodes.require((s1.nb <= _INT).all(axis=1), "a stride is out of range")


@rule("IM2COL_3D", sources=2)
def im2col_3d(nodes: Nodes) -> None:
    """Kernel [KW, KH, KD, IC * OC] and volume [W, H, D, IC * N]."""
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    _columns(nodes)
    nodes.require(s1.is_type(F32), "the source is not f32")
    channels = nodes.wide(9, 1)[:, 0]
    nodes.require(channels > 0, "no channels")
    channels = np.maximum(channels, 1)
    nodes.require(s1.ne[:, 3] % channels == 0, "the channels do not divide")
    nodes.require(d.ne[:, 0] == channels * s0.ne[:, :3].prod(axis=1), "the result's rows are wrong")
    batch = np.maximum(s1.ne[:, 3] // channels, 1)
    nodes.require(d.ne[:, 3] % batch == 0, "the result has another number of volumes")


def _columns(nodes: Nodes) -> None:
    d, s1 = nodes.d, nodes.s(1)
    nodes.require(d.is_type(F32, F16), "the result is neither f32 nor f16")
    same = (s1.type == d.type) | s1.is_type(F32)
    nodes.require(s1.is_type(F32, F16) & same, "the types do not go together")
    nodes.require(d.contiguous, "the result is not contiguous")
    nodes.require(s1.nb[:, 0] == s1.size, "elements of a row are not adjacent")


@rule("COL2IM_1D", sources=1)
def col2im(nodes: Nodes) -> None:
    """Columns [K * OC, T]; the result is [T', OC]."""
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(s0.is_type(F32, F16, BF16) & (d.type == s0.type), "the types do not fit")
    nodes.require(d.contiguous & s0.contiguous, "not contiguous")
    stride, channels, crop = nodes.wide(0, 3).T
    nodes.require((stride > 0) & (channels > 0) & (crop >= 0), "a parameter is out of range")
    nodes.require(s0.ne[:, 0] % np.maximum(channels, 1) == 0, "the channels do not divide")
    nodes.require((s0.ne[:, 2:] == 1).all(axis=1), "the source is not a matrix")
    nodes.require(d.has_shape(d.ne[:, 0], channels), "the result has the wrong shape")


@rule("CONV_2D", sources=2)
def conv_2d(nodes: Nodes) -> None:
    """Kernel [KW, KH, IC, OC], image [W, H, IC, N]; the result is [W', H', OC, N]."""
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    _direct(nodes)
    nodes.require(s0.contiguous, "the kernel is not contiguous")
    nodes.require(s0.ne[:, 2] == s1.ne[:, 2], "kernel and image differ in channels")
    nodes.require(d.ne[:, 2] == s0.ne[:, 3], "the result has other channels than the kernel")
    nodes.require(d.ne[:, 3] == s1.ne[:, 3], "the result has another number of images")
    _patches(nodes, s0.ne[:, :3].prod(axis=1), s0.ne[:, 3])


@rule("CONV_3D", sources=2)
def conv_3d(nodes: Nodes) -> None:
    """Kernel [KW, KH, KD, IC * OC], volume [W, H, D, IC * N]; the result is [.., OC * N]."""
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    _direct(nodes)
    nodes.require(s0.contiguous, "the kernel is not contiguous")
    inner, batch, outer = nodes.wide(9, 3).T
    nodes.require((inner > 0) & (batch > 0) & (outer > 0), "a parameter is out of range")
    nodes.require(s0.ne[:, 3] == inner * outer, "the kernel has other channels")
    nodes.require(s1.ne[:, 3] == inner * batch, "the source has other channels")
    nodes.require(d.ne[:, 3] == outer * batch, "the result has other channels")
    _patches(nodes, s0.ne[:, :3].prod(axis=1) * inner, outer)


@rule("CONV_2D_DW", sources=2)
def conv_2d_depthwise(nodes: Nodes) -> None:
    """Kernel [KW, KH, 1, C], image [W, H, C, N]; the result is [W', H', C, N]."""
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    _direct(nodes)
    nodes.require(s0.ne[:, 2] == 1, "the kernel is not one for each channel")
    nodes.require(s0.ne[:, 3] == s1.ne[:, 2], "kernel and image differ in channels")
    nodes.require(
        (d.ne[:, 2:] == s1.ne[:, 2:]).all(axis=1), "the result has other channels than the image"
    )
    nodes.require(d.gapless & s0.gapless & s1.gapless, "there are gaps between elements")
    channels_first = (
        (s1.nb[:, 0] > s1.nb[:, 2]) & (s1.nb[:, 1] > s1.nb[:, 0]) & (s1.nb[:, 2] == s1.size)
    )
    kernel = (s0.nb[:, 0] >= s0.nb[:, 2]) & (s0.nb[:, 1] >= s0.nb[:, 0])
    nodes.require(s1.contiguous | (channels_first & kernel), "a layout without code for this")


def _direct(nodes: Nodes) -> None:
    nodes.require(nodes.s(0).is_type(F32, F16), "the kernel is neither f32 nor f16")
    nodes.require(nodes.d.is_type(F32) & nodes.s(1).is_type(F32), "result or source is not f32")


def _patches(nodes: Nodes, length: I64, outer: I64) -> None:
    """At least one patch of the source, and what comes of it, must fit into scratch memory."""
    size = length * nodes.s(0).size + 4 * outer
    nodes.require(size <= _PATCHES, "the kernel is too big")


@rule("CONV_TRANSPOSE_1D", sources=2)
def conv_transpose_1d(nodes: Nodes) -> None:
    """Kernel [K, OC, IC], source [L, IC]; the result is [(L - 1) * stride + K, OC]."""
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    _direct(nodes)
    stride = nodes.wide(0, 1)[:, 0]
    nodes.require(stride > 0, "no stride")
    nodes.require(s0.ne[:, 3] == 1, "the kernel has four dimensions")
    nodes.require(s1.has_shape(s1.ne[:, 0], s0.ne[:, 2]), "source and kernel do not match")
    length = (s1.ne[:, 0] - 1) * stride + s0.ne[:, 0]
    nodes.require(d.has_shape(length, s0.ne[:, 1]), "the result has the wrong shape")
    nodes.require(
        (s0.nb[:, 0] == s0.size) & (s1.nb[:, 0] == 4) & d.packed,
        "elements of a row are not adjacent",
    )
    _copies(nodes)


@rule("CONV_TRANSPOSE_2D", sources=2)
def conv_transpose_2d(nodes: Nodes) -> None:
    """Kernel [KW, KH, OC, IC], source [W, H, IC, N]; the result is [W', H', OC, N]."""
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    _direct(nodes)
    stride = nodes.wide(0, 1)
    nodes.require(stride[:, 0] > 0, "no stride")
    nodes.require(s0.ne[:, 3] == s1.ne[:, 2], "source and kernel do not match")
    want = (s1.ne[:, :2] - 1) * stride + s0.ne[:, :2]
    nodes.require(
        d.has_shape(want[:, 0], want[:, 1], s0.ne[:, 2], s1.ne[:, 3]),
        "the result has the wrong shape",
    )
    nodes.require(
        (s0.nb[:, 0] == s0.size) & (s1.nb[:, 0] == 4) & d.packed,
        "elements of a row are not adjacent",
    )
    for tensor in (d, s0):
        plane = (tensor.ne[:, 1] == 1) | (tensor.nb[:, 1] == tensor.ne[:, 0] * tensor.size)
        nodes.require(plane, "rows are not adjacent")
    _copies(nodes)


def _copies(nodes: Nodes) -> None:
    """Both sources are copied to scratch memory, by places that are counted in 32 bits."""
    s0, s1 = nodes.s(0), nodes.s(1)
    nodes.require((s0.nelements <= _INT) & (s1.nelements <= _INT), "too many elements")
    nodes.require(
        (s0.nelements + s1.nelements) * s0.size <= MAX_SCRATCH,
        "it would take too much scratch memory",
    )


@rule("POOL_1D", sources=1)
def pool_1d(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    _pooled(nodes, nodes.wide(1, 2))
    nodes.require((d.ne[:, 1:] == s0.ne[:, 1:]).all(axis=1), "result and source differ in rows")
    nodes.require(d.in_line & s0.in_line, "rows are not evenly spaced")


@rule("POOL_2D", sources=1)
def pool_2d(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    _pooled(nodes, nodes.wide(1, 4))
    nodes.require((d.ne[:, 2:] == s0.ne[:, 2:]).all(axis=1), "result and source differ in planes")
    # The kernel steps by the source's nb[2] until its end, and counts planes of the result.
    nodes.require(d.contiguous & s0.dense, "not contiguous")


def _pooled(nodes: Nodes, sizes: I64) -> None:
    op = nodes.params(0)
    nodes.require((op == 0) | (op == 1), "unknown kind of pooling")
    nodes.require((sizes > 0).all(axis=1), "a kernel or a stride without size")
    nodes.require((sizes <= _MOST_POOLED).all(axis=1), "a kernel or a stride is too big")
    nodes.require(
        nodes.d.is_type(F32) & nodes.s(0).is_type(F32, F16), "the types do not go together"
    )
