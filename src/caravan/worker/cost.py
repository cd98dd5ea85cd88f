"""The cost model of simulated devices: what a checked graph computes and moves, node by node.

A node takes as long as its arithmetic or its memory traffic, whichever is slower; one node runs
after the other. Knows tables and speeds, no devices; vectorised over the nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from caravan.engine.layouts import FLAG_COMPUTE, OP_NAMES, TYPE_BLOCK, TYPE_BYTES
from caravan.worker.speed import Speed
from caravan.worker.table import Table
from caravan.worker.validate import VIEW_OPS

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_LONGEST = 1 << 62
_UNIT = TYPE_BYTES / np.maximum(TYPE_BLOCK, 1)  # bytes an element, by type


def nanoseconds(table: Table, speed: Speed) -> int:
    """How long a device of this speed takes for a checked graph."""
    flops, moved = work(table)
    with np.errstate(over="ignore"):
        # 10^9 a second is 1 a nanosecond
        total = float(np.maximum(flops / speed.gflops, moved / speed.gbps).sum())
    return int(min(total + speed.us * 1e3, float(_LONGEST)))


def work(table: Table) -> tuple[F64, F64]:
    """Operations of arithmetic, and bytes read and written, of every node."""
    sizes = _Sizes(table)
    n_nodes = table.n_nodes
    own, first = sizes.elements[:n_nodes], sizes.of_source(sizes.elements, 0)
    flops = np.maximum(own, first)
    moved = sizes.bytes[:n_nodes] + sizes.bytes[sizes.src].sum(axis=1)
    ops = table.rows["op"][:n_nodes]
    for op, rule in _RULES.items():
        nodes = np.flatnonzero(ops == op)
        if len(nodes):
            flops[nodes], moved[nodes] = rule(sizes, nodes, moved[nodes])
    # the engine itself passes over all of these
    idle = VIEW_OPS[ops] | (own == 0) | (table.rows["flags"][:n_nodes] & FLAG_COMPUTE == 0)
    flops[idle] = moved[idle] = 0
    return flops, moved


class _Sizes:
    """Sizes of all rows and, behind them, those of a source that is not there: the index -1.

    Attributes:
        src: the nodes' sources.
        ne: dimensions.
        elements, unit, bytes: how many, the bytes of one, and both multiplied: what a tensor or a
            view touches when all of it is read or written once.
    """

    def __init__(self, table: Table) -> None:
        rows = table.rows
        absent = np.zeros((1, 4))
        self.src: I64 = rows["src"][: table.n_nodes].astype(np.int64)
        self.ne: F64 = np.concatenate((rows["ne"].astype(np.float64), absent))
        self.elements: F64 = self.ne.prod(axis=1)
        self.unit: F64 = np.append(_UNIT[rows["type"]], 0.0)
        self.bytes: F64 = self.elements * self.unit

    def of_source(self, what: F64, k: int) -> F64:
        """`what` of every node's source number k."""
        return np.asarray(what[self.src[:, k]])


# What an op costs that does not go by the elements and bytes of all its tensors: given the nodes
# and those bytes, their (operations, bytes).
_Rule = Callable[[_Sizes, I64, F64], tuple[F64, F64]]


def _mul_mat(sizes: _Sizes, nodes: I64, moved: F64) -> tuple[F64, F64]:
    depth = sizes.ne[sizes.src[nodes, 0], 0]
    return 2 * sizes.elements[nodes] * depth, moved


def _mul_mat_id(sizes: _Sizes, nodes: I64, moved: F64) -> tuple[F64, F64]:
    """Of the experts, no more are read than there are choices of one."""
    experts, ids = sizes.src[nodes, 0], sizes.src[nodes, 2]
    used = np.minimum(sizes.elements[ids] / np.maximum(sizes.ne[experts, 2], 1), 1)
    flops, _ = _mul_mat(sizes, nodes, moved)
    return flops, moved - (1 - used) * sizes.bytes[experts]


def _out_prod(sizes: _Sizes, nodes: I64, moved: F64) -> tuple[F64, F64]:
    depth = sizes.ne[sizes.src[nodes, 0], 1]
    return 2 * sizes.elements[nodes] * depth, moved


def _flash_attn_ext(sizes: _Sizes, nodes: I64, moved: F64) -> tuple[F64, F64]:
    """Every query with every key, and as many values: what a mask hides is computed as well."""
    q, k, v = (sizes.ne[sizes.src[nodes, i]] for i in range(3))
    return 2 * q[:, 1:].prod(axis=1) * k[:, 1] * (k[:, 0] + v[:, 0]), moved


def _get_rows(sizes: _Sizes, nodes: I64, moved: F64) -> tuple[F64, F64]:
    """The table is read only where its rows are taken."""
    table, elements = sizes.src[nodes, 0], sizes.elements[nodes]
    return elements, moved - sizes.bytes[table] + elements * sizes.unit[table]


def _set_rows(sizes: _Sizes, nodes: I64, moved: F64) -> tuple[F64, F64]:
    """The node is a view of the whole table, which is also its third source."""
    new, table = sizes.elements[sizes.src[nodes, 0]], sizes.src[nodes, 2]
    untouched = sizes.bytes[nodes] + sizes.bytes[table]
    return new, moved - untouched + new * sizes.unit[nodes]


def _cpy(sizes: _Sizes, nodes: I64, moved: F64) -> tuple[F64, F64]:
    """The node is a view of where it writes, which is also its second source."""
    return sizes.elements[nodes], moved - sizes.bytes[sizes.src[nodes, 1]]


_RULES: dict[int, _Rule] = {
    OP_NAMES.index(name): rule
    for name, rule in (
        ("MUL_MAT", _mul_mat),
        ("MUL_MAT_ID", _mul_mat_id),
        ("OUT_PROD", _out_prod),
        ("FLASH_ATTN_EXT", _flash_attn_ext),
        ("GET_ROWS", _get_rows),
        ("SET_ROWS", _set_rows),
        ("CPY", _cpy),
    )
}
