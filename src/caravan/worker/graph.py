"""`Graph`: a checked table as ggml's own structures, ready to compute any number of times.

All tensors are one array of ggml_tensor, so that a pointer is a row number away; those of guards
come last. The Graph owns every byte that the engine sees of it, except for the buffers.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from caravan.engine import layouts
from caravan.errors import RemoteError
from caravan.wire.extension import Status
from caravan.worker.buffers import Buffer, Memory
from caravan.worker.device import DeviceBuffer
from caravan.worker.guards import Guard, Scratch, needed
from caravan.worker.table import Rows, Table
from caravan.worker.validate import VIEW_OPS, Placement, check, check_record, refuse

_NOTHING = layouts.OP_NAMES.index("NONE")
_STRIDE = layouts.GGML_TENSOR.itemsize
_SAME = ("type", "ne", "nb", "op", "op_params", "flags", "view_offs", "name")


class Computes(Protocol):
    """What a graph needs of a device."""

    guarded: bool

    def supports(self, tensor: int) -> bool: ...

    def estimate(self, table: Table) -> int: ...


class Initialises(Protocol):
    """What a tensor needs of a device that pads it."""

    def alloc_size(self, tensor: int) -> int: ...

    def init_tensor(self, buffer: DeviceBuffer, tensor: int) -> int: ...


class Graph:
    """A graph in the engine's form.

    Attributes:
        address: of the ggml_cgraph.
        handles: the buffers that it touches; when one is freed the graph must go.
        version: that of the buffer table it was checked against.
        nanoseconds: the device's estimate.
        scratch: bytes of memory for its guards.
    """

    __slots__ = (
        "_keep",
        "address",
        "handles",
        "n_nodes",
        "n_tensors",
        "nanoseconds",
        "scratch",
        "version",
    )

    def __init__(self, table: Table, memory: Memory, device: Computes) -> None:
        """Raises RemoteError when the table is not sound or the device cannot compute it."""
        placement = check(table, memory)
        guards = needed(table, placement.empty) if device.guarded else []
        tensors = build_tensors(table, placement, sum(guard.extra for guard in guards))
        check_support(table, tensors, device)
        self.n_nodes = table.n_nodes
        self.n_tensors = len(table.rows)
        self.handles = placement.handles
        self.version = memory.version
        self.nanoseconds = device.estimate(table)
        nodes, uses = np.arange(table.n_nodes), table.rows["use_count"][: table.n_nodes]
        arrays: list[Any] = []
        self.scratch = 0
        if guards:
            scratch = Scratch(table, guards)
            self.scratch, arrays = scratch.size, scratch.arrays
            nodes, uses = _build_guards(table, tensors, guards, scratch, nodes, uses)
        graph, pointed_to = _build_graph(tensors, nodes, uses)
        self._keep = [graph, *pointed_to, *arrays]
        self.address = int(graph.ctypes.data)


def tensor_alone(table: Table, memory: Memory) -> npt.NDArray[Any]:
    """A single tensor and its sources in the engine's form; the first is the tensor."""
    return build_tensors(table, check_record(table, memory))


def init_tensor(device: Initialises, table: Table, buffer: Buffer, memory: Memory) -> None:
    """Have the engine initialise a tensor in its buffer: it may write to what pads it.

    Raises RemoteError, also where the padding would pass the buffer's end.
    """
    tensors = tensor_alone(table, memory)
    if buffer.native is None:
        return
    address = int(tensors.ctypes.data)
    room = buffer.size - (int(table.rows["data"][0]) - buffer.base)
    size = device.alloc_size(address)
    if size > room:
        raise refuse(table.rows, 0, f"it needs {size} bytes with its padding, and has {room}")
    status = device.init_tensor(buffer.native, address)
    if status != 0 or tensors["extra"][0]:
        raise RemoteError(Status.BAD_REQUEST, f"the engine's init_tensor ended with {status}")


def build_tensors(table: Table, placement: Placement, extra: int = 0) -> npt.NDArray[Any]:
    """The array of ggml_tensor, with `extra` empty ones at the end."""
    rows, n_nodes = table.rows, table.n_nodes
    everything = _aligned(len(rows) + extra)
    tensors = everything[: len(rows)]
    for field in _SAME:
        tensors[field] = rows[field]
    # The engine prints names as C strings.
    tensors["name"].view((np.uint8, 64))[:, 63] = 0
    base = tensors.ctypes.data
    tensors["buffer"] = placement.buffers
    tensors["data"] = placement.pointers
    # Only nodes are computed; what the other rows came from is of no use here.
    tensors["src"][:n_nodes] = _pointers(rows["src"][:n_nodes], base)
    tensors["view_src"] = _pointers(rows["view_src"], base)
    # Of empty nodes nothing was checked, and the engine would plan for them before it skips them.
    tensors["op"][:n_nodes][placement.empty[:n_nodes]] = _NOTHING
    return everything


def _aligned(count: int) -> npt.NDArray[Any]:
    """Zeroed tensors at an address that is a multiple of 16, as ggml's hash takes for granted."""
    raw = np.zeros(count * _STRIDE + 16, np.uint8)
    skip = -raw.ctypes.data % 16
    return raw[skip : skip + count * _STRIDE].view(layouts.GGML_TENSOR)


def _pointers(index: Rows, base: int) -> npt.NDArray[np.uint64]:
    pointers = index.astype(np.uint64) * np.uint64(_STRIDE) + np.uint64(base)
    pointers[index < 0] = 0
    return np.asarray(pointers)


def check_support(table: Table, tensors: npt.NDArray[Any], device: Computes) -> None:
    """An op that the device cannot compute would end the process; here it is an answer."""
    base = tensors.ctypes.data
    for row in np.flatnonzero(~VIEW_OPS[table.rows["op"][: table.n_nodes]]).tolist():
        if not device.supports(base + row * _STRIDE):
            raise refuse(table.rows, row, "this device does not support it")


def _build_guards(
    table: Table,
    tensors: npt.NDArray[Any],
    guards: list[Guard],
    scratch: Scratch,
    nodes: Rows,
    uses: Rows,
) -> tuple[Rows, Rows]:
    """The nodes and their counts of uses with the guards among them."""
    base, first, added = tensors.ctypes.data, len(table.rows), []
    for guard in guards:
        result = scratch.fill(guard, tensors, first)
        for node, k in guard.users:
            tensors["src"][node, k] = base + result * _STRIDE
        added.append(first)
        first += guard.extra
    places = [guard.users[0][0] for guard in guards]
    return np.insert(nodes, places, added), np.insert(uses, places, 1)


def _build_graph(
    tensors: npt.NDArray[Any], order: Rows, use_counts: Rows
) -> tuple[npt.NDArray[Any], list[Any]]:
    """The ggml_cgraph of the tensors in this order, and everything it points to."""
    n_nodes, base = len(order), tensors.ctypes.data
    nodes = order.astype(np.uint64) * np.uint64(_STRIDE) + np.uint64(base)
    size = hash_size(len(tensors))
    slots = ((nodes >> np.uint64(4)) % np.uint64(size)).astype(np.int64)
    keys = np.zeros(size, np.uint64)
    keys[slots] = nodes
    uses = np.zeros(size, np.int32)
    uses[slots] = use_counts
    taken = np.zeros(-(-size // 32) * 32, np.bool_)
    taken[slots] = True
    used = np.packbits(taken, bitorder="little")
    graph = np.zeros(1, layouts.CGRAPH)
    graph["size"] = n_nodes
    graph["n_nodes"] = n_nodes
    graph["nodes"] = nodes.ctypes.data
    graph["use_counts"] = uses.ctypes.data
    graph["hash_size"] = size
    graph["hash_used"] = used.ctypes.data
    graph["hash_keys"] = keys.ctypes.data
    return graph, [tensors, nodes, keys, uses, used]


def hash_size(n_tensors: int) -> int:
    """A size of ggml's hash set in which no two of our tensors meet.

    ggml looks for a tensor at `(address >> 4) % size`. Ours are 336 = 16 * 21 bytes apart, so rows
    i and j meet only if size divides 21 * (i - j): never, for a size of at least the number of
    rows that shares no factor with 21.
    """
    size = 2 * n_tensors + 1
    while size % 3 == 0 or size % 7 == 0:
        size += 2
    return size


def check_status(status: int) -> None:
    """Raises RemoteError unless ggml's status of a computation says success."""
    if status != 0:
        raise RemoteError(Status.COMPUTE_FAILED, f"the engine's computation ended with {status}")
