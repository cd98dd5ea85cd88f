"""The mirror against a model of a worker's memory: what is not sent must be there already."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan.stream import mirror
from caravan.stream.mirror import MAX_BYTES, MAX_PLACE, MAX_PLACES, Mirror, changes
from caravan.wire.extension import ADDRESS_SHIFT, GRAPH_LRU

BUFFERS = (1, 2)
SIZE = 4096
BASE = 1 << ADDRESS_SHIFT


class Peer:
    """Two buffers of a worker, and what the head meant them to hold: `truth`."""

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.memory = {handle: bytearray(SIZE) for handle in BUFFERS}
        self.truth = {handle: bytearray(SIZE) for handle in BUFFERS}
        self.stored: dict[int, list[tuple[int, int]]] = {}
        self.noise = 0

    def both(self, handle: int, start: int, data: bytes) -> None:
        for memory in (self.memory, self.truth):
            memory[handle][start : start + len(data)] = data

    def write(self, handle: int, start: int, data: bytes, dtype: int = 0) -> None:
        size = len(data) * (2 if dtype else 1)
        self.put(self.truth, handle, start, data, dtype)
        for first, last in self.mirror.write((handle << ADDRESS_SHIFT) + start, size, data, dtype):
            assert 0 <= first < last <= len(data)
            assert not dtype or (first, last) == (0, len(data))
            self.put(self.memory, handle, start + first, data[first:last], dtype)

    @staticmethod
    def put(memory, handle: int, start: int, data: bytes, dtype: int) -> None:
        if dtype:
            # any conversion that depends on the type
            data = bytes(value ^ dtype for value in data for _ in range(2))
        memory[handle][start : start + len(data)] = data

    def other(self, handle: int, start: int, size: int) -> None:
        """Something that both ends know of, and whose bytes the mirror does not see."""
        self.noise += 1
        self.mirror.forget((handle << ADDRESS_SHIFT) + start, size)
        self.both(handle, start, bytes([self.noise % 256]) * size)

    def clear(self, handle: int) -> None:
        self.mirror.forget_buffer((handle << ADDRESS_SHIFT) + 5)
        self.both(handle, 0, bytes(SIZE))

    def free(self, handle: int) -> None:
        self.mirror.freed(handle)
        self.both(handle, 0, b"\xee" * SIZE)

    def graph(self, uid: int, spans: list[tuple[int, int]]) -> None:
        if uid in self.stored:
            spans = self.stored[uid]
            self.mirror.computes(uid)
        else:
            self.mirror.computes(uid, [(BASE + start, BASE + end) for start, end in spans])
            if uid:
                self.stored[uid] = spans
        self.noise += 1
        for start, end in spans:
            self.both(1, start, bytes([self.noise % 256]) * (end - start))

    def check(self) -> None:
        assert self.memory == self.truth


def spans_of(points: list[int]) -> list[tuple[int, int]]:
    """Ascending, without overlaps."""
    points = sorted(set(points))
    return list(zip(points[::2], points[1::2], strict=False))


@st.composite
def write(draw):
    """Few places and similar bytes, so that they meet."""
    start = draw(st.sampled_from([0, 8, 64, 100, 1000, 1024]))
    size = draw(st.sampled_from([1, 8, 64, 65, 300, 2500, 3000]))
    data = bytearray(draw(st.sampled_from([b"\0", b"\1"])) * size)
    for at in draw(st.lists(st.integers(0, size - 1), max_size=4)):
        data[at] ^= draw(st.integers(1, 255))
    dtype = draw(st.sampled_from([0, 0, 0, 1, 2])) if size <= 300 else 0
    return "write", draw(st.sampled_from(BUFFERS)), start, bytes(data), dtype


handles = st.sampled_from(BUFFERS)
steps = st.lists(
    write()
    | write()
    | st.tuples(st.just("other"), handles, st.integers(0, 2000), st.integers(0, 2000))
    | st.tuples(st.just("clear"), handles)
    | st.tuples(st.just("free"), handles)
    | st.tuples(
        st.just("graph"),
        st.integers(0, 3),
        st.lists(st.integers(0, SIZE), max_size=6).map(spans_of),
    ),
    max_size=60,
)


@given(steps=steps, patience=st.sampled_from([0, 2]))
@settings(max_examples=400, deadline=None)
def test_the_memory_is_what_was_meant(steps, patience):
    with pytest.MonkeyPatch.context() as patch:
        # so few that they are often full
        patch.setattr(mirror, "MAX_PLACES", 5)
        patch.setattr(mirror, "MAX_BYTES", 6000)
        patch.setattr(mirror, "MAX_PLACE", 2900)
        patch.setattr(mirror, "_PATIENCE", patience)
        patch.setattr(mirror, "GRAPH_LRU", 2)
        peer = Peer()
        for name, *arguments in steps:
            getattr(peer, name)(*arguments)
            peer.check()
            assert_sound(peer.mirror, 5, 6000)


def assert_sound(found: Mirror, places: int, size: int) -> None:
    """Its own books are in order, and within their bounds."""
    kept = sorted(found._places.values(), key=lambda place: place.start)
    assert [place.start for place in kept] == found._starts == sorted(found._places)
    assert found._size == sum(place.end - place.start for place in kept) <= size
    assert len(kept) <= places
    assert all(one.end <= two.start for one, two in pairwise(kept))


texts = st.integers(1, 5000).flatmap(
    lambda size: st.tuples(
        st.binary(min_size=1, max_size=4).map(lambda seed: (seed * size)[:size]),
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, 255)), min_size=1, max_size=40),
    )
)


@given(texts)
@settings(max_examples=300, deadline=None)
def test_changes_turn_the_old_into_the_new(found):
    old, edits = found
    new = bytearray(old)
    for at, value in edits:
        new[at] ^= value
    if new == old:
        return
    result = bytearray(old)
    spans = changes(old, bytes(new))
    for start, end in spans:
        assert 0 <= start < end <= len(new)
        result[start:end] = new[start:end]
    assert result == new
    assert all(one[1] < two[0] for one, two in pairwise(spans))


def test_an_identical_write_is_dropped():
    found = Mirror()
    assert found.write(BASE, 4, b"same") == [(0, 4)]
    assert found.write(BASE, 4, b"same") == []
    assert found.write(BASE, 4, b"diff") == [(0, 4)]


@pytest.mark.parametrize("size", [512, 8192])
def test_one_element_of_a_mask(size):
    found = Mirror()
    mask = bytearray(b"\xfc\0" * (size // 2))
    found.write(BASE, size, bytes(mask))
    for at in (100, 102, 104):
        mask[at : at + 2] = b"\0\0"
        (span,) = found.write(BASE, size, bytes(mask))
        assert span[0] <= at < span[1] <= span[0] + 8


def test_the_masks_of_several_sequences_are_several_parts():
    found = Mirror()
    mask = bytearray(8 * 4096)
    found.write(BASE, len(mask), bytes(mask))
    for row in range(8):
        mask[row * 4096 + 32] = 1
    assert found.write(BASE, len(mask), bytes(mask)) == [
        (row * 4096 + 32, row * 4096 + 40) for row in range(8)
    ]


def test_changes_all_over_are_one_part():
    found = Mirror()
    found.write(BASE, 9600, bytes(9600))
    assert found.write(BASE, 9600, (bytes(63) + b"\1") * 150) == [(56, 9600)]


def test_what_is_too_big_is_not_kept():
    found = Mirror()
    found.write(BASE, 8, b"12345678")
    big = bytes(MAX_PLACE + 1)
    assert found.write(BASE, len(big), big) == [(0, len(big))]
    assert found.write(BASE, len(big), big) == [(0, len(big))]
    # and it has written over what was there
    assert found.write(BASE, 8, b"12345678") == [(0, 8)]


def test_the_oldest_make_room():
    found = Mirror()
    for number in range(MAX_PLACES + 1):
        found.write(BASE + 16 * number, 8, b"12345678")
    assert found.write(BASE + 16, 8, b"12345678") == []
    assert found.write(BASE, 8, b"12345678") == [(0, 8)]
    big = bytes(MAX_PLACE)
    for number in range(1, 1 + MAX_BYTES // MAX_PLACE):
        found.write(BASE + number * 2 * MAX_PLACE, MAX_PLACE, big)
    assert found.write(BASE + 16, 8, b"12345678") == [(0, 8)]


def test_a_graph_that_was_forgotten_may_write_anywhere():
    found = Mirror()
    for uid in range(1, GRAPH_LRU + 2):
        found.computes(uid, [])
    found.write(BASE, 8, b"12345678")
    found.computes(2)
    assert found.write(BASE, 8, b"12345678") == []
    found.computes(1)
    assert found.write(BASE, 8, b"12345678") == [(0, 8)]


def test_a_graph_in_use_stays_known():
    found = Mirror()
    for uid in range(1, GRAPH_LRU + 2):
        found.computes(uid, [])
        found.computes(1)
    found.write(BASE, 8, b"12345678")
    found.computes(1)
    assert found.write(BASE, 8, b"12345678") == []


def test_a_place_that_is_new_is_looked_up_in_old_graphs():
    found = Mirror()
    found.computes(1, [(BASE, BASE + 8)])
    found.computes(1)
    found.write(BASE + 4, 8, b"12345678")
    found.write(BASE + 16, 8, b"12345678")
    found.computes(1)
    assert found.write(BASE + 4, 8, b"12345678") == [(0, 8)]
    assert found.write(BASE + 16, 8, b"12345678") == []


def test_a_graph_of_an_old_number_with_new_spans():
    found = Mirror()
    found.write(BASE, 8, b"12345678")
    found.computes(1, [])
    found.computes(1, [(BASE, BASE + 1)])
    assert found.write(BASE, 8, b"12345678") == [(0, 8)]


def test_what_was_converted_is_something_else():
    found = Mirror()
    found.write(BASE, 8, b"1234", 1)
    assert found.write(BASE, 8, b"1234", 1) == []
    assert found.write(BASE, 8, b"1234", 2) == [(0, 4)]
    assert found.write(BASE, 8, b"12345678") == [(0, 8)]
