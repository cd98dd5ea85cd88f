"""The registry of op rules, and `Nodes`: all nodes of one op as columns, for vectorised rules.

A rule states what a kernel takes for granted: shapes, types, strides, parameters. What it checks
itself ends the process, so that belongs to the rule too. Families register theirs with `@rule`;
`validate` looks them up by op number, and refuses an op that has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from caravan.engine.layouts import OP_NAMES, TYPE_BLOCK
from caravan.errors import RemoteError
from caravan.wire.extension import Status

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

F32, F16, I8, I16, I32, I64_TYPE, F64, BF16 = 0, 1, 24, 25, 26, 27, 28, 30
_Q8_1, _Q8_K = 9, 15
# iq2_xxs, iq2_xs, iq3_xxs, iq1_s, iq3_s, iq2_s, iq1_m
_READ_ONLY = (16, 17, 18, 19, 21, 22, 29)

# The most a kernel's scratch memory may come to: far above what any model's ubatch needs, and
# below what ends the process instead of a graph.
MAX_SCRATCH = 8 << 30


def _flags(missing: tuple[int, ...]) -> Bools:
    """Per type number whether it is one of ggml's and not in `missing`."""
    known = TYPE_BLOCK > 0
    known[list(missing)] = False
    return np.asarray(known)


# By type number. What the engine has code for: to multiply with rows of it, to turn its rows into
# f32, and to make its rows from f32.
_MULTIPLIES = _flags((I8, I16, I32, I64_TYPE, F64, _Q8_1, _Q8_K))
_READABLE = _flags((I8, I16, I32, I64_TYPE, F64, _Q8_1, _Q8_K))
_WRITABLE = _flags((I8, I16, I32, I64_TYPE, F64, _Q8_1, _Q8_K, *_READ_ONLY))


@dataclass(frozen=True)
class Facts:
    """The checked columns of a table, contiguous.

    Attributes:
        block, size: elements and bytes of a block of the row's type.
        nbytes: extents.
        room: bytes from the data to the end of its buffer; those of a tensor that is in none here
            are without bound, as it is not read.
    """

    ne: I64
    nb: I64
    type: I64
    src: I64
    params: npt.NDArray[np.int32]
    block: I64
    size: I64
    nbytes: I64
    room: I64
    names: Any


class Nodes:
    """The nodes of one op; `k` of a method is a source number, or None for the node itself."""

    def __init__(self, facts: Facts, rows: I64, op: str) -> None:
        self._facts = facts
        self._rows = rows
        self.op = op

    @cached_property
    def d(self) -> Tensors:
        """The results."""
        return Tensors(self._facts, self._rows)

    def s(self, k: int) -> Tensors:
        """Source k of every node; it must be there in all of them (see `with_source`)."""
        return Tensors(self._facts, self._facts.src[self._rows, k])

    def has(self, k: int) -> Bools:
        """Which nodes have source k."""
        return np.asarray(self._facts.src[self._rows, k] >= 0)

    def with_source(self, k: int) -> Nodes | None:
        """The nodes that have source k; None when no node does."""
        has = self.has(k)
        if has.all():
            return self
        return Nodes(self._facts, self._rows[has], self.op) if has.any() else None

    def params(self, k: int) -> npt.NDArray[np.int32]:
        """Parameter k as i32."""
        return np.asarray(self._facts.params[self._rows, k])

    def floats(self, k: int) -> npt.NDArray[np.float32]:
        """Parameter k as f32."""
        return self.params(k).view(np.float32)

    def wide(self, first: int, count: int) -> I64:
        """`count` parameters from `first` on, one column each, in 64 bits for sums."""
        return np.asarray(self._facts.params[self._rows, first : first + count], np.int64)

    def require(self, good: Bools | np.bool_ | bool, what: str) -> None:
        """Refuse the graph unless `good` holds for every node."""
        if np.all(good):
            return
        bad = np.flatnonzero(~np.broadcast_to(good, self._rows.shape))[0]
        raise RemoteError(Status.REFUSED, self._text(int(self._rows[bad]), what))

    def _text(self, row: int, what: str) -> str:
        name = bytes(self._facts.names[row]).decode("utf-8", "replace")
        return f"node {row} ({self.op} '{name}'): {what}"


class Tensors:
    """The same tensor of several nodes, as columns."""

    def __init__(self, facts: Facts, rows: I64) -> None:
        self._facts = facts
        self.rows = rows

    @cached_property
    def ne(self) -> I64:
        return self._facts.ne.take(self.rows, axis=0)

    @cached_property
    def nb(self) -> I64:
        return self._facts.nb.take(self.rows, axis=0)

    @cached_property
    def type(self) -> I64:
        return self._facts.type.take(self.rows)

    @cached_property
    def nelements(self) -> I64:
        return np.asarray(self.ne.prod(axis=1))

    @cached_property
    def size(self) -> I64:
        """Bytes of a block of its type."""
        return self._facts.size.take(self.rows)

    @cached_property
    def per_block(self) -> I64:
        """Elements of a block of its type."""
        return self._facts.block.take(self.rows)

    @cached_property
    def nbytes(self) -> I64:
        """Their extents."""
        return self._facts.nbytes.take(self.rows)

    @cached_property
    def room(self) -> I64:
        """Bytes from the data to the end of the buffer."""
        return self._facts.room.take(self.rows)

    @cached_property
    def nrows(self) -> I64:
        return np.asarray(self.ne[:, 1:].prod(axis=1))

    @cached_property
    def packed(self) -> Bools:
        """Elements of a row lie next to each other: many kernels insist on that stride."""
        return np.asarray(self.nb[:, 0] == self.size)

    @cached_property
    def adjacent(self) -> Bools:
        """Elements of a row lie next to each other, or there is but one."""
        return np.asarray(self.packed | (self.ne[:, 0] == 1))

    @cached_property
    def _dense_strides(self) -> I64:
        """What the strides of dimensions 1 to 3 are when there are no gaps."""
        row = self.size * self.ne[:, 0] // self.per_block
        return np.column_stack((row, row * self.ne[:, 1], row * self.ne[:, 1] * self.ne[:, 2]))

    @cached_property
    def contiguous(self) -> Bools:
        """All elements lie next to each other; strides of dimensions of size 1 do not count."""
        good = (self.ne[:, 1:] == 1) | (self.nb[:, 1:] == self._dense_strides)
        return np.asarray(self.adjacent & good.all(axis=1))

    @cached_property
    def dense(self) -> Bools:
        """Contiguous, and the strides of dimensions of size 1 are right too: some kernels use them
        for the layout of something else."""
        good = self.nb[:, 1:] == self._dense_strides
        return np.asarray(self.packed & good.all(axis=1))

    @cached_property
    def gapless(self) -> Bools:
        """As many bytes as elements, in whatever order of dimensions."""
        return np.asarray(self.nbytes == self.nelements * self.size)

    @cached_property
    def in_line(self) -> Bools:
        """Row i of all rows begins at i * nb[1], whatever the higher strides say.

        Some kernels count on it and look at nb[1] even where that dimension has size 1.
        """
        good = self.adjacent.copy()
        want = self.nb[:, 1] * self.ne[:, 1]
        for axis in (2, 3):
            good &= (self.ne[:, axis] == 1) | (self.nb[:, axis] == want)
            want = want * self.ne[:, axis]
        return np.asarray(good)

    def is_type(self, *types: int) -> Bools:
        # not np.isin, which costs more than all the rest of a rule
        good = self.type == types[0]
        for other in types[1:]:
            good = good | (self.type == other)
        return np.asarray(good)

    @cached_property
    def ascending(self) -> Bools:
        """Strides do not shrink from one dimension to the next: not transposed or permuted."""
        return np.asarray((self.nb[:, :3] <= self.nb[:, 1:]).all(axis=1))

    @cached_property
    def quantized(self) -> Bools:
        return np.asarray(self.per_block > 1)

    @cached_property
    def multiplies(self) -> Bools:
        """The engine can multiply with their rows."""
        return np.asarray(_MULTIPLIES[self.type])

    @cached_property
    def readable(self) -> Bools:
        """The engine can turn their rows into f32."""
        return np.asarray(_READABLE[self.type])

    @cached_property
    def writable(self) -> Bools:
        """The engine can make their rows from f32."""
        return np.asarray(_WRITABLE[self.type])

    def same_shape(self, other: Tensors) -> Bools:
        return np.asarray((self.ne == other.ne).all(axis=1))

    def has_shape(self, *sizes: I64 | int) -> Bools:
        """The first dimensions have these sizes, and the others the size 1."""
        good = self.ne[:, 0] == sizes[0]
        for axis in (1, 2, 3):
            good = good & (self.ne[:, axis] == (sizes[axis] if axis < len(sizes) else 1))
        return np.asarray(good)

    def repeats_into(self, other: Tensors) -> Bools:
        """Every dimension of `other` is a multiple of this one's."""
        return np.asarray((other.ne % np.maximum(self.ne, 1) == 0).all(axis=1))


Rule = Callable[[Nodes], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered rule, for nodes with elements.

    Attributes:
        sources: so many of the first ones must be there.
        empty: whether sources may have no elements.
    """

    sources: int
    check: Rule
    empty: bool


RULES: dict[int, Entry] = {}


def rule(*names: str, sources: int, empty: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for the ops `names`; see `Entry`."""

    def register(check: Rule) -> Rule:
        for name in names:
            RULES[OP_NAMES.index(name)] = Entry(sources, check, empty)
        return check

    return register
