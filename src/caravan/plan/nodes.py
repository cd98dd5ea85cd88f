"""Which layer a node of a graph belongs to, and what tells layers apart. Called by `work`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caravan.backend.recording import RecordedGraph
from caravan.engine.layouts import OP_NAMES
from caravan.models.splits import read_parts

_BLOCK = re.compile(rb"blk\.(\d+)\.")
_OF_LAYER = re.compile(rb"-(\d+)(?: \(|$)")
# the ops whose first parameter says what they compute
_VARIED = [OP_NAMES.index(name) for name in ("UNARY", "GLU")]


def layers_of(graph: RecordedGraph, n_layer: int) -> NDArray[np.int32]:
    """(n_nodes,) the layer of every node: weights and names tell it.

    What tells nothing belongs to the layer that follows; behind the last one it is the engine's
    device of that, up to the first weight of the output layer, which is number n_layer.
    """
    rows, n_nodes = graph.rows, graph.n_nodes
    names = _words(rows["name"])
    sources = rows["src"][:n_nodes]
    weights = np.array([*(_number(_BLOCK.match(name)) for name in names), -1])
    own = [_number(_OF_LAYER.search(name)) for name in names[:n_nodes]]
    told = np.maximum(weights[sources].max(axis=1, initial=-1), np.array(own, np.int64))
    told[told >= n_layer] = -1
    at = np.flatnonzero(told >= 0)
    layers = np.full(n_nodes, n_layer, np.int32)
    if len(at):
        # the next one that tells it
        following = np.searchsorted(at, np.arange(at[-1] + 1))
        layers[: at[-1] + 1] = np.maximum.accumulate(told[at])[following]
        weighty = np.array([*map(_is_weight, names), False])[sources].any(axis=1)
        behind = np.flatnonzero(weighty[at[-1] + 1 :])
        layers[at[-1] + 1 :][: behind[0] if len(behind) else 0] = n_layer - 1
    return layers


def _is_weight(name: bytes) -> bool:
    return name.endswith((b".weight", b".bias"))


def _words(names: NDArray[Any]) -> list[bytes]:
    return [name.partition(b"\0")[0] for name in names.tolist()]


def _number(match: re.Match[bytes] | None) -> int:
    return -1 if match is None else int(match[1])


def features(graph: RecordedGraph) -> NDArray[np.int64]:
    """A line for each node: what tells how long it takes. Neither names nor addresses."""
    rows, n = graph.rows, graph.n_nodes
    shapes = np.zeros((len(rows) + 1, 5), np.int64)
    shapes[:-1, :4] = rows["ne"]
    shapes[:-1, 4] = rows["type"]
    shapes[-1] = -1
    sources = shapes[rows["src"][:n]].reshape(n, -1)
    ops = rows["op"][:n].astype(np.int64)
    variant = np.where(np.isin(ops, _VARIED), rows["op_params"][:n, 0], 0)
    return np.column_stack((ops, variant, shapes[:n], sources)).astype(np.int64)


def weights_of(
    path: Path, graph: RecordedGraph, layers: NDArray[np.int32], n_layer: int
) -> tuple[int, ...]:
    """Bytes of the weights that each layer's nodes read."""
    sizes = {
        name.encode(): span.size
        for part in read_parts(path)
        for name, span in part.header.tensors.items()
    }
    rows, n_nodes = graph.rows, graph.n_nodes
    of_row = np.array([*(sizes.get(name, 0) for name in _words(rows["name"])), 0], np.int64)
    of_row[:n_nodes] = 0
    sources = rows["src"][:n_nodes]
    totals = []
    for layer in range(n_layer + 1):
        used = np.unique(sources[layers == layer])
        totals.append(int(of_row[used].sum()))
    return tuple(totals)
