"""What a worker refuses before it builds anything: numbers, links, extents, shapes."""

from __future__ import annotations

import numpy as np
import pytest

from caravan.engine.layouts import OP_NAMES
from caravan.errors import RemoteError
from caravan.worker.buffers import Memory
from caravan.worker.graph import Graph, hash_size
from caravan.worker.table import Table, from_base, from_extension
from caravan.worker.validate import check, extents
from worker.raw_client import ADD, F32, I32, MUL_MAT, Q4_0, VIEW, linear_rows, record, row

SIZE = 1 << 20
BASE = 1 << 40
OTHER = 2 << 40  # a live buffer of another device: not in MEMORY


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


MEMORY = Memory(1, u64(1, 3), u64(SIZE, 0), u64(0x7000_0000, 0), u64(0x6000_0000, 0))


class Anything:
    """A device that supports every op."""

    guarded = False

    def supports(self, tensor: int) -> bool:
        return True

    def estimate(self, table: Table) -> int:
        return 12


def op(name: str) -> int:
    return OP_NAMES.index(name)


def table(*rows: np.ndarray, nodes: int = 1) -> Table:
    return Table(np.stack(rows), nodes)


def refused(tested: Table, words: str) -> None:
    with pytest.raises(RemoteError, match=words):
        check(tested, MEMORY)


def linear() -> Table:
    return Table(linear_rows(BASE)[0], 2)


def test_a_sound_graph_is_placed_in_real_memory() -> None:
    placement = check(linear(), MEMORY)
    assert placement.pointers.tolist() == [0x7000_0000 + at for at in (12288, 16384, 0, 4096, 8192)]
    assert set(placement.buffers.tolist()) == {0x6000_0000}
    assert placement.handles == {1}


@pytest.mark.parametrize(
    ("field", "index", "value", "words"),
    [
        ("type", 2, 43, "no such type"),
        ("type", 2, 2**32 - 1, "no such type"),
        ("type", 2, 4, "no longer exists"),
        ("op", 0, 101, "no such op"),
        ("op", 0, 2**32 - 1, "no such op"),
        ("op", 0, 92, "never computed"),
        ("op", 3, op("OPT_STEP_SGD"), "never computed"),
        ("flags", 0, 1 << 20, "flags"),
        ("ne", (2, 0), -1, "dimension"),
        ("ne", (2, 3), 1 << 62, "dimension"),
        ("ne", (2, slice(None)), 1 << 30, "too many elements"),
        ("nb", (2, 3), 1 << 63, "stride"),
        ("nb", (2, 3), (1 << 64) - 1, "stride"),
        ("src", (0, 0), 5, "source does not exist"),
        ("src", (0, 0), -2, "source does not exist"),
        ("src", (0, 0), 0, "comes after"),
        ("src", (0, 0), 1, "comes after"),
        ("view_src", 0, 7, "does not exist"),
        ("view_src", 0, 1, "comes after"),
        ("view_src", 3, 3, "view of a view"),
        ("src", (0, 1), -1, "source 1 is missing"),
        ("data", 0, 0, "no buffer"),
        ("data", 2, 0, "source is in no buffer"),
        ("data", 2, OTHER, "source is in no buffer"),
        ("data", 2, BASE + SIZE - 4, "passes the end"),
        ("data", 2, BASE + (1 << 40) - 1, "source is in no buffer|passes the end"),
        ("nb", (2, 1), SIZE, "passes the end"),
        ("nb", (2, 1), 1 << 40, "extent|passes the end"),
        ("ne", (3, 0), 7, "differ in length"),
        ("ne", (0, 0), 3, "differ in shape"),
        ("ne", (4, 0), 3, "does not repeat"),
        ("ne", (3, 1), 0, "no elements"),
    ],
)
def test_one_wrong_field_is_refused(field, index, value, words) -> None:
    rows = linear().rows.copy()
    rows[field][index] = value
    refused(Table(rows, 2), words)


def test_a_cast_has_itself_as_its_destination() -> None:
    source = row((8,), BASE)
    cast = row((8,), BASE + 64, op("CPY"), (1, 0), kind=1)
    cast["nb"] = (2, 16, 16, 16)
    check(table(cast, source), MEMORY)
    cast["src"][:2] = 0, 1
    refused(table(cast, source), "comes after")
    cast["op"], cast["src"][:2] = op("ADD"), (1, 0)
    refused(table(cast, source), "comes after")


def test_no_nodes_or_short_tables_are_refused() -> None:
    rows = linear().rows
    for n_nodes, n_tensors, body in (
        (0, 5, rows.tobytes()),
        (6, 5, rows.tobytes()),
        (2, 5, rows.tobytes()[:-1]),
        (2, 2**32 - 1, rows.tobytes()),
    ):
        with pytest.raises(RemoteError):
            from_extension(n_nodes, n_tensors, body)


def test_blocks_of_quantized_rows_must_be_whole_and_adjacent() -> None:
    weights = row((64, 2), BASE, kind=Q4_0, nb=(18, 36, 72, 72))
    good = row((2, 1), BASE + 4096, MUL_MAT, (1, 2)), weights, row((64, 1), BASE + 8192)
    check(table(*good), MEMORY)
    for field, value, words in (
        ("ne", (48, 2, 1, 1), "within a block"),
        ("nb", (4, 36, 72, 72), "not adjacent"),
    ):
        broken = weights.copy()
        broken[field] = value
        refused(table(good[0], broken, good[2]), words)


def test_extents_are_those_of_ggml() -> None:
    ne = np.array([[8, 3, 2, 1], [64, 3, 1, 1], [8, 0, 2, 1], [1, 1, 1, 1]])
    nb = np.array([[4, 32, 96, 192], [18, 36, 108, 108], [4, 32, 96, 0], [4, 9, 9, 9]])
    block, size = np.array([1, 32, 1, 1]), np.array([4, 18, 4, 4])
    assert extents(ne, nb, block, size).tolist() == [192, 108, 0, 4]
    huge = np.array([[2, 2, 2, 2]]), np.array([[1 << 40] * 4]), np.array([1]), np.array([4])
    assert extents(*huge).tolist() == [-1]


def test_empty_nodes_need_no_memory() -> None:
    rows = linear().rows.copy()
    rows["ne"][(0, 1, 3), 1] = 0
    rows["data"][(0, 1, 3),] = 0
    check(Table(rows, 2), MEMORY)


def test_views_of_what_is_not_here_are_fine_until_they_are_read() -> None:
    gone = row((8,), 0)
    view = row((4,), BASE, VIEW, (1,), view_src=1)
    check(table(view, gone), MEMORY)
    refused(table(row((8,), BASE, ADD, (1, 1)), gone), "source is in no buffer")


def test_a_view_that_is_not_here_itself_is_fine_until_it_is_read() -> None:
    """The engine leaves views of the next device's tensors at the end of a split."""
    gone = row((8,), 0)
    view = row((8,), 0, VIEW, (2,), view_src=2)
    reader = row((8,), BASE, ADD, (0, 0))
    here = row((8,), BASE)
    check(table(view, row((8,), BASE, ADD, (3, 3)), gone, here, nodes=2), MEMORY)
    refused(table(view, reader, gone, nodes=2), "source is in no buffer")
    refused(table(row((8,), 0, ADD, (1, 1)), here), "the node's data is in no buffer")


MISFITS = {
    "ROPE without dimensions": ("ROPE", (8, 2, 3), [(8, 2, 3), (3,)], {1: 0, 2: 0}, {1: I32}),
    "ROPE with too few positions": ("ROPE", (8, 2, 3), [(8, 2, 3), (2,)], {1: 8}, {1: I32}),
    "ROPE beyond the row": ("ROPE", (8, 2, 3), [(8, 2, 3), (3,)], {1: 10}, {1: I32}),
    "ROPE of an unknown mode": ("ROPE", (8, 2, 3), [(8, 2, 3), (3,)], {1: 8, 2: 3}, {1: I32}),
    "GET_ROWS with a short result": ("GET_ROWS", (8, 2), [(8, 5), (3,)], {}, {1: I32}),
    "GET_ROWS by floats": ("GET_ROWS", (8, 3), [(8, 5), (3,)], {}, {}),
    "SET_ROWS by too few": ("SET_ROWS", (8, 9), [(8, 3), (2,)], {}, {1: I32}),
    "SOFT_MAX with a small mask": ("SOFT_MAX", (8, 4), [(8, 4), (8, 3)], {}, {}),
    "CONCAT along nothing": ("CONCAT", (8, 4), [(8, 2), (8, 2)], {0: 4}, {}),
    "CONCAT into too little": ("CONCAT", (8, 3), [(8, 2), (8, 2)], {0: 1}, {}),
    "REPEAT of parts": ("REPEAT", (8, 5), [(8, 2)], {}, {}),
    "UNARY of no kind": ("UNARY", (8,), [(8,)], {0: 999}, {}),
    "GLU of odd rows": ("GLU", (4,), [(9,)], {0: 2}, {}),
    "ARGSORT in no order": ("ARGSORT", (8,), [(8,)], {0: 7}, {None: I32}),
    "TOP_K of more": ("TOP_K", (9,), [(8,)], {}, {None: I32}),
    "SUM_ROWS into rows": ("SUM_ROWS", (2, 4), [(8, 4)], {}, {}),
    "RMS_NORM into less": ("RMS_NORM", (4,), [(8,)], {}, {}),
    "CONT into more": ("CONT", (9,), [(8,)], {}, {}),
    "MUL_MAT_ID without ids": ("MUL_MAT_ID", (4, 2, 1), [(8, 4, 3), (8, 1, 1)], {}, {}),
    "MUL_MAT_ID by floats": ("MUL_MAT_ID", (4, 2, 1), [(8, 4, 3), (8, 1, 1), (2, 1)], {}, {}),
    "attention over other keys": (
        "FLASH_ATTN_EXT",
        (8, 2, 4),
        [(8, 4, 2), (8, 16, 2), (8, 15, 2)],
        {},
        {},
    ),
}
FITS = {
    "ROPE": ("ROPE", (8, 2, 3), [(8, 2, 3), (3,)], {1: 8, 2: 2}, {1: I32}),
    "GET_ROWS": ("GET_ROWS", (8, 3), [(8, 5), (3,)], {}, {1: I32}),
    "SET_ROWS": ("SET_ROWS", (8, 9), [(8, 3), (3,)], {}, {1: I32}),
    "SOFT_MAX": ("SOFT_MAX", (8, 4, 6), [(8, 4, 6), (8, 4)], {}, {}),
    "CONCAT": ("CONCAT", (8, 4), [(8, 2), (8, 2)], {0: 1}, {}),
    "REPEAT": ("REPEAT", (8, 4), [(8, 2)], {}, {}),
    "UNARY": ("UNARY", (8,), [(8,)], {0: 10}, {}),
    "GLU": ("GLU", (4,), [(8,)], {0: 2}, {}),
    "GLU of two": ("GLU", (8,), [(8,), (8,)], {0: 2}, {}),
    "ARGSORT": ("ARGSORT", (8,), [(8,)], {0: 1}, {None: I32}),
    "TOP_K": ("TOP_K", (3,), [(8,)], {}, {None: I32}),
    "SUM_ROWS": ("SUM_ROWS", (1, 4), [(8, 4)], {}, {}),
    "RMS_NORM": ("RMS_NORM", (8,), [(8,)], {}, {}),
    "CONT": ("CONT", (2, 4), [(8,)], {}, {}),
    "SCALE": ("SCALE", (8, 2), [(8, 2)], {}, {}),
    "MUL_MAT_ID": ("MUL_MAT_ID", (4, 2, 1), [(8, 4, 3), (8, 1, 1), (2, 1)], {}, {2: I32}),
    "FLASH_ATTN_EXT": ("FLASH_ATTN_EXT", (8, 2, 4), [(8, 4, 2), (8, 16, 2), (8, 16, 2)], {}, {}),
}


def one_op(name, result, sources, params, types) -> Table:
    rows = [row(result, BASE, op(name), range(1, len(sources) + 1), kind=types.get(None, F32))]
    for k, shape in enumerate(sources):
        rows.append(row(shape, BASE + 65536 * (k + 1), kind=types.get(k, F32)))
    for index, value in params.items():
        rows[0]["op_params"][index] = value
    return table(*rows)


@pytest.mark.parametrize("case", MISFITS)
def test_a_shape_that_a_kernel_would_not_check_is_refused(case) -> None:
    refused(one_op(*MISFITS[case]), MISFITS[case][0])


@pytest.mark.parametrize("case", FITS)
def test_the_shapes_that_the_engine_makes_pass(case) -> None:
    check(one_op(*FITS[case]), MEMORY)


def test_a_stride_of_a_dimension_of_size_1_cannot_lead_out_of_the_buffer() -> None:
    tested = one_op("SCALE", (8, 1, 2), [(8, 1, 2)], {}, {})
    tested.rows["nb"][1, 1] = 1 << 30
    refused(tested, "SCALE")


def test_the_hash_of_the_graph_has_every_tensor_at_its_first_place() -> None:
    for count in (1, 2, 3, 10, 21, 100, 1278):
        size = hash_size(count)
        assert size >= 2 * count
        for base in (16, 0x7F12_3450, 0x5555_5555_0010):
            slots = {((base + 336 * i) >> 4) % size for i in range(count)}
            assert len(slots) == count


def test_a_graph_keeps_what_c_sees_and_its_names_end() -> None:
    rows = linear().rows.copy()
    rows["name"] = b"x" * 64
    rows["use_count"][0] = 3
    graph = Graph(Table(rows, 2), MEMORY, Anything())
    _, tensors, nodes, keys, uses, _used = graph._keep
    assert graph.address % 8 == 0 and graph.n_nodes == 2 and graph.nanoseconds == 12
    assert tensors["name"].tolist() == [b"x" * 63] * 5
    base = tensors.ctypes.data
    assert base % 16 == 0
    assert nodes.tolist() == [base, base + 336]
    assert tensors["src"][1, :3].tolist() == [base, base + 4 * 336, 0]
    assert sorted(keys[keys > 0].tolist()) == nodes.tolist()
    assert uses[keys == base].tolist() == [3]


def test_an_op_that_the_device_cannot_compute_is_refused() -> None:
    class Nothing(Anything):
        def supports(self, tensor: int) -> bool:
            return False

    with pytest.raises(RemoteError, match="does not support"):
        Graph(linear(), MEMORY, Nothing())


def base_body(nodes, records) -> bytes:
    return (
        np.array(nodes, "<u8").tobytes()
        + len(records).to_bytes(4, "little")
        + b"".join(r.tobytes() for r in records)
    )


def test_base_graphs_become_the_same_table_whatever_their_order() -> None:
    a, b = record(70, (4,), 1, BASE), record(50, (4,), 1, BASE + 64)
    c = record(60, (4,), 1, BASE + 128, ADD, (70, 50))
    d = record(10, (4,), 1, BASE + 128, VIEW, (60,))
    d["view_src"] = 60
    twin = record(70, (4,), 1, BASE + 999)
    parsed = from_base(2, base_body([60, 10], [a, twin, c, d, b]) + b"trailing")
    rows = parsed.rows
    assert parsed.n_nodes == 2 and len(rows) == 4
    assert rows["data"].tolist() == [BASE + 128, BASE + 128, BASE + 64, BASE]
    assert rows["src"][0, :3].tolist() == [3, 2, -1]
    assert rows["src"][1, :2].tolist() == [0, -1]
    assert rows["view_src"].tolist() == [-1, 0, -1, -1]


@pytest.mark.parametrize(
    ("nodes", "count", "words"),
    [([60], 3, "not among"), ([1], 1, "not among"), ([70, 70], 1, "twice"), ([70], 0, "without")],
)
def test_base_graphs_that_point_nowhere_are_refused(nodes, count, words) -> None:
    records = [
        record(70, (4,), 1, BASE),
        record(60, (4,), 1, BASE, ADD, (70, 51)),
        record(50, (4,), 1, BASE),
    ][:count]
    with pytest.raises(RemoteError, match=words):
        from_base(len(nodes), base_body(nodes, records))


def test_random_tables_are_sound_or_refused_and_nothing_else() -> None:
    """Fixed seed: bytes of a sound table are changed at random."""
    rng = np.random.default_rng(7)
    sound = linear().rows.tobytes()
    passed = 0
    for _ in range(2000):
        data = np.frombuffer(sound, np.uint8).copy()
        at = rng.integers(0, len(data) - 64, rng.integers(1, 4))
        data[at] = rng.integers(0, 256, len(at))
        tested = from_extension(2, 5, data.tobytes())
        try:
            placement = check(tested, MEMORY)
        except RemoteError:
            continue
        passed += 1
        ends = placement.pointers[placement.pointers > 0]
        assert ((ends >= 0x7000_0000) & (ends < 0x7000_0000 + SIZE)).all()
    assert 0 < passed < 2000
