"""`Table`: a graph as it came in, in either protocol, as one array of `EXT_TENSOR` rows.

The nodes come first, in execution order; sources and views are row numbers. Parsing checks lengths
and references to ids only; `validate` checks what the rows say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from caravan.errors import RemoteError
from caravan.transport.base import Buffer as Bytes
from caravan.wire.extension import Status
from caravan.wire.records import EXT_TENSOR, RPC_TENSOR

Rows = npt.NDArray[Any]

_ID = np.dtype("<u8")
_COUNT = np.dtype("<u4")
_SAME = ("ne", "nb", "data", "view_offs", "op_params", "type", "op", "flags", "use_count", "name")


# Of one graph: more than the engine makes for the largest models, in one of its splits.
MAX_TENSORS = 1 << 17


@dataclass(frozen=True, slots=True)
class Table:
    """`rows` of EXT_TENSOR, of which the first `n_nodes` are the nodes."""

    rows: Rows
    n_nodes: int


def bad(text: str) -> RemoteError:
    """The error for a message that makes no sense."""
    return RemoteError(Status.BAD_REQUEST, text)


def from_extension(n_nodes: int, n_tensors: int, body: Bytes) -> Table:
    """Raises RemoteError."""
    if len(body) != n_tensors * EXT_TENSOR.itemsize:
        raise bad(f"a graph of {n_tensors} tensors cannot have {len(body)} bytes")
    if not 0 < n_nodes <= n_tensors:
        raise bad(f"a graph of {n_nodes} nodes in {n_tensors} tensors")
    _check_size(n_tensors)
    return Table(np.frombuffer(body, EXT_TENSOR), n_nodes)


def from_base(n_nodes: int, body: Bytes) -> Table:
    """The part of a base GRAPH_COMPUTE after n_nodes; raises RemoteError."""
    start = n_nodes * _ID.itemsize
    if n_nodes == 0 or len(body) < start + _COUNT.itemsize:
        raise bad(f"a graph of {n_nodes} nodes cannot have {len(body)} bytes")
    nodes = np.frombuffer(body, _ID, n_nodes)
    n_tensors = int(np.frombuffer(body, _COUNT, 1, start)[0])
    start += _COUNT.itemsize
    _check_size(max(n_nodes, n_tensors))
    if len(body) < start + n_tensors * RPC_TENSOR.itemsize:
        raise bad(f"a graph of {n_tensors} tensors cannot have {len(body)} bytes")
    return _convert(nodes, np.frombuffer(body, RPC_TENSOR, n_tensors, start))


def _check_size(n_tensors: int) -> None:
    if n_tensors > MAX_TENSORS:
        raise bad(f"a graph of {n_tensors} tensors: there may be {MAX_TENSORS}")


def from_records(records: Rows) -> Table:
    """A tensor and its sources, as GET_ALLOC_SIZE and INIT_TENSOR send them; ids of sources that
    did not come along are dropped."""
    known = records["id"]
    sources = np.isin(records["src"], known)
    records = records.copy()
    records["src"] = np.where(sources, records["src"], 0)
    records["view_src"] = 0
    return _convert(known[:1], records)


def _convert(nodes: Rows, records: Rows) -> Table:
    """Ids to row numbers, nodes first; the first of several records with one id wins."""
    ids, first = np.unique(records["id"], return_index=True)
    node_at = _find(ids, nodes, "node")
    if len(np.unique(node_at)) != len(nodes):
        raise bad("a node is listed twice")
    rest = np.ones(len(ids), np.bool_)
    rest[node_at] = False
    order = np.concatenate((node_at, np.flatnonzero(rest)))
    row_of = np.empty(len(ids), np.int32)
    row_of[order] = np.arange(len(ids), dtype=np.int32)
    records = records[first[order]]
    rows = np.zeros(len(records), EXT_TENSOR)
    for field in _SAME:
        rows[field] = records[field]
    for field in ("src", "view_src"):
        absent = records[field] == 0
        found = _find(ids, np.where(absent, ids[0], records[field]), "source")
        rows[field] = np.where(absent, -1, row_of[found])
    return Table(rows, len(nodes))


def _find(ids: Rows, wanted: Rows, what: str) -> Rows:
    """Positions in the sorted `ids`."""
    if len(ids) == 0:
        raise bad("a graph without tensors")
    at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    missing = ids[at] != wanted
    if missing.any():
        raise bad(f"{what} {wanted[missing].flat[0]:#x} is not among the tensors")
    return at
