"""From a ggml_cgraph to the array of records that travels: one gather, then NumPy.

A graph is cut at its own nodes: what a node reads that is not itself a node goes along as a leaf,
without its own sources, since the worker only needs its place and shape. So neither the size nor
the time depends on what lies behind the split.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from caravan.backend.written import written
from caravan.engine import layouts
from caravan.errors import LocalProtocolError
from caravan.stream.link import ExtGraph
from caravan.transport.base import Buffer
from caravan.wire.extension import ADDRESS_SHIFT
from caravan.wire.records import EXT_TENSOR, RPC_TENSOR

_U64 = npt.NDArray[np.uint64]
_TENSOR_SIZE = layouts.GGML_TENSOR.itemsize
# size, n_nodes, n_leafs; nodes, grads, grad_accs, leafs, use_counts; the hash set's size, used,
# keys; order; uid: as layouts.CGRAPH has them
_CGRAPH = struct.Struct("<iii4x8Qi4xQ")
_MAX_NODES = 1 << 20
_UID_AT = layouts.CGRAPH_AT["uid"]
_N_NODES_AT = layouts.CGRAPH_AT["n_nodes"]
_string_at = ctypes.string_at
_u64 = ctypes.c_uint64.from_address
_i32 = ctypes.c_int32.from_address


def gather(addresses: list[int]) -> npt.NDArray[Any]:
    """The ggml_tensor structs at `addresses`, as an array of layouts.GGML_TENSOR."""
    size = _TENSOR_SIZE
    raw = b"".join([_string_at(address, size) for address in addresses])
    return np.frombuffer(raw, layouts.GGML_TENSOR)


class Graph:
    """One graph, to be read inside graph_compute and not later: the engine reuses its structs.

    Args:
        cgraph: address of the ggml_cgraph.
        handle_of: gives a buffer's handle by the address of its ggml_backend_buffer; 0 for what is
            not where the graph goes.
        pads: whether a tensor may take more bytes on the device than its own.

    Attributes:
        uid: the engine's number of it; 0 when it has none.
        n_nodes: nodes in execution order, the first rows of the table.

    Raises LocalProtocolError for a number of nodes that cannot be.
    """

    __slots__ = ("_cgraph", "_handle_of", "_pads", "n_nodes", "uid")

    def __init__(self, cgraph: int, handle_of: Callable[[int], int], pads: bool) -> None:
        self._cgraph = cgraph
        self._handle_of = handle_of
        self._pads = pads
        self.uid: int = _u64(cgraph + _UID_AT).value
        self.n_nodes: int = _i32(cgraph + _N_NODES_AT).value
        if not 0 <= self.n_nodes <= _MAX_NODES:
            raise LocalProtocolError(f"a graph of {self.n_nodes} nodes")

    def ext_payload(self) -> ExtGraph:
        """See `stream.link.GraphRef`."""
        _, tensors, index_src, index_view, counts = self._table()
        n = self.n_nodes
        _, data = self._places(tensors)
        rows = np.zeros(len(tensors), EXT_TENSOR)
        for field in ("ne", "nb", "type", "name"):
            rows[field] = tensors[field]
        rows["data"] = data
        rows["use_count"] = counts
        rows["src"] = -1
        rows["view_src"] = -1
        rows["src"][:n] = index_src
        rows["view_src"][:n] = index_view
        for field in ("op", "op_params", "flags", "view_offs"):
            rows[field][:n] = tensors[field][:n]
        used = np.unique(data >> np.uint64(ADDRESS_SHIFT))
        handles = frozenset(int(handle) for handle in used if handle)
        return ExtGraph(n, len(rows), [_bytes(rows)], handles, written(rows[:n], self._pads))

    def base_payload(self) -> tuple[int, list[Buffer]]:
        """See `stream.link.GraphRef`."""
        addresses, tensors, _, _, counts = self._table()
        n = self.n_nodes
        buffer, data = self._places(tensors)
        rows = np.zeros(len(tensors), RPC_TENSOR)
        _narrow(tensors)
        for field in ("type", "ne", "nb", "name"):
            rows[field] = tensors[field]
        rows["id"] = addresses
        rows["buffer"] = buffer
        rows["data"] = data
        rows["use_count"] = counts
        for field in ("op", "op_params", "flags", "src", "view_src", "view_offs"):
            rows[field][:n] = tensors[field][:n]
        count = len(rows).to_bytes(4, "little")
        return n, [addresses[:n].tobytes(), count, _bytes(rows)]

    def _table(
        self,
    ) -> tuple[_U64, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Addresses and structs, nodes first; the nodes' sources and views as indices; counts."""
        n_nodes = self.n_nodes
        header = _CGRAPH.unpack(_string_at(self._cgraph, _CGRAPH.size))
        nodes = np.frombuffer(_string_at(header[3], 8 * n_nodes), np.uint64)
        node_structs = gather(nodes.tolist())
        refs = np.concatenate([node_structs["src"].ravel(), node_structs["view_src"]])
        leaves = np.setdiff1d(refs, nodes)
        leaves = leaves[leaves != 0]
        addresses = np.concatenate([nodes, leaves])
        tensors = node_structs
        if len(leaves):
            tensors = np.concatenate([node_structs, gather(leaves.tolist())])
        order = np.argsort(addresses)
        index = order[np.searchsorted(addresses, refs, sorter=order) % len(order)]
        index = np.where(refs == 0, -1, index).astype(np.int32)
        n_src = node_structs["src"].size
        counts = _use_counts(addresses, header)
        return addresses, tensors, index[:n_src].reshape(n_nodes, -1), index[n_src:], counts

    def _places(self, tensors: npt.NDArray[Any]) -> tuple[_U64, _U64]:
        """Buffer handle and data address of each tensor; 0 for what is not on this device."""
        unique, inverse = np.unique(tensors["buffer"], return_inverse=True)
        known = np.array([self._handle_of(p) for p in unique.tolist()], np.uint64)
        handle = known[inverse]
        return handle, np.where(handle != 0, tensors["data"], np.uint64(0))


def _bytes(rows: npt.NDArray[Any]) -> memoryview:
    return memoryview(rows.view(np.uint8).data)


def _use_counts(addresses: _U64, header: tuple[Any, ...]) -> npt.NDArray[np.int32]:
    """The engine's use counts, looked up in the graph's hash set (linear probing)."""
    counts_at, size, used_at, keys_at = header[7:11]
    counts = np.zeros(len(addresses), np.int32)
    if not (size and counts_at and used_at and keys_at):
        return counts
    keys = _view(keys_at, size, np.uint64)
    used = _view(used_at, (size + 31) // 32, np.uint32)
    values = _view(counts_at, size, np.int32)
    slot = ((addresses >> np.uint64(4)) % np.uint64(size)).astype(np.int64)
    left = np.arange(len(addresses))
    for _ in range(size):
        taken = (used[slot >> 5] >> (slot & 31).astype(np.uint32)) & 1 == 1
        found = taken & (keys[slot] == addresses[left])
        counts[left[found]] = values[slot[found]]
        going = taken & ~found
        if not going.any():
            break
        left, slot = left[going], (slot[going] + 1) % size
    return counts


def _view(address: int, count: int, dtype: Any) -> npt.NDArray[Any]:
    """C memory as an array; only good inside the callback that was given it."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


def _narrow(tensors: npt.NDArray[Any]) -> None:
    """The base protocol has 32 bits for shapes and strides; say so instead of truncating."""
    if int(tensors["ne"].max(initial=0)) >> 32 or int(tensors["nb"].max(initial=0)) >> 32:
        raise LocalProtocolError(
            "a tensor of 4 GiB or more cannot be described in llama.cpp's RPC protocol;"
            " use a Caravan worker"
        )
