"""The registry of op rules, and `Nodes`: all nodes of one op as columns, for vectorised rules.

A rule states what a kernel takes for granted and does not check. Families register theirs with
`@rule`; `validate` looks them up by op number. An op without a rule gets only the checks that hold
for every tensor, unless it is refused outright.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from caravan.engine.layouts import OP_NAMES
from caravan.errors import RemoteError
from caravan.wire.extension import Status

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

F32, F16, I32, I64_TYPE, BF16 = 0, 1, 26, 27, 30
_PLAIN_INTEGERS_AND_F64 = (24, 25, I32, I64_TYPE, 28)


@dataclass(frozen=True)
class Facts:
    """The checked columns of a table, contiguous. `nbytes` are extents; `block` per row."""

    ne: I64
    nb: I64
    type: I64
    src: I64
    params: npt.NDArray[np.int32]
    block: I64
    size: I64
    nbytes: I64
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

    def require(self, good: Bools | bool, what: str) -> None:
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
    def packed(self) -> Bools:
        """Elements of a row lie next to each other."""
        return np.asarray(self.nb[:, 0] == self.size)

    @cached_property
    def contiguous(self) -> Bools:
        """All elements lie next to each other; strides of dimensions of size 1 do not count."""
        want = self.size * self.ne[:, 0] // self._facts.block[self.rows]
        good = self.packed | ((self.ne[:, 0] == 1) & (self._facts.block[self.rows] == 1))
        for axis in (1, 2, 3):
            good &= (self.ne[:, axis] == 1) | (self.nb[:, axis] == want)
            want = want * self.ne[:, axis]
        return np.asarray(good)

    @cached_property
    def in_line(self) -> Bools:
        """Row i of all rows begins at i * nb[1], whatever the higher strides say.

        Some kernels count on it and look at nb[1] even where that dimension has size 1.
        """
        good = self.packed.copy()
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
        return np.asarray(self._facts.block[self.rows] > 1)

    @cached_property
    def real(self) -> Bools:
        """Floats up to 32 bits, or quantized: what the arithmetic kernels have code for."""
        return ~self.is_type(*_PLAIN_INTEGERS_AND_F64)

    def same_shape(self, other: Tensors) -> Bools:
        return np.asarray((self.ne == other.ne).all(axis=1))

    def repeats_into(self, other: Tensors) -> Bools:
        """Every dimension of `other` is a multiple of this one's."""
        return np.asarray((other.ne % np.maximum(self.ne, 1) == 0).all(axis=1))


Rule = Callable[[Nodes], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered rule: how many sources must be there, and the shape rule for nodes with
    elements."""

    sources: int
    check: Rule


RULES: dict[int, Entry] = {}


def rule(*names: str, sources: int) -> Callable[[Rule], Rule]:
    """Register a rule for the ops `names`, which need their first `sources` sources."""

    def register(check: Rule) -> Rule:
        for name in names:
            RULES[OP_NAMES.index(name)] = Entry(sources, check)
        return check

    return register
