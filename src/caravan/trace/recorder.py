"""`Recorder`: what a worker notes of one device: always totals, spans when somebody asked for them.

Whoever works for the device does it `with recorder.during(Kind.WAIT, size):`.
"""

from __future__ import annotations

from types import TracebackType

from caravan.trace.activity import COMPUTING, IDLE, SENDING, WAITING, Activity
from caravan.trace.spans import Kind, Span, Spans

# By kind. What is no use of the device's time by itself counts as idle.
_COUNTS_AS = [IDLE] * (max(Kind) + 1)
_COUNTS_AS[Kind.GRAPH] = COMPUTING
_COUNTS_AS[Kind.WAIT] = _COUNTS_AS[Kind.SET] = _COUNTS_AS[Kind.COPY_IN] = WAITING
_COUNTS_AS[Kind.REPLY] = _COUNTS_AS[Kind.COPY_OUT] = SENDING


class Recorder:
    """See the module. Any thread may call.

    `begin` and `end` are for those who learn only afterwards how many bytes it was.
    """

    __slots__ = ("activity", "spans")

    def __init__(self) -> None:
        self.activity = Activity()
        self.spans = Spans()

    def begin(self, kind: Kind) -> int:
        """Something begins on the caller's thread, who must call `end`; the time."""
        return self.activity.begin(_COUNTS_AS[kind])

    def end(self, kind: Kind, start: int, size: int = 0, key: int = 0, detail: int = 0) -> None:
        """It is over; see `Span` for the numbers."""
        end = self.activity.end(_COUNTS_AS[kind])
        if self.spans.on:
            self.spans.add(Span(start, end, kind, detail, size, key))

    def during(self, kind: Kind, size: int = 0, key: int = 0, detail: int = 0) -> During:
        """A context for what happens in it; see `Span` for the numbers."""
        return During(self, kind, size, key, detail)

    def switch(self, on: bool) -> None:
        """Start or stop keeping spans. What is left of an earlier recording goes."""
        if on and not self.spans.on:
            self.spans.take()
        self.spans.on = on


class During:
    """Something that is going on; counted and recorded also when it fails."""

    __slots__ = ("_detail", "_key", "_kind", "_recorder", "_size", "_start")

    def __init__(self, recorder: Recorder, kind: Kind, size: int, key: int, detail: int) -> None:
        self._recorder = recorder
        self._kind = kind
        self._size = size
        self._key = key
        self._detail = detail
        self._start = 0

    def __enter__(self) -> None:
        self._start = self._recorder.begin(self._kind)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recorder.end(self._kind, self._start, self._size, self._key, self._detail)
