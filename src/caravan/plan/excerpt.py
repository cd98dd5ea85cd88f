"""`Excerpt`: some nodes of a recorded graph as a graph of its own, in a buffer of its own.

What they read that is not among them becomes a leaf. Tensors that share memory still do; the rest
moves together. Arrays only: knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caravan.engine.layouts import OP_NAMES, TYPE_BLOCK, TYPE_BYTES
from caravan.plan.samples import ALIGNMENT
from caravan.plan.scratch import Rows
from caravan.worker.validate import VIEW_OPS, extents

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

Parts = tuple[int, int, int, int]

_INTEGERS = (24, 25, 26, 27)  # i8 to i64
# which source of an op is a mask
_MASKS = {OP_NAMES.index("FLASH_ATTN_EXT"): 3, OP_NAMES.index("SOFT_MAX"): 1}


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Rows that are to be put somewhere.

    Memory comes in parts, since all that is read and never written must stay as it is (an index
    that is no zero may lead anywhere), also when other excerpts are computed in between.

    Attributes:
        rows: EXT_TENSOR, nodes first; `data` are offsets in a part.
        n_nodes: 0 if nothing is to be computed.
        part: of each row: 0 integers, 1 what is only read, 2 what is written, 3 masks of
            attention; -1: nowhere.
        sizes: bytes of each part.
        masks: rows of the masks. Behind each there is room for a row and a column of it, from the
            next multiple of 128 bytes on.
    """

    rows: Rows
    n_nodes: int
    part: NDArray[np.int8]
    sizes: Parts
    masks: tuple[int, ...] = ()

    def at(self, bases: Parts, count: int = 1) -> tuple[Rows, int]:
        """The rows with addresses, and how many are nodes: so many times the same, one after the
        other, each with memory of its own behind that of the one before, but for integers and
        masks.

        Args:
            bases: of the parts, 128 bytes aligned; there are `sizes` bytes, times `count`.
        """
        n, total = self.n_nodes, len(self.rows)
        steps = (0, self.sizes[1], self.sizes[2], 0)
        copies = []
        for number in range(count):
            rows = self.rows.copy()
            for part, (base, step) in enumerate(zip(bases, steps, strict=True)):
                rows["data"][self.part == part] += np.uint64(base + number * step)
            # all nodes come first
            places = np.arange(total + 1, dtype=np.int32) + number * n
            places[n:] += (count - 1) * n + number * (total - n) - number * n
            places[total] = -1
            rows["src"] = places[rows["src"]]
            rows["view_src"] = places[rows["view_src"]]
            copies.append(rows)
        parts = [rows[:n] for rows in copies] + [rows[n:] for rows in copies]
        return np.concatenate(parts), n * count


def excerpt(rows: Rows, n_nodes: int, chosen: Bools, gap: int = 0) -> Excerpt:
    """The nodes (n_nodes,) that are chosen, with all that they refer to.

    Args:
        rows: EXT_TENSOR, nodes first.
        gap: bytes left after each tensor, for devices that pad them.
    """
    out, n = _cut(rows, n_nodes, chosen)
    if not n or not _computes(out[:n]).any():
        return Excerpt(out, 0, np.full(len(out), -1, np.int8), (0, 0, 0, 0))
    size = _extents(out)
    there = (out["data"] != 0) & (size > 0)
    data = out["data"].astype(np.int64)
    root = np.where(out["view_src"] >= 0, out["view_src"], np.arange(len(out)))
    masks = _masks(out, n, there)
    part = np.full(len(out), -1, np.int8)
    offset = np.zeros(len(out), np.int64)
    sizes = [0, 0, 0, 0]
    alone = {0: np.flatnonzero(_integers(out, n, there)), 3: masks}
    behind = {0: np.zeros(len(out), np.int64), 3: _ramps(out)}
    for number, roots in alone.items():
        mine = np.isin(root, roots) & there
        room = size[roots] + behind[number][roots]
        at = np.zeros(len(out), np.int64)
        at[roots], sizes[number] = _line_up(room, np.zeros(len(roots), np.int64), gap)
        part[mine] = number
        offset[mine] = (at[root] + data - data[root])[mine]
    rest = np.flatnonzero(there & (part < 0))
    span, starts, ends = _spans(data[rest], data[rest] + size[rest])
    writing = np.zeros(len(starts), np.bool_)
    writing[span[_writes(out, n)[rest]]] = True
    for number, mine in ((1, ~writing), (2, writing)):
        spans = np.flatnonzero(mine)
        places, sizes[number] = _line_up((ends - starts)[spans], starts[spans], gap)
        moved = np.zeros(len(starts), np.int64)
        moved[spans] = places - starts[spans]
        these = mine[span]
        part[rest[these]] = number
        offset[rest[these]] = data[rest[these]] + moved[span[these]]
    # a tensor without elements has no memory, but some engines look whether it has a place
    hollow = (size == 0) & (out["data"] != 0)
    part[hollow] = 2
    out["data"] = offset.astype(np.uint64)
    parts = (sizes[0], sizes[1], max(sizes[2], ALIGNMENT), sizes[3])
    return Excerpt(out, n, part, parts, tuple(masks.tolist()))


def _cut(rows: Rows, n_nodes: int, chosen: Bools) -> tuple[Rows, int]:
    """The rows of the excerpt, and how many are nodes; sources and views by their new numbers."""
    nodes = np.flatnonzero(chosen)
    refs = np.concatenate((rows["src"][nodes].ravel(), rows["view_src"][nodes]))
    leaves = np.setdiff1d(refs[refs >= 0], nodes)
    order = np.concatenate((nodes, leaves))
    # the last stands for -1
    number = np.full(len(rows) + 1, -1, np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    out = rows[order].copy()
    n = len(nodes)
    out["src"][:n] = number[out["src"][:n]]
    out["view_src"][:n] = number[out["view_src"][:n]]
    out["src"][n:] = out["view_src"][n:] = -1
    for field in ("op", "op_params", "flags", "view_offs"):
        out[field][n:] = 0
    return out, n


def _extents(rows: Rows) -> I64:
    types = rows["type"].astype(np.int64)
    ne = np.ascontiguousarray(rows["ne"])
    return extents(ne, rows["nb"].astype(np.int64), TYPE_BLOCK[types], TYPE_BYTES[types])


def _computes(nodes: Rows) -> Bools:
    return np.asarray(~VIEW_OPS[nodes["op"]] & (nodes["ne"] > 0).all(axis=1))


def _integers(rows: Rows, n_nodes: int, there: Bools) -> Bools:
    """Those from outside: in the whole graph their memory may be used again later on."""
    leaf = np.arange(len(rows)) >= n_nodes
    return np.asarray(leaf & there & np.isin(rows["type"], _INTEGERS))


def _masks(rows: Rows, n_nodes: int, there: Bools) -> I64:
    """The leaves that are masks of attention, or that masks are made of."""
    found = set()
    for op, source in _MASKS.items():
        for node in np.flatnonzero(rows["op"][:n_nodes] == op).tolist():
            row = int(rows["src"][node, source])
            while 0 <= row < n_nodes:
                row = int(rows["src"][row, 0])
            if row >= 0 and there[row]:
                found.add(row)
    return np.array(sorted(found), np.int64)


def _ramps(rows: Rows) -> I64:
    """Bytes of a row and a column of each, and to the next multiple of the alignment."""
    unit = TYPE_BYTES[rows["type"]]
    return np.asarray((rows["ne"][:, 0] + rows["ne"][:, 1]) * unit + ALIGNMENT)


def _writes(rows: Rows, n_nodes: int) -> Bools:
    writes = np.zeros(len(rows), np.bool_)
    writes[:n_nodes] = _computes(rows[:n_nodes])
    return writes


def _spans(starts: I64, ends: I64) -> tuple[I64, I64, I64]:
    """Which span each belongs to, and start and end of the spans: what overlaps is one."""
    order = np.argsort(starts, kind="stable")
    first, last = starts[order], np.maximum.accumulate(ends[order])
    new = np.append(True, first[1:] >= last[:-1])[: len(first)]
    span = np.empty(len(starts), np.int64)
    span[order] = np.cumsum(new) - 1
    at = np.flatnonzero(new)
    return span, first[at], last[np.append(at[1:] - 1, len(last) - 1)[: len(at)]]


def _line_up(sizes: I64, phases: I64, gap: int) -> tuple[I64, int]:
    """Places one after the other, as far from a multiple of the alignment as before; the end."""
    phase = phases % ALIGNMENT
    room = -(-(sizes + phase + gap) // ALIGNMENT) * ALIGNMENT
    ends = np.cumsum(room)
    return ends - room + phase, int(ends[-1]) if len(ends) else 0
