"""The command tables: numbers, sizes and directions as the formats prescribe, row by row."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan.errors import LocalProtocolError, RemoteProtocolError
from caravan.wire.commands import BASE_7, BASE_8, EXT, SET_ENTRY, Base, Command, Ext, base_table
from caravan.wire.layout import EMPTY, Layout

# number, name, fixed request bytes, more bytes follow, fixed reply bytes or None, more in the reply
Row = tuple[int, str, int, bool, int | None, bool]

COMMON: list[Row] = [
    (0, "ALLOC_BUFFER", 12, False, 16, False),
    (1, "GET_ALIGNMENT", 4, False, 8, False),
    (2, "GET_MAX_SIZE", 4, False, 8, False),
    (3, "BUFFER_GET_BASE", 8, False, 8, False),
    (4, "FREE_BUFFER", 8, False, None, False),
    (5, "BUFFER_CLEAR", 9, False, None, False),
    (6, "SET_TENSOR", 305, True, None, False),
    (7, "SET_TENSOR_HASH", 312, False, 1, False),
    (8, "GET_TENSOR", 312, False, 0, True),
    (9, "COPY_TENSOR", 592, False, 1, False),
    (11, "GET_DEVICE_MEMORY", 4, False, 16, False),
    (12, "INIT_TENSOR", 296, False, None, False),
    (13, "GET_ALLOC_SIZE", 3260, False, 8, False),
    (14, "HELLO", 24, False, 28, False),
    (15, "DEVICE_COUNT", 0, False, 4, False),
    (17, "MEMSET_TENSOR", 313, False, None, False),
]
SEVEN: list[Row] = [
    *COMMON,
    (10, "GRAPH_COMPUTE", 8, True, None, False),
    (16, "GRAPH_RECOMPUTE", 4, False, None, False),
]
EIGHT: list[Row] = [
    *COMMON,
    (10, "GRAPH_COMPUTE", 16, True, None, False),
    (16, "GRAPH_RECOMPUTE", 12, False, None, False),
    (18, "SET_TENSOR_2D", 328, True, None, False),
    (19, "GET_TENSOR_2D", 328, False, 0, True),
    (20, "COMM_INIT", 80, False, 1, False),
    (21, "COMM_ALLREDUCE", 300, False, None, False),
    (22, "COMM_FREE", 4, False, None, False),
]
EXTENSION: list[Row] = [
    (64, "SESSION", 0, True, 0, True),
    (65, "ALLOC", 8, False, 24, False),
    (66, "FREE", 8, False, None, False),
    (67, "CLEAR", 9, False, None, False),
    (68, "SET", 8, True, None, False),
    (69, "GET", 16, False, 0, True),
    (70, "MEMSET", 17, False, None, False),
    (71, "COPY", 24, False, None, False),
    (72, "GRAPH_COMPUTE", 16, True, None, False),
    (73, "GRAPH_RECOMPUTE", 8, False, None, False),
    (74, "MEMORY", 0, False, 16, False),
    (75, "PING", 0, False, 0, False),
    (76, "BYE", 0, True, None, False),
    (77, "INIT_TENSOR", 0, True, None, False),
    (78, "ALLOC_SIZE", 0, True, 8, False),
    (79, "FENCE", 0, False, 0, False),
    (80, "SET_MANY", 4, True, None, False),
    (81, "PEER_OPEN", 0, True, 8, False),
    (82, "PUSH", 32, False, None, False),
    (83, "TAKE", 32, False, None, False),
    (84, "CLOCK", 0, False, 8, False),
    (85, "TIMELINE", 1, False, 8, True),
    (86, "STATS", 0, False, 56, False),
    (87, "PEER", 0, True, 0, False),
    (88, "DATA", 8, True, None, False),
    (89, "GET_CAST", 20, False, 0, True),
    (90, "SET_CAST", 12, True, None, False),
    (91, "LOAD", 4, True, 0, True),
    (92, "KEEP", 48, False, None, False),
    (93, "AUTH", 32, False, 32, False),
    (94, "PROVE", 32, False, 32, False),
    (95, "TLS", 0, True, 0, False),
]

TABLES = {"7": (BASE_7, SEVEN), "8": (BASE_8, EIGHT), "extension": (EXT, EXTENSION)}
ROWS = [row for table in (BASE_7, BASE_8, EXT) for row in table.values()]
LAYOUTS = [*(row.request for row in ROWS), *(row.reply for row in ROWS if row.reply is not None)]


def facts(row: Command) -> Row:
    reply = None if row.reply is None else row.reply.size
    return (row.number, row.name, row.request.size, row.tail, reply, row.reply_tail)


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_exactly_the_rows_of_the_format(name):
    table, expected = TABLES[name]
    assert sorted(facts(row) for row in table.values()) == sorted(expected)


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_found_by_their_own_number(name):
    table, _ = TABLES[name]
    assert all(number == row.number for number, row in table.items())


def test_enums_name_the_rows():
    assert {n.value: n.name for n in Base} == {row.number: row.name for row in BASE_8.values()}
    assert {n.value: n.name for n in Ext} == {row.number: row.name for row in EXT.values()}


def test_extension_numbers_are_no_base_numbers():
    assert not set(EXT) & set(BASE_8)


def test_base_table_by_major():
    assert base_table(7) is BASE_7
    assert base_table(8) is BASE_8


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_fits_is_exact_except_for_a_tail(row):
    size = row.request.size
    assert row.fits(size)
    assert row.fits(size + 1) is row.tail
    assert not row.fits(size - 1)
    assert row.silent is (row.reply is None)


def values_of(layout: Layout) -> st.SearchStrategy[tuple[Any, ...]]:
    def one(code: str) -> st.SearchStrategy[Any]:
        if code.endswith("s"):
            size = int(code[:-1])
            return st.binary(max_size=min(size, 12)).map(lambda text: text.rjust(size, b"."))
        return st.integers(0, {"B": 2**8, "H": 2**16, "I": 2**32, "Q": 2**64}[code] - 1)

    return st.tuples(*(one(code) for _, code in layout.fields))


@given(st.sampled_from(LAYOUTS).flatmap(lambda x: st.tuples(st.just(x), values_of(x))))
def test_records_come_back_as_they_were_packed(case):
    layout, values = case
    packed = layout.pack(*values)
    assert len(packed) == layout.size
    assert layout.unpack(packed) == values
    assert layout.unpack(memoryview(packed)) == values
    assert layout.unpack_from(packed + b"more") == values


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.names) or "empty")
def test_records_of_any_other_size_are_refused(layout):
    for size in {0, 1, layout.size - 1, layout.size + 1, 2 * layout.size} - {layout.size, -1}:
        with pytest.raises(RemoteProtocolError, match=f"{layout.size} bytes"):
            layout.unpack(bytes(size))
    if layout.size:
        with pytest.raises(RemoteProtocolError, match="at least"):
            layout.unpack_from(bytes(layout.size - 1))


def test_literal_bytes_of_some_records():
    alloc = BASE_7[0].request.pack(1, 2)
    assert alloc == b"\1\0\0\0" + b"\2" + bytes(7)
    memset = EXT[Ext.MEMSET].request.pack(0x0102, 3, 0xFF)
    assert memset == b"\2\1" + bytes(6) + b"\3" + bytes(7) + b"\xff"
    assert BASE_8[10].request.pack(1, 0x0203, 4) == struct.pack("<IQI", 1, 0x0203, 4)


@pytest.mark.parametrize("values", [(2**32, 0), (-1, 0), (0, 2**64), ("1", 0), (None, 0), (1,)])
def test_values_that_do_not_fit_are_a_local_error(values):
    with pytest.raises(LocalProtocolError, match="device"):
        BASE_7[Base.ALLOC_BUFFER].request.pack(*values)


def test_bytes_that_are_too_long_are_not_cut():
    assert BASE_7[Base.INIT_TENSOR].request.pack(bytes(296)) == bytes(296)
    with pytest.raises(LocalProtocolError, match="tensor is longer than 296 bytes"):
        BASE_7[Base.INIT_TENSOR].request.pack(bytes(297))


def test_a_layout_with_a_wrong_size_does_not_even_import():
    with pytest.raises(AssertionError, match="has 4 bytes, not 5"):
        Layout((("value", "I"),), 5)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=9))
def test_records_one_after_the_other(entries):
    data = b"".join(SET_ENTRY.pack(*entry) for entry in entries)
    assert SET_ENTRY.unpack_many(data) == entries
    for wrong in (data + b"x", data + bytes(15), data[1:] if data else b"x"):
        with pytest.raises(RemoteProtocolError, match="no records of 16 bytes"):
            SET_ENTRY.unpack_many(wrong)


def test_records_of_nothing_are_no_records():
    with pytest.raises(RemoteProtocolError):
        EMPTY.unpack_many(b"")


def test_empty():
    assert EMPTY.pack() == b""
    assert EMPTY.unpack(b"") == ()
