"""Small graphs whose cost is known: a product of matrices, reading memory, copying, nothing much.

Rows of EXT_TENSOR, as `scratch` computes them. Knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caravan.engine.layouts import FLAG_COMPUTE, OP_NAMES, TYPE_BLOCK, TYPE_BYTES, TYPE_NUMBERS
from caravan.plan.scratch import Rows
from caravan.wire.records import EXT_TENSOR

# bytes, of each tensor on a device
ALIGNMENT = 128

# what a worker's look at a graph costs goes also by how many ops there are
_SEVERAL = ("ADD", "MUL", "SUB", "DIV", "SQR", "SQRT", "CONT", "LOG")
_OF_TWO = ("ADD", "MUL", "SUB", "DIV")


@dataclass(frozen=True, slots=True)
class Sample:
    """One node, or some.

    Attributes:
        rows: the nodes first; `data` are offsets in a buffer of `size` bytes.
        flops, moved: operations of arithmetic, and bytes read and written.
    """

    rows: Rows
    size: int
    flops: float
    moved: float

    def at(self, base: int) -> Rows:
        """The rows for a buffer that begins at this address."""
        rows = self.rows.copy()
        rows["data"] += np.uint64(base)
        return rows


def product(kind: str, depth: int, rows: int, columns: int) -> Sample:
    """A matrix of `rows` rows of `depth` numbers of a type, by a matrix of f32 columns."""
    weights, vectors = _tensor(kind, depth, rows), _tensor("f32", depth, columns)
    result = _node("MUL_MAT", _tensor("f32", rows, columns))
    size, moved = _lay_out(result, weights, vectors)
    result["src"][0, :2] = 1, 2
    flops = 2.0 * depth * rows * columns
    return Sample(np.concatenate((result, weights, vectors)), size, flops, moved)


def copy(count: int) -> Sample:
    """So many f32 to another place."""
    source, target = _tensor("f32", count), _tensor("f32", count)
    size, moved = _lay_out(source, target)
    node = _node("CPY", target)
    node["src"][0, :2] = 1, 2
    node["view_src"] = 2
    return Sample(np.concatenate((node, source, target)), size, float(count), moved)


def addition(count: int) -> Sample:
    """Two rows of so many f32 added: with a few of them, a graph that is nothing but overhead."""
    one, other, result = (_tensor("f32", count) for _ in range(3))
    size, moved = _lay_out(one, other, result)
    node = _node("ADD", result)
    node["src"][0, :2] = 1, 2
    return Sample(np.concatenate((node, one, other)), size, float(count), moved)


def various(count: int) -> Sample:
    """So many nodes of several ops with next to nothing to compute, all of them into one row."""
    one = addition(32)
    rows = np.concatenate((np.repeat(one.rows[:1], count), one.rows[1:]))
    for i, node in enumerate(rows[:count]):
        op = _SEVERAL[i % len(_SEVERAL)]
        node["op"] = OP_NAMES.index(op)
        node["src"][:2] = count, count + 1 if op in _OF_TWO else -1
    return Sample(rows, one.size, count * one.flops, count * one.moved)


def ramp(mask: Rows) -> tuple[Rows, bytes]:
    """A graph that fills the mask of a micro-batch, and what it is made of: that belongs behind
    the mask, from the next multiple of 128 bytes on.

    The mask is one row (1,) of EXT_TENSOR, of f16 or f32, with its address. Each row of it sees an
    entry less than the one before: as many as of any prompt, in the other order.
    """
    columns, rows = mask["ne"][0, :2].tolist()
    unit = int(mask["nb"][0, 0])
    target = mask.copy()
    target["view_src"] = -1
    source = target.copy()
    address = int(mask["data"][0]) + int(mask["nb"][0, 3])
    source["data"] = -(-address // ALIGNMENT) * ALIGNMENT
    # each row begins an element further on
    source["nb"] = (unit, unit, unit * rows, unit * rows)
    node = _node("CPY", target)
    node["src"][0, :2] = 1, 2
    node["view_src"] = 2
    values = np.zeros(columns + rows, np.float16 if unit == 2 else np.float32)
    values[columns:] = -np.inf
    return np.concatenate((node, source, target)), values.tobytes()


def _tensor(kind: str, columns: int, rows: int = 1) -> Rows:
    number = TYPE_NUMBERS[kind]
    unit = int(TYPE_BYTES[number])
    stride = columns // int(TYPE_BLOCK[number]) * unit
    row = np.zeros(1, EXT_TENSOR)
    row["type"] = number
    row["ne"] = (columns, rows, 1, 1)
    row["nb"] = (unit, stride, stride * rows, stride * rows)
    row["src"] = row["view_src"] = -1
    row["use_count"] = 1
    return row


def _node(op: str, row: Rows) -> Rows:
    node = row.copy()
    node["op"] = OP_NAMES.index(op)
    node["flags"] = FLAG_COMPUTE
    return node


def _lay_out(*tensors: Rows) -> tuple[int, float]:
    """Give each its place; bytes in all with the gaps, and without."""
    at, used = 0, 0
    for tensor in tensors:
        tensor["data"] = at
        size = int(tensor["nb"][0, 3])
        used += size
        # where a device pads tensors, by less than a row of 512
        at = -(-(at + size + 2048) // ALIGNMENT) * ALIGNMENT
    return at, float(used)
