"""The cost model against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from caravan.engine.layouts import OP_NAMES
from caravan.worker.cost import nanoseconds, work
from caravan.worker.speed import Speed
from caravan.worker.table import Table
from worker.raw_client import F32, I32, Q4_0, linear_rows, row

F16 = 1


def op(name: str) -> int:
    return OP_NAMES.index(name)


def node_and(*rows: np.ndarray) -> Table:
    """A graph of one node, whose sources are the other rows."""
    return Table(np.stack(rows), 1)


def test_a_linear_layer():
    rows, _ = linear_rows(0, k=8, m=4, n=3)
    flops, moved = work(Table(rows, 2))
    # W x: 12 results of 8 multiplications and additions; + b: 12 additions
    assert flops.tolist() == [2 * 8 * 12, 12]
    assert moved.tolist() == [4 * (32 + 24 + 12), 4 * (12 + 4 + 12)]


def test_each_node_takes_as_long_as_what_is_slower_for_it():
    rows, _ = linear_rows(0, k=8, m=4, n=3)
    # 192 operations against 272 bytes, then 12 against 112
    assert nanoseconds(Table(rows, 2), Speed(gflops=0.1, gbps=1)) == 1920 + 120
    assert nanoseconds(Table(rows, 2), Speed(gflops=0.5, gbps=1)) == 384 + 112
    assert nanoseconds(Table(rows, 2), Speed(gflops=1, gbps=0.001)) == (272 + 112) * 1000
    assert nanoseconds(Table(rows, 2), Speed(gflops=1, gbps=1, us=7)) == 272 + 112 + 7000


def test_quantised_weights_count_what_they_take_in_memory():
    table = node_and(
        row((64, 2), 0, op("MUL_MAT"), (1, 2)),
        row((256, 64), 0, kind=Q4_0),
        row((256, 2), 0),
    )
    flops, moved = work(table)
    assert flops.tolist() == [2 * 256 * 64 * 2]
    assert moved.tolist() == [64 * (256 // 32) * 18 + 4 * (512 + 128)]


def test_grouped_heads_are_multiplied_for_every_head():
    # 2 key heads serve 8 query heads
    table = node_and(
        row((32, 5, 8), 0, op("MUL_MAT"), (1, 2)),
        row((16, 32, 2), 0, kind=F16),
        row((16, 5, 8), 0),
    )
    flops, moved = work(table)
    assert flops.tolist() == [2 * 16 * 32 * 5 * 8]
    assert moved.tolist() == [2 * 16 * 32 * 2 + 4 * (16 * 5 * 8 + 32 * 5 * 8)]


@pytest.mark.parametrize(("tokens", "used"), [(1, 2), (3, 6), (10, 8)])
def test_of_the_experts_only_those_that_can_be_chosen_are_read(tokens, used):
    table = node_and(
        row((6, 2, tokens), 0, op("MUL_MAT_ID"), (1, 2, 3)),
        row((4, 6, 8), 0),
        row((4, 1, tokens), 0),
        row((2, tokens), 0, kind=I32),
    )
    flops, moved = work(table)
    assert flops.tolist() == [2 * 4 * 6 * 2 * tokens]
    assert moved.tolist() == [4 * (4 * 6 * used + 4 * tokens + 2 * tokens + 6 * 2 * tokens)]


def test_outer_products_add_up_over_their_second_dimension():
    table = node_and(row((3, 5), 0, op("OUT_PROD"), (1, 2)), row((3, 7), 0), row((5, 7), 0))
    flops, moved = work(table)
    assert flops.tolist() == [2 * 3 * 5 * 7]
    assert moved.tolist() == [4 * (15 + 21 + 35)]


def test_attention_costs_queries_times_keys_and_values():
    # 5 tokens, 8 heads of 16, over 32 cells of 2 key heads, values of 12
    table = node_and(
        row((12, 8, 5), 0, op("FLASH_ATTN_EXT"), (1, 2, 3, 4)),
        row((16, 5, 8), 0),
        row((16, 32, 2), 0, kind=F16),
        row((12, 32, 2), 0, kind=F16),
        row((32, 5), 0, kind=F16),
    )
    flops, moved = work(table)
    assert flops.tolist() == [2 * 5 * 8 * 32 * (16 + 12)]
    cells = 2 * (16 * 32 * 2 + 12 * 32 * 2)
    assert moved.tolist() == [4 * 12 * 8 * 5 + 4 * 16 * 5 * 8 + cells + 2 * 32 * 5]


def test_get_rows_reads_the_rows_that_it_takes():
    table = node_and(
        row((64, 3), 0, op("GET_ROWS"), (1, 2)),
        row((64, 32000), 0, kind=Q4_0),
        row((3,), 0, kind=I32),
    )
    flops, moved = work(table)
    assert flops.tolist() == [192]
    assert moved.tolist() == [3 * 2 * 18 + 3 * 4 + 192 * 4]


def test_set_rows_writes_the_rows_that_it_is_given():
    table = node_and(
        row((64, 4096), 0, op("SET_ROWS"), (1, 2, 3), F16, view_src=3),
        row((64, 3), 0),
        row((3,), 0, kind=27),  # i64
        row((64, 4096), 0, kind=F16),
    )
    flops, moved = work(table)
    assert flops.tolist() == [192]
    assert moved.tolist() == [192 * 4 + 3 * 8 + 192 * 2]


def test_cpy_reads_once_and_writes_once():
    table = node_and(
        row((64, 3), 0, op("CPY"), (1, 2), F16, view_src=2),
        row((64, 3), 0),
        row((64, 3), 0, kind=F16),
    )
    flops, moved = work(table)
    assert flops.tolist() == [192]
    assert moved.tolist() == [192 * 4 + 192 * 2]


def test_a_view_counts_what_it_touches_and_not_what_it_spans():
    # every second row of a matrix
    view = row((8, 4), 0, nb=(4, 64, 256, 256), view_src=2)
    table = node_and(row((8, 4), 0, op("CONT"), (1,)), view, row((8, 8), 0))
    assert work(table)[1].tolist() == [4 * 32 + 4 * 32]


def test_sums_go_by_what_they_add_up():
    table = node_and(row((1, 4), 0, op("SUM_ROWS"), (1,)), row((100, 4), 0))
    assert [part.tolist() for part in work(table)] == [[400], [4 * 404]]


@pytest.mark.parametrize("name", ["VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE"])
def test_views_cost_nothing(name):
    table = node_and(row((8, 4), 0, op(name), (1,)), row((8, 4), 0))
    assert [part.tolist() for part in work(table)] == [[0], [0]]


def test_nodes_that_the_engine_passes_over_cost_nothing():
    for node in (
        row((8, 4), 0, op("ADD"), (1, 1), flags=0),
        row((8, 0), 0, op("ADD"), (1, 1)),
    ):
        assert nanoseconds(node_and(node, row((8, 4), 0)), Speed(1, 1)) == 0


def test_an_absurd_graph_has_a_number_all_the_same():
    table = node_and(row((1 << 39,), 0, op("ADD"), (1, 1), F32), row((1 << 39,), 0))
    assert nanoseconds(table, Speed(1e-300, 1)) == 1 << 62
