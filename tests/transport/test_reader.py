"""Exact reads, however the bytes come in."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan.errors import ConnectionClosed
from caravan.transport.reader import _SIZE, Reader


class Chunks:
    """A transport that receives what it is given, in these pieces, then ends."""

    peer = "a script"

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.chunks = [chunk for chunk in chunks if chunk]
        self.calls = 0

    def recv_into(self, buffer: memoryview) -> int:
        assert len(buffer) > 0
        self.calls += 1
        if not self.chunks:
            raise ConnectionClosed("the end")
        count = min(len(buffer), len(self.chunks[0]))
        buffer[:count] = self.chunks[0][:count]
        self.chunks[0] = self.chunks[0][count:]
        if not self.chunks[0]:
            del self.chunks[0]
        return count


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def test_byte_at_a_time():
    data = pattern(600)
    reader = Reader(Chunks(cut(data, 1)))
    assert reader.read(1) == data[:1]
    assert reader.read(299) == data[1:300]
    target = bytearray(300)
    reader.read_into(memoryview(target))
    assert target == data[300:]
    assert reader.buffered() == 0
    assert reader.received == 600


def test_many_messages_cost_one_call():
    transport = Chunks([pattern(1000)])
    reader = Reader(transport)
    assert b"".join(reader.read(10) for _ in range(100)) == pattern(1000)
    assert transport.calls == 1


def test_buffered_counts_what_is_unread():
    reader = Reader(Chunks([b"abcdef"]))
    assert reader.buffered() == 0
    reader.read(2)
    assert reader.buffered() == 4


@pytest.mark.parametrize("around", [-1, 0, 1])
@pytest.mark.parametrize("size", [_SIZE // 2, _SIZE, 2 * _SIZE])
@pytest.mark.parametrize("before", [0, 1, 100, _SIZE - 1, _SIZE])
@pytest.mark.parametrize("chunk", [997, _SIZE - 1, _SIZE, 10 * _SIZE])
def test_boundaries_of_the_buffer(size, around, before, chunk):
    size += around
    data = pattern(before + 2 * size + 3)
    reader = Reader(Chunks(cut(data, chunk)))
    assert reader.read(before) == data[:before]
    assert reader.read(size) == data[before : before + size]
    target = bytearray(size)
    reader.read_into(memoryview(target))
    assert target == data[before + size : before + 2 * size]
    assert reader.read(3) == data[-3:]
    assert reader.buffered() == 0
    assert reader.received == len(data)


def test_a_large_target_is_filled_without_the_buffer():
    data = pattern(8 * _SIZE)
    transport = Chunks([data])
    reader = Reader(transport)
    target = bytearray(len(data) - 16)
    reader.read(16)
    reader.read_into(memoryview(target))
    assert target == data[16:]
    # what the buffer held, and the rest in one go
    assert transport.calls == 2


def test_nothing_is_read_for_nothing():
    transport = Chunks([])
    reader = Reader(transport)
    assert reader.read(0) == b""
    reader.read_into(memoryview(bytearray()))
    reader.skip(0)
    assert transport.calls == 0


@pytest.mark.parametrize("size", [1, 99, _SIZE, _SIZE + 1, 5 * _SIZE + 7])
def test_skip(size):
    data = pattern(size + 4)
    reader = Reader(Chunks(cut(data, 5000)))
    reader.skip(size)
    assert reader.read(4) == data[-4:]


@pytest.mark.parametrize("size", [2, 100, _SIZE, _SIZE + 1, 4 * _SIZE])
@pytest.mark.parametrize("into", [False, True])
def test_the_end_before_the_last_byte(size, into):
    reader = Reader(Chunks(cut(pattern(size - 1), 1000)))
    with pytest.raises(ConnectionClosed):
        if into:
            reader.read_into(memoryview(bytearray(size)))
        else:
            reader.read(size)
    assert reader.received == size - 1


operations = st.tuples(
    st.sampled_from(["read", "into", "skip"]),
    st.one_of(st.integers(0, 300), st.integers(_SIZE // 2 - 5, _SIZE + 5)),
)


@settings(max_examples=25)
@given(
    st.lists(operations, max_size=12),
    st.lists(st.one_of(st.integers(1, 50), st.integers(1000, 2 * _SIZE)), min_size=1, max_size=6),
)
def test_any_chunking_gives_the_same_bytes(steps, chunk_sizes):
    data = pattern(sum(size for _, size in steps))
    chunks, start = [], 0
    while start < len(data):
        size = chunk_sizes[len(chunks) % len(chunk_sizes)]
        chunks.append(data[start : start + size])
        start += size
    reader = Reader(Chunks(chunks))
    position = 0
    for kind, size in steps:
        expected = data[position : position + size]
        position += size
        if kind == "read":
            assert reader.read(size) == expected
        elif kind == "into":
            target = bytearray(size)
            reader.read_into(memoryview(target))
            assert target == expected
        else:
            reader.skip(size)
    assert reader.buffered() == 0
