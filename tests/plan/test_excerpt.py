"""Parts of graphs as graphs of their own: what refers to what, and what shares memory."""

from __future__ import annotations

import numpy as np
import pytest

from caravan.engine.layouts import FLAG_COMPUTE, OP_NAMES, TYPE_NUMBERS
from caravan.plan.excerpt import excerpt
from caravan.plan.samples import addition, copy, product, ramp
from caravan.wire.records import EXT_TENSOR
from caravan.worker.cost import work
from caravan.worker.table import Table

BASES = (1 << 20, 2 << 20, 3 << 20, 4 << 20)
A, B = 5 << 40, 9 << 40  # two buffers of whoever recorded


def tensor(kind, ne, data, op="NONE", src=(), view=-1):
    row = np.zeros(1, EXT_TENSOR)
    size = 2 if kind == "f16" else 4
    row["type"] = TYPE_NUMBERS[kind]
    row["ne"] = (*ne, *[1] * (4 - len(ne)))
    strides = [size]
    for n in row["ne"][0][:3].tolist():
        strides.append(strides[-1] * n)
    row["nb"] = strides
    row["data"] = data
    row["op"] = OP_NAMES.index(op)
    row["flags"] = FLAG_COMPUTE if op != "NONE" else 0
    row["src"] = -1
    row["src"][0, : len(src)] = src
    row["view_src"] = view
    return row


@pytest.fixture
def recorded():
    """Two layers: a product, its rows put into a cache by number, and an addition that writes over
    the numbers once nobody needs them any more."""
    rows = [
        # layer 0
        tensor("f32", (64, 4), B + 0x1000, "MUL_MAT", (6, 7)),
        tensor("f32", (64, 16), A + 0x8000, "SET_ROWS", (0, 8, 9), view=9),
        # layer 1
        tensor("f32", (64, 4), B + 0x2000, "MUL_MAT", (10, 0)),
        tensor("f32", (64, 8), A + 0x8000, "VIEW", (9,), view=9),
        tensor("f32", (64, 4), B + 0x2000, "ADD", (2, 0)),
        tensor("f32", (64, 4), B + 0x3000, "ADD", (4, 0)),
        # leaves: weights, input, numbers, cache, weights
        tensor("f32", (64, 64), A),
        tensor("f32", (64, 4), B),
        tensor("i32", (4,), B + 0x3000),
        tensor("f32", (64, 16), A + 0x8000),
        tensor("f32", (64, 64), A + 0x4000),
    ]
    return np.concatenate(rows), 6


def chosen(*nodes, of=6):
    return np.isin(np.arange(of), nodes)


def test_the_whole_graph_is_its_own_excerpt(recorded):
    rows, n = recorded
    cut = excerpt(rows, n, np.ones(n, np.bool_))
    out, n_nodes = cut.at(BASES)
    assert n_nodes == n
    np.testing.assert_array_equal(out["src"], rows["src"])
    np.testing.assert_array_equal(out["ne"], rows["ne"])
    for one, other in zip(work(Table(out, n)), work(Table(rows, n)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_comes_from_outside_is_a_leaf(recorded):
    rows, n = recorded
    out, n_nodes = excerpt(rows, n, chosen(2, 3, 4, 5)).at(BASES)
    assert n_nodes == 4
    assert [OP_NAMES[op] for op in out["op"]] == ["MUL_MAT", "VIEW", "ADD", "ADD", *["NONE"] * 3]
    assert (out["src"][4:] == -1).all() and (out["view_src"][4:] == -1).all()
    # the product of the first layer is an input now
    (first,) = np.flatnonzero(out["data"] == out["data"][out["src"][0, 1]])
    assert first >= 4
    assert out["view_src"][1] == out["src"][1, 0] >= 4


def test_what_shares_memory_still_does(recorded):
    rows, n = recorded
    out, _ = excerpt(rows, n, np.ones(n, np.bool_)).at(BASES)
    assert out["data"][2] == out["data"][4]
    assert out["data"][1] == out["data"][3] == out["data"][9]
    assert out["data"][0] != out["data"][2]


def test_weights_and_numbers_are_apart_from_what_is_written(recorded):
    rows, n = recorded
    cut = excerpt(rows, n, np.ones(n, np.bool_))
    assert cut.part.tolist() == [2, 2, 2, 2, 2, 2, 1, 1, 0, 2, 1]
    out, _ = cut.at(BASES)
    part = (out["data"] >> np.uint64(20)).astype(int) - 1
    assert part.tolist() == cut.part.tolist()
    # the numbers' memory is used again in the recording, and not here
    assert rows["data"][5] == rows["data"][8]
    assert out["data"][5] != out["data"][8]


def test_parts_have_room_for_all_that_is_in_them(recorded):
    rows, n = recorded
    cut = excerpt(rows, n, np.ones(n, np.bool_))
    out, _ = cut.at((0, 0, 0, 0))
    sizes = out["nb"][:, 3].astype(int)
    for part in range(3):
        mine = cut.part == part
        assert (out["data"][mine].astype(int) + sizes[mine]).max() <= cut.sizes[part]
        assert cut.sizes[part] % 128 == 0
    # two matrices and the input
    assert cut.sizes[1] == 2 * 64 * 64 * 4 + 64 * 4 * 4
    assert (out["data"] % 128 == 0).all()


def test_a_gap_follows_each_tensor(recorded):
    rows, n = recorded
    wide, tight = (excerpt(rows, n, np.ones(n, np.bool_), gap) for gap in (512, 0))
    assert wide.sizes[1] == tight.sizes[1] + 3 * 512


def test_copies_have_weights_of_their_own(recorded):
    rows, n = recorded
    cut = excerpt(rows, n, chosen(0, 1))
    out, n_nodes = cut.at(BASES, 3)
    assert n_nodes == 6
    ops = [OP_NAMES[op] for op in out["op"]]
    assert ops[:6] == ["MUL_MAT", "SET_ROWS"] * 3 and set(ops[6:]) == {"NONE"}
    weights = out["data"][out["src"][[0, 2, 4], 0]]
    assert np.diff(weights.astype(int)).tolist() == [cut.sizes[1]] * 2
    for number in range(3):
        assert out["src"][2 * number + 1, 0] == 2 * number
    # all read the same numbers, which are zeros
    assert len(set(out["data"][out["src"][[1, 3, 5], 1]].tolist())) == 1
    single, _ = cut.at(BASES)
    total = sum(values.sum() for values in work(Table(out, 6)))
    assert total == 3 * sum(values.sum() for values in work(Table(single, 2)))


def test_masks_are_apart_and_have_room_for_what_they_are_made_of():
    rows = np.concatenate(
        [
            # a mask of f32 is cast first
            tensor("f16", (32, 8), B, "CPY", (3, 0)),
            tensor("f32", (16, 2, 8), B + 0x8000, "FLASH_ATTN_EXT", (2, 4, 4, 0)),
            tensor("f32", (16, 8, 2), B + 0x4000),
            tensor("f32", (32, 8), B + 0x8000),
            tensor("f16", (16, 32, 2), A),
        ]
    )
    for nodes, found in (((0, 1), 3), ((1,), 3)):
        cut = excerpt(rows, 2, chosen(*nodes, of=2))
        out, _ = cut.at(BASES)
        (mask,) = cut.masks
        assert cut.part[mask] == found
        size = int(out["nb"][mask, 3])
        unit = int(out["nb"][mask, 0])
        assert cut.sizes[3] >= size + 128 + 40 * unit - 128
        made, values = ramp(out[mask : mask + 1])
        assert len(values) == 40 * unit
        assert made["data"][0] == out["data"][mask] and made["data"][1] % 128 == 0
        end = int(made["data"][1]) + len(values) - BASES[3]
        assert size <= int(made["data"][1]) - BASES[3] and end <= cut.sizes[3]


def test_a_ramp_hides_one_entry_more_in_each_row():
    made, values = ramp(tensor("f32", (6, 4), 1 << 20))
    numbers = np.frombuffer(values, np.float32)
    seen = [int((numbers[row : row + 6] == 0).sum()) for row in range(4)]
    # of a prompt that ends with 6 entries: 3, 4, 5, 6
    assert seen == [6, 5, 4, 3]
    assert made["nb"][1, :2].tolist() == [4, 4]


def test_nothing_to_compute(recorded):
    rows, n = recorded
    assert excerpt(rows, n, np.zeros(n, np.bool_)).n_nodes == 0
    assert excerpt(rows, n, chosen(3)).n_nodes == 0
    hollow = rows.copy()
    hollow["ne"][5, 1] = 0
    assert excerpt(hollow, n, chosen(5)).n_nodes == 0


def test_what_is_nowhere_stays_there(recorded):
    rows, n = recorded
    rows["data"][3] = 0
    out, _ = excerpt(rows, n, np.ones(n, np.bool_)).at(BASES)
    assert out["data"][3] == 0


def test_samples_cost_what_they_say():
    for sample in (product("q8_0", 256, 32, 8), product("f32", 128, 64, 1), copy(256)):
        flops, moved = work(Table(sample.at(1 << 40), 1))
        assert (flops.sum(), moved.sum()) == (sample.flops, sample.moved)
        assert int(sample.rows["data"].max()) < sample.size
    assert addition(32).flops == 32
