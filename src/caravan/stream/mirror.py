"""`Mirror`: what a worker's memory holds where small writes went, so that it is not sent twice.

An identical write is dropped, of a similar one only what changed is sent. Used by `ExtLink` under
its lock, in the order in which commands are posted. Wherever anything else may have written, what
was there is forgotten: a write that is sent needlessly costs bytes, one that is not sent is wrong.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from caravan.wire.extension import ADDRESS_SHIFT, GRAPH_LRU

Span = tuple[int, int]
"""First address, and the one after the last."""

# One remembered write, and all of them: their bytes stay in the head's memory.
MAX_PLACE = 1 << 20
MAX_BYTES = 16 << 20
MAX_PLACES = 128

# Below, looking for the part that changed costs more than sending all of it: it takes 0.3 us, in
# which a link of 1 Gbit/s sends 40 bytes. Up to the second size one part is looked for, which takes
# 2 us at most; above, several are, in 8 us and more.
_MIN_NARROWED = 64
_ONE_PART = 2048
# Changes that are nearer to each other than this travel as one: each has a header of 16 bytes.
_GAP_WORDS = 4
_MAX_PARTS = 16
# Data that changes all over is looked at only every so many writes.
_PATIENCE = 32


class _Place:
    """Where a write went; `data` is None once something else may have written there."""

    __slots__ = ("data", "dtype", "end", "rest", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.data: bytes | None = None
        self.dtype = 0
        self.rest = 0


class Mirror:
    """The remembered writes of one device. No two places overlap."""

    def __init__(self) -> None:
        # the one that was written longest ago comes first
        self._places: OrderedDict[int, _Place] = OrderedDict()
        self._starts: list[int] = []
        self._size = 0
        self._written: OrderedDict[int, Sequence[Span]] = OrderedDict()
        # by graph: the places that it writes to, good as long as the places are the same
        self._doomed: dict[int, list[_Place]] = {}

    def __repr__(self) -> str:
        return f"<Mirror of {len(self._places)} places, {self._size} bytes>"

    def write(self, address: int, size: int, data: bytes, dtype: int = 0) -> list[Span]:
        """Remember a write of `size` bytes; the spans of it that must be sent, as offsets.

        Args:
            data: what travels; of another length than `size` where `dtype` says that the worker
                converts it. That is sent whole or not at all.
        """
        whole = [(0, len(data))]
        place = self._places.get(address)
        if place is None or place.end != address + size:
            place = self._new(address, size)
            if place is None:
                return whole
        else:
            self._places.move_to_end(address)
        old, place.data = place.data, data
        known, place.dtype = place.dtype, dtype
        if old is None or known != dtype:
            return whole
        if old == data:
            return []
        if dtype or size < _MIN_NARROWED:
            return whole
        if place.rest:
            place.rest -= 1
            return whole
        spans = changes(old, data)
        if len(spans) == 1 and 2 * (spans[0][1] - spans[0][0]) > size:
            place.rest = _PATIENCE
        return spans

    def forget(self, address: int, size: int) -> None:
        """Something else writes these bytes."""
        for place in self._within(address, address + size):
            place.data = None

    def forget_buffer(self, address: int) -> None:
        """Something writes to the buffer that has this address, who knows where."""
        start = address >> ADDRESS_SHIFT << ADDRESS_SHIFT
        self.forget(start, 1 << ADDRESS_SHIFT)

    def freed(self, handle: int) -> None:
        """A buffer is gone."""
        start = handle << ADDRESS_SHIFT
        for place in self._within(start, start + (1 << ADDRESS_SHIFT)):
            self._remove(place)

    def computes(self, uid: int, written: Sequence[Span] | None = None) -> None:
        """A graph is computed: what lies where its nodes write is lost.

        Args:
            uid: its number; 0 for one that is not computed again.
            written: where its nodes write, in ascending order and without overlaps; None: as when
                this graph was last computed.
        """
        if uid and written is not None:
            self._learn(uid, written)
        elif uid in self._written:
            self._written.move_to_end(uid)
        doomed = self._doomed.get(uid) if uid else None
        if doomed is None:
            doomed = self._overwritten(self._written.get(uid) if written is None else written)
            if uid in self._written:
                self._doomed[uid] = doomed
        for place in doomed:
            place.data = None

    def _learn(self, uid: int, written: Sequence[Span]) -> None:
        self._written[uid] = written
        self._written.move_to_end(uid)
        self._doomed.pop(uid, None)
        if len(self._written) > GRAPH_LRU:
            oldest, _ = self._written.popitem(last=False)
            self._doomed.pop(oldest, None)

    def _overwritten(self, written: Sequence[Span] | None) -> list[_Place]:
        """The places that these spans touch; all of them, when the spans are not known."""
        if written is None:
            return list(self._places.values())
        found: list[_Place] = []
        for place in self._places.values():
            # of the spans that begin before the place ends, the last one ends last
            before = bisect_left(written, (place.end, 0))
            if before and written[before - 1][1] > place.start:
                found.append(place)
        return found

    def _new(self, address: int, size: int) -> _Place | None:
        """A place that nothing overlaps any more; None for a size that is not remembered."""
        end = address + size
        for place in self._within(address, end):
            self._remove(place)
        if not 0 < size <= MAX_PLACE:
            return None
        while len(self._places) >= MAX_PLACES or self._size + size > MAX_BYTES:
            self._remove(next(iter(self._places.values())))
        place = self._places[address] = _Place(address, end)
        self._starts.insert(bisect_left(self._starts, address), address)
        self._size += size
        self._doomed.clear()
        return place

    def _remove(self, place: _Place) -> None:
        del self._places[place.start]
        del self._starts[bisect_left(self._starts, place.start)]
        self._size -= place.end - place.start
        self._doomed.clear()

    def _within(self, start: int, end: int) -> list[_Place]:
        """The places that have bytes in common with a span."""
        starts = self._starts
        first = max(0, bisect_right(starts, start) - 1)
        last = bisect_left(starts, end)
        near = (self._places[at] for at in starts[first:last])
        return [place for place in near if place.end > start and start < end]


def changes(old: bytes, new: bytes) -> list[Span]:
    """The parts in which two different texts of one length differ, few and in ascending order.

    A part may have equal bytes in it, where cutting it up would gain nothing.
    """
    size = len(new)
    if size <= _ONE_PART:
        bits = int.from_bytes(old, "little") ^ int.from_bytes(new, "little")
        return [(((bits & -bits).bit_length() - 1) >> 3, (bits.bit_length() + 7) >> 3)]
    words = size >> 3
    differ = np.frombuffer(old, np.uint64, words) != np.frombuffer(new, np.uint64, words)
    at = np.flatnonzero(differ)
    if old[words << 3 :] != new[words << 3 :]:
        at = np.append(at, words)
    cuts = np.flatnonzero(at[1:] - at[:-1] > _GAP_WORDS)
    if len(cuts) >= _MAX_PARTS:
        cuts = cuts[:0]
    firsts = at[[0, *(cuts + 1)]] << 3
    lasts = (at[[*cuts, len(at) - 1]] + 1) << 3
    return [
        (first, min(last, size))
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]
