"""Rules of ops that work on whole rows: norms, sums, rotary positions, softmax."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import BF16, F16, F32, I32, I64, Nodes, rule

_ROPE_MODES = (0, 2, 8, 24, 40)
_SECTIONS = 8
_VISION = 24


@rule("NORM", "L2_NORM", sources=1)
def norm(nodes: Nodes) -> None:
    """These also read elements that are not adjacent."""
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(d.is_type(F32) & s0.is_type(F32), "result or source is not f32")
    # false for NaN too, which the kernels do not take
    nodes.require(nodes.floats(0) >= 0, "epsilon is negative")


@rule("RMS_NORM", sources=1)
def rms_norm(nodes: Nodes) -> None:
    row_by_row(nodes)
    nodes.require(nodes.floats(0) >= 0, "epsilon is negative")


@rule("GROUP_NORM", sources=1)
def group_norm(nodes: Nodes) -> None:
    row_by_row(nodes)
    groups = nodes.params(0)
    nodes.require((groups > 0) & (groups <= nodes.s(0).ne[:, 2]), "no groups, or too many")
    nodes.require(nodes.floats(1) >= 0, "epsilon is negative")


@rule("CUMSUM", sources=1)
def row_by_row(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(d.is_type(F32) & s0.is_type(F32), "result or source is not f32")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")


@rule("SUM", sources=1)
def total(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.nelements == 1, "the result is not a scalar")
    nodes.require(s0.is_type(F32, F16, BF16) & (d.type == s0.type), "the types do not fit")
    nodes.require(s0.adjacent, "elements of a row are not adjacent")


@rule("SUM_ROWS", sources=1)
def sum_rows(nodes: Nodes) -> None:
    mean(nodes)
    nodes.require(nodes.d.packed & nodes.s(0).packed, "elements of a row are not adjacent")


@rule("MEAN", sources=1)
def mean(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.ne[:, 0] == 1, "the result's rows have more than one element")
    nodes.require((d.ne[:, 1:] == s0.ne[:, 1:]).all(axis=1), "result and source differ in rows")
    nodes.require(d.is_type(F32) & s0.is_type(F32), "result or source is not f32")
    nodes.require(s0.adjacent, "elements of a row are not adjacent")


@rule("ROPE", "ROPE_BACK", sources=2)
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
    sections = mode & _SECTIONS != 0
    positions = s0.ne[:, 2] * np.where(sections, 4, 1)
    nodes.require(s1.is_type(I32) & s1.adjacent, "positions are not i32")
    nodes.require(s1.ne[:, 0] >= positions, "too few positions")
    nodes.require(d.packed & s0.packed, "elements of a row are not adjacent")
    if sections.any():
        _sections(nodes, sections)
    scaled = nodes.with_source(2)
    if scaled is not None:
        _factors(scaled)


def _sections(nodes: Nodes, those: np.ndarray) -> None:
    """The kernel counts pairs of dimensions modulo the sum of the sections."""
    sizes = nodes.wide(11, 4)
    positive = (sizes >= 0).all(axis=1) & (sizes[:, :3].sum(axis=1) > 0)
    nodes.require(~those | positive, "the sections have no size")
    length = nodes.s(0).ne[:, 0]
    nodes.require(~those | (sizes.sum(axis=1) <= length), "the sections are too big")
    vision = nodes.params(2) == _VISION
    whole = (nodes.params(1) * 2 == length) & (nodes.params(15) == 0)
    nodes.require(~vision | whole, "the number of dimensions is not half a row's")


def _factors(nodes: Nodes) -> None:
    """The kernel reads a factor for each pair of elements of a row, although it has a use for
    those of `n_dims` only: models have no more. So what it reads need only be in the buffer."""
    s2 = nodes.s(2)
    nodes.require(s2.is_type(F32) & s2.adjacent, "frequency factors are not f32")
    nodes.require(s2.ne[:, 0] >= nodes.params(1) // 2, "too few frequency factors")
    read = nodes.s(0).ne[:, 0] // 2 * 4
    nodes.require(read <= s2.room, "too few frequency factors before the buffer's end")


@rule("SOFT_MAX", sources=1)
def soft_max(nodes: Nodes) -> None:
    d, s0 = nodes.d, nodes.s(0)
    nodes.require(d.same_shape(s0), "result and source differ in shape")
    nodes.require(d.is_type(F32) & s0.is_type(F32), "result or source is not f32")
    nodes.require(d.adjacent & s0.adjacent, "elements of a row are not adjacent")
    masked = nodes.with_source(1)
    if masked is not None:
        require_mask(masked, 1, masked.s(0).ne[:, 0], masked.s(0).ne[:, 1:])
        masked.require(masked.s(1).is_type(F32, F16), "the mask is neither f32 nor f16")
        masked.require(masked.s(1).contiguous, "the mask is not contiguous")
    sunk = nodes.with_source(2)
    if sunk is not None:
        require_sinks(sunk, 2)


def require_mask(nodes: Nodes, k: int, length: I64, rows: I64) -> None:
    """A mask: a row for each query, as long as there are keys, repeating over heads."""
    mask = nodes.s(k)
    nodes.require(mask.ne[:, 0] >= length, "the mask's rows are too short")
    nodes.require(mask.ne[:, 1] >= rows[:, 0], "the mask has too few rows")
    nodes.require(
        (rows[:, 1:] % np.maximum(mask.ne[:, 2:], 1) == 0).all(axis=1), "the mask does not repeat"
    )
    nodes.require(mask.adjacent, "the mask's rows are not adjacent")


def require_sinks(nodes: Nodes, k: int) -> None:
    """Sinks: a number for each head."""
    sinks = nodes.s(k)
    nodes.require(sinks.is_type(F32) & sinks.adjacent, "sinks are not f32")
    nodes.require(sinks.ne[:, 0] == nodes.s(0).ne[:, 2], "sinks do not match the heads")
