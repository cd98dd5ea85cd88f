"""`Spans`: a bounded list of what happened from when to when, kept while somebody asked for it."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

LIMIT = 1 << 16


class Kind(IntEnum):
    """What a device, or somebody who works for it, was doing. The numbers are those of the wire."""

    GRAPH = 1
    BUILD = 2
    SET = 3
    REPLY = 4
    COPY_OUT = 5
    COPY_IN = 6
    WAIT = 7
    COPY = 8
    LOAD = 9


class Span(NamedTuple):
    """One record.

    Attributes:
        start, end: nanoseconds on the clock of the process that made it.
        kind: a `Kind`.
        detail: nodes of a graph; route of a copy to or from another device.
        size: bytes moved.
        key: uid of a graph; ticket of a copy, the same at both ends.
    """

    start: int
    end: int
    kind: int
    detail: int
    size: int
    key: int


class Spans:
    """A ring of the newest `limit` records. Any thread may add.

    Attributes:
        on: whether anything is kept; all that a recorder looks at while nobody wants a timeline.
        dropped: records that had to make room since the last `take`, to the nearest few.
    """

    __slots__ = ("_records", "dropped", "on")

    def __init__(self, limit: int = LIMIT) -> None:
        self.on = False
        self.dropped = 0
        self._records: deque[Span] = deque(maxlen=limit)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, span: Span) -> None:
        """Keep a record; the caller has looked at `on`."""
        records = self._records
        if len(records) == records.maxlen:
            self.dropped += 1
        records.append(span)

    def take(self) -> tuple[list[Span], int]:
        """The records that there are, in order of their ends, and how many were dropped before."""
        dropped, self.dropped = self.dropped, 0
        # one by one, because others go on adding; not more than there are now, or it might not end
        taken = []
        for _ in range(len(self._records)):
            try:
                taken.append(self._records.popleft())
            except IndexError:
                break
        return taken, dropped
