"""Guards: nodes that the worker puts before kernels which trust numbers that nobody has checked.

The ids of MUL_MAT_ID and SSM_SCAN say what is read and written, and ARGSORT runs out of bounds when
a number is NaN. They may come about within the graph, so they can be looked at only there: by
other kernels, GET_ROWS, which ends the process at an index out of range, and CLAMP, which turns
NaN into a number. What comes out lies in memory that no head can reach. `graph` builds them in.
For devices that compute in this process only: others have memory of their own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from caravan.engine.layouts import OP_NAMES
from caravan.errors import RemoteError
from caravan.wire.extension import Status
from caravan.worker.rules.registry import F32, I32, MAX_SCRATCH
from caravan.worker.table import Table

_CLAMP, _GET_ROWS = OP_NAMES.index("CLAMP"), OP_NAMES.index("GET_ROWS")
# per op: which source has the numbers, and which dimension of source 0 they must be below
_IDS = {OP_NAMES.index("MUL_MAT_ID"): (2, 2), OP_NAMES.index("SSM_SCAN"): (6, 3)}
_SORT = OP_NAMES.index("ARGSORT")
_NEEDS = np.isin(np.arange(len(OP_NAMES)), (*_IDS, _SORT))

# What ids are below: experts of a layer, or sequences. Far above what there is of either.
MOST_NUMBERS = 1 << 22
_FEW_NUMBERS = 1 << 10

_ITEM = 4
_ALIGNMENT = 64
_EVERYTHING = np.array((-np.inf, np.inf), np.float32).view(np.int32)


@dataclass(frozen=True, slots=True)
class Guard:
    """What is put before the first of `users`.

    Attributes:
        row: of the numbers.
        limit: they must be in [0, limit); 0 for numbers that are sorted.
        users: (node, which source) that get the result in the place of the row.
    """

    row: int
    limit: int
    users: list[tuple[int, int]]

    @property
    def extra(self) -> int:
        """Tensors that it adds; the first is the node."""
        return 3 if self.limit else 1


def needed(table: Table, empty: npt.NDArray[np.bool_]) -> list[Guard]:
    """The guards of a checked graph, in the order of the nodes that they are for."""
    ops = table.rows["op"][: table.n_nodes]
    guards: dict[tuple[int, int], Guard] = {}
    for node in np.flatnonzero(_NEEDS[ops] & ~empty[: table.n_nodes]).tolist():
        number = int(ops[node])
        k, axis = _IDS.get(number, (0, None))
        src = table.rows["src"][node]
        limit = int(table.rows["ne"][src[0], axis]) if axis is not None else 0
        row = int(src[k])
        # ids often serve several nodes; what is sorted has memory for a moment only
        key = (row, limit) if limit else (-1, node)
        guards.setdefault(key, Guard(row, limit, [])).users.append((node, k))
    return list(guards.values())


class Scratch:
    """The memory of a graph's guards: private to it, and to one computation at a time.

    Attributes:
        arrays: what must stay alive.
        size: bytes.
    """

    def __init__(self, table: Table, guards: list[Guard]) -> None:
        """Raises RemoteError when it would take too much."""
        most = max((g.limit for g in guards), default=0)
        if most > MOST_NUMBERS:
            raise RemoteError(Status.REFUSED, f"ids below {most}: there may be {MOST_NUMBERS}")
        self._sizes = [int(table.rows["ne"][g.row].prod()) * _ITEM for g in guards]
        ids = sum(-(-n // _ALIGNMENT) * _ALIGNMENT for n in self._lasting(guards))
        keys = max((n for n, g in zip(self._sizes, guards, strict=True) if not g.limit), default=0)
        if max(ids, keys) > MAX_SCRATCH:
            raise RemoteError(Status.REFUSED, "the graph's ids would take too much scratch memory")
        self._ids, self._keys = np.empty(ids // _ITEM, np.int32), np.empty(keys, np.uint8)
        self._numbers = _numbers(most)
        self.size = ids + keys
        self._used = 0
        self.arrays = [self._ids, self._keys, self._numbers]

    def _lasting(self, guards: list[Guard]) -> list[int]:
        return [n for n, g in zip(self._sizes, guards, strict=True) if g.limit]

    def fill(self, guard: Guard, tensors: npt.NDArray[Any], first: int) -> int:
        """Make the guard's tensors, from `first` on; the row that its users shall have."""
        base, stride = tensors.ctypes.data, tensors.itemsize
        node, source = tensors[first], tensors[guard.row]
        # for each of them: what the engine leaves out may be the first alone
        users = [user for user, _ in guard.users]
        node["flags"] = np.bitwise_or.reduce(tensors["flags"][users])
        node["buffer"] = source["buffer"]
        node["name"] = b"guard"
        node["src"][0] = base + guard.row * stride
        if not guard.limit:
            node["type"], node["op"], node["op_params"][:2] = F32, _CLAMP, _EVERYTHING
            _lay_out(node, source["ne"], int(self._keys.ctypes.data))
            return first
        numbers, checked = tensors[first + 1], tensors[first + 2]
        node["src"][:2] = base + (first + 1) * stride, node["src"][0]
        place = int(self._ids.ctypes.data) + self._used
        self._used += -(-int(source["ne"].prod()) * _ITEM // _ALIGNMENT) * _ALIGNMENT
        # One number a row, and the same rows for all: the kernel checks that they are there.
        node["type"], node["op"] = I32, _GET_ROWS
        _lay_out(node, (1, *source["ne"][:3]), place)
        for other in (numbers, checked):
            other["type"], other["buffer"] = I32, source["buffer"]
        _lay_out(numbers, (1, guard.limit, *source["ne"][1:3]), int(self._numbers.ctypes.data))
        numbers["nb"] = (_ITEM, _ITEM, 0, 0)
        _lay_out(checked, source["ne"], place)
        return first + 2


@functools.cache
def _up_to(most: int) -> npt.NDArray[np.int32]:
    return np.arange(most, dtype=np.int32)


def _numbers(most: int) -> npt.NDArray[np.int32]:
    """The numbers below `most`, and some more; the same ones for all graphs, which only read them:
    whoever sends many graphs has no more of them for that."""
    size = _FEW_NUMBERS
    while size < most:
        size *= 2
    return _up_to(size)


def _lay_out(tensor: Any, ne: Any, place: int) -> None:
    """Sizes, the strides that leave no gaps, and the place."""
    tensor["ne"] = ne
    tensor["nb"] = _ITEM * np.concatenate(([1], np.cumprod(tensor["ne"][:3])))
    tensor["data"] = place
