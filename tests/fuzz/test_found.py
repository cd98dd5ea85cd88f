"""What the fuzz has found, each in its smallest form: no session ends by it any more."""

from __future__ import annotations

import numpy as np
import pytest

from caravan.engine.layouts import OP_NAMES
from caravan.wire.commands import Ext
from caravan.worker.local import Worker
from worker.raw_client import ExtClient, row

B = 1 << 40
_I32, _I64 = 26, 27


def op(name: str) -> int:
    return OP_NAMES.index(name)


def empty(tensor: np.ndarray, *ne: int) -> np.ndarray:
    tensor["ne"] = ne
    return tensor


Found = dict[str, tuple[int, tuple[np.ndarray, ...]]]

# Nodes without elements: the engine plans for them, or fuses them with the next, before it skips
# them, and their shapes need not go together.
FOUND: Found = {
    "a norm of nothing, and its product": (
        2,
        (
            empty(row((128, 1), B, op("RMS_NORM"), (3,)), 128, 0, 1, 1),
            empty(row((128, 1), B + 1024, op("MUL"), (0, 2)), 128, 0, 1, 1),
            row((128,), B + 2048),
            row((1024, 16), B),
        ),
    ),
    "a norm of more nothing than it has": (
        2,
        (
            empty(row((128, 1), B, op("RMS_NORM"), (3,)), 128, 0, 1, 1),
            empty(row((128, 1), B + 1024, op("MUL"), (0, 2)), 128, 0, 1, 1),
            row((128,), B + 2048),
            empty(row((128, 1), B), 128, 0, 4194305, 1),
        ),
    ),
    "a convolution of types that no kernel has": (
        1,
        (
            empty(row((1, 2), B, op("CONV_TRANSPOSE_1D"), (1, 2)), 1, 2, 0, 1),
            empty(row((1, 8), B), 1, 8, 0, 1),
            empty(row((2, 1), B, kind=_I32), 2, 0, 1, 1),
        ),
    ),
}


# The kernel divides by the dimensions of the row numbers, of which there may be none only where
# there are no rows.
FOUND["rows without numbers"] = (
    1,
    (
        row((4, 8), B, op("SET_ROWS"), (1, 2)),
        row((4, 3), B + 1024),
        empty(row((3, 1), B + 2048, kind=_I64), 3, 0, 1, 1),
    ),
)


@pytest.fixture(scope="module")
def worker():
    with Worker("CPU:1") as running:
        yield running


@pytest.mark.parametrize("name", FOUND)
def test_it_is_refused_or_harmless(worker, name):
    n_nodes, rows = FOUND[name]
    with ExtClient(worker.endpoint) as client:
        _, base = client.alloc(1 << 20)
        table = np.stack(rows)
        table["data"] += np.uint64(base - B)
        seq = client.graph(table, n_nodes, 1)
        fence = client.post(Ext.FENCE)
        assert client.answer_of().seq in (seq, fence)
