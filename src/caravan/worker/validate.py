"""What is checked of a graph before anything of it is built: nothing from the wire is trusted.

Every check runs over the whole table at once. `check` gives each row its place in real memory or
raises RemoteError with the reason. What single ops need is in `rules/`; an op without a rule there
is refused, as are those that only training needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from caravan.engine.layouts import OP_NAMES, TYPE_BLOCK, TYPE_BYTES
from caravan.errors import RemoteError
from caravan.wire.extension import ADDRESS_SHIFT, Status
from caravan.worker import rules
from caravan.worker.buffers import U64, Memory
from caravan.worker.rules.registry import I64, RULES, Bools, Facts, Nodes
from caravan.worker.table import Rows, Table

assert rules  # imported for what it registers

# No buffer is bigger, so no honest shape or stride is; it keeps all later sums within 64 bits.
_MAX_DIM = 1 << ADDRESS_SHIFT
_OFFSET = np.uint64(_MAX_DIM - 1)
_SHIFT = np.uint64(ADDRESS_SHIFT)

_BLOCK = np.asarray(TYPE_BLOCK, np.int64)
_BYTES = np.asarray(TYPE_BYTES, np.int64)
# Bits that must not be set in the addresses and strides of a type, by number: numbers lie at
# multiples of their size, and blocks, which have fields of at most 4 bytes, like such fields.
_MISPLACED = np.minimum(_BYTES & -_BYTES, np.where(_BLOCK > 1, 4, 8)) - 1
# Many kernels count rows, and elements of a row, in 32 bits.
_MOST_COUNTED = (1 << 31) - 1

_CPY = OP_NAMES.index("CPY")
_VIEW_NAMES = ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")

# Without a rule are the ops with function pointers from the wire, and those of training.
_REFUSED = np.array([number not in RULES for number in range(len(OP_NAMES))])
_EMPTY = np.array(
    [entry is not None and entry.empty for entry in map(RULES.get, range(len(OP_NAMES)))]
)
VIEW_OPS = np.isin(OP_NAMES, _VIEW_NAMES)

# the room that a tensor has which is in no buffer here, and so is never read
_ANYWHERE = np.iinfo(np.int64).max

# Bits of a tensor's flags that the engine knows; the rest would be read as nothing good.
_FLAGS = 31


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the rows of a checked table really are.

    Attributes:
        pointers: real data pointers, 0 for rows that are not on this device.
        buffers: real ggml_backend_buffer pointers, 0 likewise.
        handles: the buffers that the graph touches.
        empty: rows without elements.
    """

    pointers: U64
    buffers: U64
    handles: frozenset[int]
    empty: Bools


def check(table: Table, memory: Memory) -> Placement:
    """Raises RemoteError; `memory` is that of the device that shall compute the graph."""
    facts, placement = _check_all(table, memory)
    _check_presence(table, placement)
    _check_counts(table, facts, placement)
    _check_rules(table, facts, placement.empty)
    return placement


def check_record(table: Table, memory: Memory) -> Placement:
    """The same for a single tensor and its sources, which need not be anywhere yet."""
    facts, placement = _check_all(table, memory)
    _check_rules(table, facts, placement.empty)
    return placement


def _check_all(table: Table, memory: Memory) -> tuple[Facts, Placement]:
    """What must hold for every row, whatever it is for."""
    rows = table.rows
    _check_numbers(rows)
    _check_links(table)
    facts = _facts(rows)
    empty = np.asarray((facts.ne == 0).any(axis=1))
    _check_strides(rows, facts, empty)
    return facts, _place(rows, facts, empty, memory)


def refuse(rows: Rows, row: int, why: str) -> RemoteError:
    """The error for one row."""
    op = int(rows["op"][row])
    name = bytes(rows["name"][row]).decode("utf-8", "replace")
    text = OP_NAMES[op] if op < len(OP_NAMES) else str(op)
    return RemoteError(Status.REFUSED, f"tensor {row} ({text} '{name}'): {why}")


def _refuse_any(rows: Rows, wrong: npt.ArrayLike, why: str) -> None:
    if np.any(wrong):
        raise refuse(rows, int(np.flatnonzero(wrong)[0]), why)


def _check_numbers(rows: Rows) -> None:
    """Types and ops that exist, dimensions and strides within reason."""
    types = rows["type"]
    _refuse_any(rows, types >= len(_BLOCK), "no such type")
    _refuse_any(rows, _BLOCK[types] == 0, "the type no longer exists")
    _refuse_any(rows, rows["op"] >= len(OP_NAMES), "no such op")
    _refuse_any(rows, _REFUSED[rows["op"]], "this op is never computed for a head")
    ne = rows["ne"]
    _refuse_any(rows, ((ne < 0) | (ne > _MAX_DIM)).any(axis=1), "a dimension is out of range")
    _refuse_any(rows, (rows["nb"] > _MAX_DIM).any(axis=1), "a stride is out of range")
    elements = ne.astype(np.float64).prod(axis=1)
    _refuse_any(rows, elements > _MAX_DIM, "too many elements")
    _refuse_any(rows, (rows["flags"] & ~_FLAGS) != 0, "unknown flags")


def _check_links(table: Table) -> None:
    """References in range; a node's sources are earlier nodes or no nodes; views are flat."""
    rows, n_nodes = table.rows, table.n_nodes
    src, view = rows["src"], rows["view_src"]
    count = len(rows)
    _refuse_any(rows, ((src < -1) | (src >= count)).any(axis=1), "a source does not exist")
    _refuse_any(rows, (view < -1) | (view >= count), "the viewed tensor does not exist")
    own = np.arange(n_nodes)
    later = (src[:n_nodes] >= own[:, None]) & (src[:n_nodes] < n_nodes)
    # a cast is a copy to itself: the engine has the result as its destination too
    later[:, 1] &= ~((src[:n_nodes, 1] == own) & (rows["op"][:n_nodes] == _CPY))
    _refuse_any(rows, later.any(axis=1), "a source comes after its node")
    view_later = (view[:n_nodes] >= own) & (view[:n_nodes] < n_nodes)
    _refuse_any(rows, view_later, "the viewed tensor comes after its view")
    # The engine itself never makes a view of a view, and so cannot run in circles.
    deep = (view >= 0) & (view[np.maximum(view, 0)] >= 0)
    _refuse_any(rows, deep, "a view of a view")


def _facts(rows: Rows) -> Facts:
    types = rows["type"].astype(np.int64)
    ne = np.ascontiguousarray(rows["ne"])
    nb = rows["nb"].astype(np.int64)
    block, size = _BLOCK[types], _BYTES[types]
    return Facts(
        ne=ne,
        nb=nb,
        type=types,
        src=rows["src"].astype(np.int64),
        params=np.ascontiguousarray(rows["op_params"]),
        block=block,
        size=size,
        nbytes=extents(ne, nb, block, size),
        room=np.full(len(rows), _ANYWHERE),
        names=rows["name"],
    )


def extents(ne: I64, nb: I64, block: I64, size: I64) -> I64:
    """ggml_nbytes of every row; -1 where it would be more than any buffer holds."""
    steps = np.maximum(ne - 1, 0)
    about = (steps.astype(np.float64) * nb).sum(axis=1)
    spans = np.where(about[:, None] < 2.0 * _MAX_DIM, steps * nb, 0)
    rest = spans[:, 1:].sum(axis=1)
    plain = size + spans[:, 0] + rest
    quantized = ne[:, 0] * nb[:, 0] // block + rest
    total = np.where(block == 1, plain, quantized)
    total[(ne == 0).any(axis=1)] = 0
    total[about >= 2.0 * _MAX_DIM] = -1
    return np.asarray(total)


def _check_strides(rows: Rows, facts: Facts, empty: Bools) -> None:
    _refuse_any(rows, ~empty & (facts.nbytes < 0), "the extent is out of range")
    blocks = ~empty & (facts.block > 1)
    _refuse_any(rows, blocks & (facts.ne[:, 0] % facts.block != 0), "a row ends within a block")
    _refuse_any(rows, blocks & (facts.nb[:, 0] != facts.size), "blocks are not adjacent")


def _place(rows: Rows, facts: Facts, empty: Bools, memory: Memory) -> Placement:
    """Real pointers of the rows whose data lies in a buffer of this device.

    Data in another device's buffer counts as absent: an error only where it would be read.
    """
    data = rows["data"]
    handle, offset = data >> _SHIFT, data & _OFFSET
    if len(memory.handles) == 0:
        nowhere = np.zeros(len(rows), np.uint64)
        return Placement(nowhere, nowhere, frozenset(), empty)
    at = np.minimum(np.searchsorted(memory.handles, handle), len(memory.handles) - 1)
    here = memory.handles[at] == handle
    size = memory.sizes[at]
    need = facts.nbytes.astype(np.uint64)
    outside = here & ((offset > size) | (need > size - np.minimum(offset, size)))
    _refuse_any(rows, outside, "the data passes the end of its buffer")
    bits = offset | np.bitwise_or.reduce(facts.nb, axis=1).astype(np.uint64)
    misplaced = here & ~empty & (bits & _MISPLACED[facts.type].astype(np.uint64) != 0)
    _refuse_any(rows, misplaced, "the data or a stride is not aligned to the type")
    facts.room[here] = (size - np.minimum(offset, size))[here]
    handles = frozenset(np.unique(handle[here]).tolist())
    pointers = np.where(here, memory.bases[at] + offset, np.uint64(0))
    return Placement(pointers, np.where(here, memory.pointers[at], np.uint64(0)), handles, empty)


def _check_presence(table: Table, placement: Placement) -> None:
    """Nodes, and what they read, are in this device's memory; what they read is not empty.

    A view computes nothing: the engine leaves it in the split before, whose device may not have it.
    """
    rows, n_nodes = table.rows, table.n_nodes
    absent = (placement.pointers == 0) & ~placement.empty
    computes = ~VIEW_OPS[rows["op"][:n_nodes]]
    nowhere = absent[:n_nodes] & computes
    _refuse_any(rows, nowhere, "the node's data is in no buffer of this device")
    src = rows["src"][:n_nodes]
    reads = computes & ~placement.empty[:n_nodes]
    used = (src >= 0) & reads[:, None]
    _refuse_any(rows, (used & absent[src]).any(axis=1), "a source is in no buffer of this device")
    # In general they would be divided by.
    empty = used & placement.empty[src] & ~_EMPTY[rows["op"][:n_nodes], None]
    _refuse_any(rows, empty.any(axis=1), "a source has no elements")


def _check_counts(table: Table, facts: Facts, placement: Placement) -> None:
    """What is computed, and what that reads, is within what kernels can count."""
    rows, n_nodes = table.rows, table.n_nodes
    big = (facts.ne.max(axis=1) > _MOST_COUNTED) | (facts.ne[:, 1:].prod(axis=1) > _MOST_COUNTED)
    if not big.any():
        return
    computes = ~VIEW_OPS[rows["op"][:n_nodes]] & ~placement.empty[:n_nodes]
    src = facts.src[:n_nodes]
    wrong = computes & (big[:n_nodes] | ((src >= 0) & big[src]).any(axis=1))
    _refuse_any(rows, wrong, "a tensor has more rows, or longer ones, than kernels can count")


def _check_rules(table: Table, facts: Facts, empty: Bools) -> None:
    ops = table.rows["op"][: table.n_nodes]
    by_op = np.argsort(ops, kind="stable")
    numbers, starts = np.unique(ops[by_op], return_index=True)
    for number, nodes in zip(numbers.tolist(), np.split(by_op, starts[1:]), strict=True):
        entry = RULES[number]
        for k in range(entry.sources):
            Nodes(facts, nodes, OP_NAMES[number]).require(
                facts.src[nodes, k] >= 0, f"source {k} is missing"
            )
        full = nodes[~empty[nodes]]
        if len(full):
            entry.check(Nodes(facts, full, OP_NAMES[number]))
